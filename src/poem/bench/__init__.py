"""Measurements: one cell, many cells, suites of them, and what they say."""
