"""Comparison of runs: tables, plots and a page."""
