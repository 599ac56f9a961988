"""Scheduling of shards: plans, policies and timelines, without tensors."""
