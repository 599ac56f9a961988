"""Basic definitions and utilities that all other packages of hfusion use."""
