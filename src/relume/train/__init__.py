"""Block-diffusion training of mixture-of-experts models, from scratch or from a checkpoint."""
