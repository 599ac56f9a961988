"""Populations: members that join, leave and are copied while they train, with all of their state."""
