"""Runners of cells: in this process, in worker processes, or on a Ray cluster. The results are the same."""

from poem.bench.runners.inline import Inline
from poem.bench.runners.ray_cluster import Ray
from poem.bench.runners.runner import CellEnded, CellProgress, CellStarted, Event, OnEvent, Runner
from poem.bench.runners.workers import Workers

__all__ = ["CellEnded", "CellProgress", "CellStarted", "Event", "Inline", "OnEvent", "Ray", "Runner", "Workers"]
