"""Passes: rewrites of captured graphs, and choices of how the operators of the array run."""
