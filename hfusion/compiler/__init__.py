"""Compile one member's graph to the program of the array."""
