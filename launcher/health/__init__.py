"""Which part of which node is slow: what is measured when, and what the measures say. Pure."""
