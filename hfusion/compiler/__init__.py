"""From one graph to the program of the array."""
