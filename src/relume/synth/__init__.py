"""Random checkpoints whose routing looks like that of a trained model."""
