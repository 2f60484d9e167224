"""Which experts come next, from what the decoder already knows: which tokens change, and into what."""
