"""``python -m hfusion.bench``: fused against unfused training, wins and losses alike."""
