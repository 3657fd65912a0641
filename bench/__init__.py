"""Benchmarks: each measures ours side by side with what a user would do instead, prints ratios and writes JSON."""
