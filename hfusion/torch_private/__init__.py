"""All uses of torch's private names, and all patches of torch. This folder imports nothing from other folders.

The table of these names is ``tests/torch_private/private_names.toml``. Tests check each row on the installed torch, and
that no other folder uses one.
"""
