"""Access to nodes: the Engine interface and its three implementations, ssh, facts."""
