"""A state that comes over HTTP: what it says of its images and classes is checked before anything is allocated.

A state's file says of which shape its images were and how many classes there are, and both are used to allocate
tensors and to try the model. So they must be what this service takes and what this model answers.
"""

from __future__ import annotations

from typing import Any

import torch

from poem.adapter import Adapter
from poem.engine.network import two_columns
from poem.guarded.guard import Guard
from poem.serve.settings import MOST_CHANNELS, ServeSettings
from poem.streams.loading.prepare import Prepare


def checked_state(
    state: Any, adapter: Adapter | Guard, prepare: Prepare, settings: ServeSettings
) -> tuple[Any, tuple[int, ...] | None]:
    """A state from elsewhere as a stream may go on from it, and the shape of its images; None where none is known.

    A guard's budget starts anew: what it has seen and spent elsewhere cannot be checked here, and counts that somebody
    made up would let all answers differ. Each start alone keeps the share, so the answers of all of them do.

    Raises:
        ValueError: Images that the service does not take, or classes that the model does not have.
    """
    if not isinstance(state, dict):
        raise ValueError("expected a state from adapter.state_dict(), got something else")
    shape = _image(state.get("image"), prepare.crop, settings)
    classes = state.get("classes")
    if classes is not None:
        _check_classes(classes, shape, adapter)
    guard = state.get("guard")
    budget = guard.get("budget") if isinstance(guard, dict) else None
    if isinstance(guard, dict) and isinstance(budget, dict):
        state = {**state, "guard": {**guard, "budget": {**budget, "seen": 0, "spent": 0}}}
    return state, shape


def _image(image: Any, side: int | None, settings: ServeSettings) -> tuple[int, ...] | None:
    """The shape of a state's images, if it is one of this service's."""
    own = (3, side, side) if side else None
    if image is None:
        return own
    if not isinstance(image, list) or len(image) != 3 or not all(type(each) is int and each > 0 for each in image):
        raise ValueError(f"expected image to be the channels, height and width of one image, got {str(image)[:80]}")
    if own is not None and tuple(image) != own:
        raise ValueError(f"expected a state of images {own}, which is the model's size, got {str(image)[:80]}")
    if image[0] > MOST_CHANNELS or image[1] * image[2] > settings.max_pixels:
        raise ValueError(
            f"expected a state of images with at most {MOST_CHANNELS} channels and {settings.max_pixels} pixels, got "
            f"{str(image)[:80]}"
        )
    return tuple(image)


def _check_classes(classes: Any, shape: tuple[int, ...] | None, adapter: Adapter | Guard) -> None:
    """As many as the model answers for such an image."""
    if shape is None:
        raise ValueError("expected the shape of the images in a state that has classes, got none")
    blank = torch.zeros(1, *shape, device=next(adapter.model.parameters()).device)
    found = two_columns(adapter.source(blank)).shape[1]
    if type(classes) is not int or classes != found:
        raise ValueError(f"expected a state of {found} classes, as the model has, got {str(classes)[:80]}")
