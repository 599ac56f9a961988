"""The state of the runs in a folder, as shown by `python -m hfusion status`."""
