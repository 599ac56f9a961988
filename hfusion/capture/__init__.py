"""Capture modules as one graph."""
