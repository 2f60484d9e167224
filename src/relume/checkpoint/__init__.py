"""Official safetensors layouts, read in place and written."""
