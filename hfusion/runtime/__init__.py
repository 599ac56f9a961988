"""Train the tasks of a plan on real devices.

`worker` executes the engine's actions, `training` computes the units of one task and what crosses its cuts, and
`task_state` holds the tensors of shards.
"""
