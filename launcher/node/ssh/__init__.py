"""Nodes over ssh: configuration, host keys, authentication, connections, commands."""
