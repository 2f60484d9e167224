"""Retention policies."""
