"""Torch's private names and the patches of torch: only this folder uses them, and it imports nothing of hfusion.

``private_names.py`` is their table. Tests check each row on the installed torch, and that no other folder uses one.
"""
