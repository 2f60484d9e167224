"""The transformer around the experts, and the families of checkpoints that it runs."""
