"""`hf.Task`, `hf.plan` and `hf.train`."""
