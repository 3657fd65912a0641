"""What is built into images and what runs inside them: Dockerfile, probe, version tables. Data, not code."""
