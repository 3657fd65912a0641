"""Nodes over ssh: configuration, host keys, keys, connections, commands, files."""
