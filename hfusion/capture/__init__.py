"""From modules to one graph."""
