"""Slurm clusters as an Engine: one for all nodes of a run, on the login machine."""
