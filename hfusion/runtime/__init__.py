"""Train the tasks of a plan on real devices: tiers of memory, lanes that copy and compute, one loop.

``memory`` counts bytes, ``home`` holds the state of shards at rest, ``values`` what crosses the cuts, ``training``
computes the units of one task, ``executor`` decides and runs.
"""
