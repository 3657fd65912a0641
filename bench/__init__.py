"""Benchmarks: each compares our code with the alternative that a user would choose, prints ratios and writes JSON."""
