"""A Slurm cluster behind the same seam: one engine, its login machine, for all nodes of a run."""
