"""One run's life: prepare, start, watch, stop, diagnose."""
