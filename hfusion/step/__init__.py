"""A training step as one program."""
