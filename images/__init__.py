"""The files that images are built from and checked with: Dockerfile, probe, version tables. Data, not code."""
