"""Data loading: data set formats (open), sample order (sampler), augmentation (augment), decoding (loader)."""
