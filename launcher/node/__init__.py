"""Reaching machines: the Engine seam and its three implementations, ssh, facts."""
