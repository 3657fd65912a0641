"""Benchmarks: each measures our code beside the alternative that a user would choose, prints ratios and writes JSON."""
