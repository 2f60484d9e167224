"""Recorded traces replayed through the strategies that drive the live engine."""
