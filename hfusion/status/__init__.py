"""What the runs saved in a folder are doing: `python -m hfusion status`."""
