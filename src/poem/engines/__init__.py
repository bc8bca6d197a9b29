"""Where cells are run: in this process, in worker processes, or on a Ray cluster. The results are the same."""

from poem.engines._events import Begun, Ended, Engine, Event, Moved, Tell
from poem.engines.cluster import Ray
from poem.engines.inline import Inline
from poem.engines.workers import Workers

__all__ = ["Begun", "Ended", "Engine", "Event", "Inline", "Moved", "Ray", "Tell", "Workers"]
