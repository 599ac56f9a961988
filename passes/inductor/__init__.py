"""Rewrites of a traced step for inductor."""
