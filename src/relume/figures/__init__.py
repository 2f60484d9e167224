"""Figures of what was measured or simulated. Only what draws imports matplotlib."""
