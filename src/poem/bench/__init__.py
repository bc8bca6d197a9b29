"""Benchmarks: one cell, sweeps over many cells, suites of them, and their analysis."""
