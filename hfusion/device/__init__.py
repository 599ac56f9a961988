"""What the machine is, what it keeps and compiles."""
