"""Sweeps: the variants of a job one after another, over a pool of machines, or as a job array."""
