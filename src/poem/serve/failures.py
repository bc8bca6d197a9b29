"""What a failure inside the service is called to whoever sent the request: one mapping for requests and commands."""

from __future__ import annotations

import torch

from poem.serve.problems import Problem, internal

BROKEN_STATE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, OverflowError)
"""What a state may raise that was not written by a service of this kind."""


def failed(error: Exception, *, learnt: bool = False) -> Problem:
    """A failure at any time: the folder's, or the service's own; `learnt` where the images may have been learnt from.

    A problem is itself.
    """
    if isinstance(error, Problem):
        return error
    if isinstance(error, OSError) and not learnt:
        return Problem(503, "no-storage", f"the service's folder cannot be used: {error}", retry_after=30)
    return internal(learnt=learnt)


def not_opened(error: Exception) -> Problem:
    """A failure while a stream's state was read, when nothing else was done yet."""
    if isinstance(error, BROKEN_STATE) and not isinstance(error, torch.OutOfMemoryError | Problem):
        detail = f"the stream's stored state cannot be used: {error}; delete the stream, or put another state"
        return Problem(503, "broken-state", detail)
    return failed(error)
