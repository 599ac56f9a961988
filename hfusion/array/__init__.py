"""The user's objects: the fused module, and losses per member."""
