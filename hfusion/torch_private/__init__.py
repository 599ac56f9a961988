"""All uses of torch's private names, and all patches of torch. This folder imports nothing from other folders.

``private_names.py`` is their table. Tests check each row on the installed torch, and that no other folder uses one.
"""
