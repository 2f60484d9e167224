"""The engine: requests in, tokens out, block by block."""
