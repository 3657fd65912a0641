"""Data sets on every node: copied from one of them, or from this machine, in a chain, and verified."""
