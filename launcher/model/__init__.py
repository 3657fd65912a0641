"""Frozen values that everyone speaks: what a node is, what a container is, what a plan is. No I/O."""
