"""What the user holds: the fused module, losses per member."""
