"""Partition a program into shards."""
