"""Logs are files on the nodes, read by byte offset: nothing is lost or doubled, whatever happens to the connection."""
