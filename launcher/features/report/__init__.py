"""A report for a bug: one masked archive of a run."""
