"""Files for building and checking images: Dockerfile, probe, version tables. Used as data, not imported."""
