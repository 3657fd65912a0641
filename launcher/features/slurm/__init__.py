"""Jobs on a Slurm cluster: an engine, a plan whose text is an sbatch script, and the cluster's login machine."""
