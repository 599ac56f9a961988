"""From a program to shards."""
