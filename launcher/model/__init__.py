"""Frozen values that all packages share: a node's facts, a container, a plan. No I/O."""
