"""The Engine implementation for plain processes on this machine: folders as containers, one supervisor per node."""
