"""A batch as the model is called with it: one tensor, or one tensor and more arguments beside it.

The engine adapts on one floating-point tensor, whose first axis is the batch. Where a model takes keywords or a
dictionary, that tensor is one of its arguments, and the others are passed to every forward call unchanged. A call with
one tensor alone is not wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

LABELS = ("labels", "label")
"""Arguments that are not passed to the model, because no method may use labels."""
EMBED = (
    "embed them first, as in adapter(inputs_embeds=model.get_input_embeddings()(input_ids), attention_mask=mask), and "
    "adapt by a method that does not edit images"
)
"""What to type where the only tensors are token ids."""


@dataclass(frozen=True, eq=False)
class ModelInput:
    """The arguments of one forward call: the tensor that the engine adapts on, and the others by name.

    A further tensor whose first axis has the batch's length has a row for each sample, and is repeated where the batch
    is. One that had another length in an earlier call is passed whole, whatever its length is now.
    """

    images: Tensor
    name: str | None = None  # the parameter that `images` is passed as; None: as the first positional argument
    further: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False  # `forward` takes one dictionary with all arguments
    shared: frozenset[str] = frozenset()  # names of tensors that have no row for each sample

    def __len__(self) -> int:
        return len(self.images)

    @property
    def along(self) -> list[str]:
        """Names of further tensors with a row for each sample."""
        return [name for name, value in self.further.items() if self._rows(name, value)]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor, `images` first."""
        return [self.images, *(value for value in self.further.values() if isinstance(value, Tensor))]

    def arguments(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of `forward`, with `x` for `images`; `x` may be the batch repeated."""
        copies, rest = divmod(len(x), len(self.images))
        if self.along and (rest or copies < 1):
            raise RuntimeError(f"expected rows for {self.along[0]!r} along with {len(x)} samples, got {len(self)}")
        along = set(self.along)
        more = {name: _repeated(value, copies) if name in along else value for name, value in self.further.items()}
        if self.whole:
            return ({**more, str(self.name): x},), {}
        return ((x,), more) if self.name is None else ((), {self.name: x, **more})

    def noted(self, shared: set[str]) -> ModelInput:
        """A copy that passes the names in `shared` whole; names found here with another length are added to the set."""
        shared |= {name for name, value in self.further.items() if _long(value) and len(value) != len(self.images)}
        return replace(self, shared=frozenset(shared))

    def taken(self) -> ModelInput:
        """A copy whose further tensors are detached, and cloned where they are inference tensors."""
        return replace(self, further={name: _free(value) for name, value in self.further.items()})

    def cut(self, rows: slice) -> ModelInput:
        """Some of the samples: their rows of every tensor that has a row for each."""
        cut = {name: value[rows] if self._rows(name, value) else value for name, value in self.further.items()}
        return replace(self, images=self.images[rows], further=cut)

    def to(self, device: torch.device) -> ModelInput:
        """A copy with every tensor on a device."""
        moved = {name: _moved(value, device) for name, value in self.further.items()}
        return replace(self, images=_moved(self.images, device), further=moved)

    def _rows(self, name: str, value: Any) -> bool:
        return name not in self.shared and _long(value) and len(value) == len(self.images)


def read_input(model: nn.Module, images: Any, keywords: Mapping[str, Any]) -> Any:
    """A tensor where it is the only argument, else a `ModelInput`; an object of another type is returned unchanged.

    Args:
        model: The arguments are matched with the parameters of its `forward`.
        images: A tensor, a mapping of arguments, a `ModelInput`, or None where all arguments are keywords.
        keywords: Further arguments by name.

    Raises:
        TypeError: No batch, a name that the model does not take, or no floating-point tensor among the arguments.
    """
    if isinstance(images, ModelInput) or not (keywords or images is None or isinstance(images, Mapping)):
        return images
    named = images is None or isinstance(images, Mapping)
    given = {**(images if isinstance(images, Mapping) else {}), **keywords}
    given = {name: value for name, value in given.items() if name not in LABELS}
    if not named and not given:
        return images
    if not given:
        raise TypeError("expected a batch, got no argument; call adapter(x), or adapter(pixel_values=x) by keyword")
    strange = [name for name in given if not isinstance(name, str)]
    if strange:
        raise TypeError(f"expected a mapping from argument names to tensors, got the key {strange[0]!r}")
    if not named:
        _known(model, given, first=True)
        return ModelInput(images, None, given)
    whole = _known(model, given, first=False) if not keywords else _known(model, given, first=False, whole=False)
    name = _worked_on(model, given)
    further = {key: value for key, value in given.items() if key != name}
    if not further and not whole and name == next(iter(_parameters(model)), None):
        return given[name]  # the same as adapter(x)
    return ModelInput(given[name], name, further, whole)


def not_taken(model: nn.Module, given: ModelInput) -> str:
    """The error message for a model whose `forward` takes neither these names nor a dictionary."""
    kind, takes = type(model).__name__, ", ".join(_parameters(model))
    names = ", ".join(map(repr, [given.name, *given.further]))
    return f"{kind} takes no dictionary, and no argument of {names}; it takes {takes}: hand adapter() the tensor"


def moved_input(item: Any, device: torch.device) -> Any:
    """A batch of a loader on a device: a tensor, or a mapping with its tensors there."""
    if isinstance(item, Mapping):
        return {name: _moved(value, device) for name, value in item.items()}
    return _moved(item, device)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """The parameters of the model's forward, in order."""
    try:
        return dict(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # not written in Python
        return {"args": inspect.Parameter("args", inspect.Parameter.VAR_KEYWORD)}


def _known(model: nn.Module, given: Mapping[str, Any], *, first: bool, whole: bool = True) -> bool:
    """Raise TypeError for names that `forward` does not take; return whether it takes one dictionary of them."""
    found = list(_parameters(model).values())
    found = found[1:] if first else found
    plain = [each for each in found if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    names, needed = [each.name for each in plain], [each.name for each in plain if each.default is each.empty]
    strange = [name for name in given if name not in names]
    missing = [name for name in needed if name not in given]
    if not missing and (not strange or any(each.kind == each.VAR_KEYWORD for each in found)):
        return False
    if whole and not first and len(needed) == 1 and missing:
        return True
    kind, takes = type(model).__name__, f"it takes {', '.join(names) or 'none'}"
    if strange:
        raise TypeError(f"{kind} takes no argument {strange[0]!r}; {takes}: leave the others out")
    raise TypeError(f"{kind} needs {missing[0]!r} beside {', '.join(given)}; {takes}")


def _worked_on(model: nn.Module, given: Mapping[str, Any]) -> str:
    """The name of the tensor to adapt on: the largest floating-point one with two axes or more; the first of equals."""
    order = {name: place for place, name in enumerate(_parameters(model))}
    names = sorted(given, key=lambda name: order.get(name, len(order)))
    tensors = {name: given[name] for name in names if isinstance(given[name], Tensor)}
    found = [name for name, value in tensors.items() if value.is_floating_point() and value.dim() > 1]
    if found:
        return max(found, key=lambda name: tensors[name].numel())  # not a mask, which may be floating point too
    came = ", ".join(f"{name} of {tensors[name].dtype}" if name in tensors else name for name in names)
    if any(not value.is_floating_point() and value.dim() > 1 for value in tensors.values()):
        raise TypeError(f"expected a floating-point tensor (batch, ...) among the arguments, got {came}; {EMBED}")
    raise TypeError(f"expected a floating-point tensor (batch, ...) among the arguments, got {came}")


def _long(value: Any) -> bool:
    """Whether a value is a tensor that has a length."""
    return isinstance(value, Tensor) and value.dim() > 0


def _repeated(value: Tensor, copies: int) -> Tensor:
    return value if copies == 1 else value.repeat(copies, *[1] * (value.dim() - 1))


def _free(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.is_inference() else value.detach()


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
