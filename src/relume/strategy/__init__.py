"""What stays near the compute, what is brought ahead, where a miss is computed, and how much each layer gets."""
