"""Logs are files on the nodes, read by byte offset: nothing is lost or duplicated if a connection is lost."""
