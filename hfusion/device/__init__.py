"""Devices of the machine: budgets, rates, caches, and native code."""
