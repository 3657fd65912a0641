"""Copies data sets to every node, from one of them or from this machine, along a chain of nodes, and verifies them."""
