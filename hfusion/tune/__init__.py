"""Sweeps: trials of an Optuna study, trained as members of arrays that trials join and leave."""
