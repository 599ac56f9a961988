"""Train the tasks of a plan on real devices.

`worker` executes the engine's actions, `training` computes the units of one task, `task_state` and `host_store` hold
the tensors of shards, `boundary` and `cut_values` the values that cross the cuts.
"""
