"""Before a run: its nodes are made ready, what it inherits is copied, and all of them are started, or none."""
