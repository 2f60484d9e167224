"""From a checkpoint to a packed folder."""
