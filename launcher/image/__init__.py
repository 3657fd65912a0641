"""Images: pinned, probed, repaired, verified and brought to every node. Never imports torch."""
