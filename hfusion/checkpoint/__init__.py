"""What is kept of arrays on disk: files that nothing can tear, and from which nothing is run."""
