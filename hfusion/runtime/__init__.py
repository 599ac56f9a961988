"""Train the tasks of a plan on real devices.

`worker` does what the engine decides, `training` computes the units of one task, `state` and `host_store` hold the
tensors of shards, `boundary` and `values` what crosses the cuts.
"""
