"""Estimated and measured costs of calls."""
