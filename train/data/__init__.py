"""From files to batches: which images (folder), in which order (sampler), which part of each (augment)."""
