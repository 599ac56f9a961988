"""Train many PyTorch models at once, each exactly as if alone."""
