"""Plain processes on this machine behind the same seam: folders as containers, a supervisor a node."""
