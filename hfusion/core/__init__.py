"""The words that every room uses."""
