"""Sweeps: many trials of Optuna as the members of arrays that live."""
