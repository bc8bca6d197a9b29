"""The comparison behind `auto` and the guard: every method, on streams of many kinds, sample by sample."""
