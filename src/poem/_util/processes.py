"""Other processes: whether one exists, and worker processes that end with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading


def process_exists(pid: int) -> bool:
    """Whether a process of this machine has that id; True where the system refuses to tell."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True


def exit_with_parent() -> None:
    """Start a thread that ends this worker process when its parent has died, which `multiprocessing` does not do."""
    threading.Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
