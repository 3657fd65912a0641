"""Pin, probe, repair and verify images, and copy them to every node. Never imports torch."""
