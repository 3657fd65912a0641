"""The caller's side of a run: runs/<run id>/, a cache of what the nodes know, and what was fetched from them."""
