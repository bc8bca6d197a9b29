"""Where cells are run: in this process, in worker processes, or on a Ray cluster. The results are the same."""

from poem.bench.runners.inline import Inline
from poem.bench.runners.ray_cluster import Ray
from poem.bench.runners.runner import Begun, Ended, Engine, Event, Moved, Tell
from poem.bench.runners.workers import Workers

__all__ = ["Begun", "Ended", "Engine", "Event", "Inline", "Moved", "Ray", "Tell", "Workers"]
