"""Interval refresh, as TIDE does it (arXiv 2605.20179): when, what it costs, and the interval that costs least."""
