"""Checkpoints of arrays: written atomically, and without executable code."""
