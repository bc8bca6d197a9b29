"""The front door: `poem.adapt`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn

from poem._util.nearest import nearest_names
from poem.accelerate import batch_norm, sample_norms
from poem.accelerate.capture import Fast
from poem.adapter import Adapter
from poem.engine.anatomy import anatomy, is_norm
from poem.engine.precision import Precision
from poem.guarded.guard import Guard, guard_adapter
from poem.guarded.settings import GuardSettings
from poem.parts.base import Need
from poem.parts.objective import FisherAnchor
from poem.recipes.known_losses import warn_of_loss
from poem.recipes.methods import Preset, recipe
from poem.recipes.recipe import ALIASES, FIELDS, Recipe

log = logging.getLogger("poem")
GUARD_WORDS = (*(each.name for each in fields(GuardSettings)), "on_event", "audit", "append", "about")
"""Settings of the guard, which `adapt` takes inside `guard=`."""
_HALF = "precision='bf16' runs the network in half precision; 'fp32', the default, does not"
ELSEWHERE = {
    "device": "move the model, model.to(...), and hand in images on the same device",
    "compile": "fast='auto', the default, records the loop as CUDA graphs on a GPU",
    "amp": _HALF, "autocast": _HALF, "dtype": _HALF, "half": _HALF, "bf16": _HALF, "fp16": _HALF,
}  # fmt: skip
"""Words that other libraries take, and what does it here."""
SAME_PRECISION = {
    "bfloat16": "bf16", "float16": "bf16", "fp16": "bf16", "half": "bf16", "float32": "fp32", "tfloat32": "tf32",
}  # fmt: skip
"""Other words for a precision, and the nearest that there is."""
_TOLD: set[str] = set()
"""Notes that were given, once a process."""


@overload
def adapt(
    model: nn.Module, method: None = ..., *, guard: Literal[True] | Mapping[str, Any] | None = ..., **settings: Any
) -> Guard: ...


@overload
def adapt(
    model: nn.Module, method: str | Recipe, *, guard: Literal[False] | None = ..., **settings: Any
) -> Adapter: ...


@overload
def adapt(
    model: nn.Module, method: str | Recipe, *, guard: Literal[True] | Mapping[str, Any], **settings: Any
) -> Guard: ...


@overload
def adapt(model: nn.Module, method: None = ..., *, guard: Literal[False], **settings: Any) -> Adapter: ...


def adapt(
    model: nn.Module,
    method: str | Recipe | None = None,
    *,
    lr: float | None = None,
    batch_size: int | None = None,
    classes: Sequence[int] | Tensor | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    source_data: Iterable[Any] | Tensor | None = None,
    split: str | None = None,
    preset: Preset | None = None,
    guard: bool | Mapping[str, Any] | None = None,
    seed: int = 0,
    fast: Fast = "auto",
    precision: Precision = "fp32",
    logits: Callable[[Any], Tensor] | None = None,
    example: Tensor | Mapping[str, Any] | None = None,
    **changes: Any,
) -> Adapter | Guard:
    """Turn a classifier into one that learns while it predicts.

    The model is borrowed, not copied: between calls it is as it came, and `adapter.unload()` gives it back.

    Args:
        model: Any module from a batch to logits: from one floating-point tensor, keywords or a dictionary.
        method: A name from `poem.methods()`, such as `"deyo+poem"`, or a `Recipe` of your own. Without one it is
            `"auto"`, guarded.
        lr: Learning rate; by default the method's rule by network family and batch size.
        batch_size: What the learning-rate rule, ROID and losses with `least` use; by default the first batch's.
        classes: Indices the logits are cut to, before softmax, entropy and thresholds.
        mean: Channel means, subtracted inside; methods that augment images need it, with images in [0, 1].
        std: Channel deviations, divided by inside.
        source_data: Images, or a loader of them, for EATA's Fisher anchor and for a guard's alarm of shifts.
        split: Name of the module whose input is the split point, where the structure does not show it.
        preset: Published constants: `"imagenet"`, `"cifar"` (or `"cifar10"`), `"cifar100"`. By default the first; for
            `"auto"` those that fit the number of classes.
        guard: Put a guard around it (`poem.guard`): the source answers beside it, and harm is seen and undone. A
            mapping gives the guard's settings, as in `guard={"budget": 0.02}`. By default only where no method is
            named: a method by name is what its paper says, nothing else.
        seed: Seed of the adapter's own random generator; the global one is left alone.
        fast: On a GPU, `"auto"` records the loop as CUDA graphs for a shape of batch that keeps coming, `True` for
            every shape at once, `False` never. What cannot be recorded runs as it is; `adapter.last.notes` says why.
        precision: `"fp32"`, `"tf32"` or `"bf16"` inside the network; everything else stays in full precision. On CUDA,
            `"fp32"` keeps torch's own switches, which let convolutions use TF32.
        logits: How to get logits from what the model returns, where that is not a tensor, `.logits` or `["logits"]`.
        example: Images to try the branch on now instead of at the first batch; nothing is learnt from them.
        changes: Fields of the recipe, and the aliases `threshold`, `rounds`, `alpha`, `depth`, `readout`.

    Returns:
        The adapter, or the guard around it; call it as the model, with images or any other floating-point tensor whose
        first axis is the batch.
    """
    guard = method is None if guard is None else guard
    method = "auto" if method is None else method
    if not (isinstance(fast, bool) or fast == "auto"):
        raise ValueError(f"expected fast 'auto', True or False, got {fast!r}")
    if precision not in get_args(Precision):
        word = str(precision).removeprefix("torch.").lower()
        near = [SAME_PRECISION[word]] if word in SAME_PRECISION else nearest_names(word, get_args(Precision))
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected precision fp32, tf32 or bf16, got {precision!r}{hint}")
    for word in changes:
        _own_word(word)
    name = method if isinstance(method, str) else "custom"
    if not isinstance(guard, bool | Mapping):
        raise TypeError(f"expected guard True, False or the guard's settings, got {guard!r}")
    if preset is None:
        preset = fitting_preset(model, classes) if method == "auto" else "imagenet"
    chosen = recipe(method, preset) if isinstance(method, str) else method
    if not isinstance(chosen, Recipe):
        raise TypeError(f"expected a method's name or a Recipe, got {type(method).__name__}")
    if isinstance(method, Recipe) and preset != "imagenet":
        log.warning("preset=%r holds for methods by name; a recipe is taken as it is", preset)
    if lr is not None:
        changes = {**changes, "lr": lr}
    # Built outside inference mode: what moves must be able to carry a gradient.
    with torch.inference_mode(False):
        adapter = Adapter(
            model, chosen.changed(changes), name=name, batch_size=batch_size, classes=classes, mean=mean, std=std,
            split=split, seed=seed, precision=precision, fast=fast, logits=logits,
        )  # fmt: skip
        if precision == "bf16":
            _note_bf16(adapter.model)
        waiting = adapter.recipe.first_with(Need.SOURCE_DATA)
        if waiting is not None and source_data is not None:
            adapter.prepare(source_data)
        elif isinstance(waiting, FisherAnchor):
            log.warning("%s has no source_data for its Fisher anchor and runs as ETA", name)
        elif waiting is not None:
            raise ValueError(f"{waiting!r} of {name} needs source images; pass source_data=")
        if example is not None:
            with adapter.frozen():
                adapter(example)
        if guard is False:
            warn_of_loss(name, model)
            return adapter
        own = {} if guard is True else dict(guard)
        if source_data is not None and not isinstance(source_data, Iterator):
            own.setdefault("source_data", source_data)
        return guard_adapter(adapter, **own)


def _note_bf16(model: nn.Module) -> None:
    """Say once where bf16 is not applied, or norm layers run without kernels of ours."""
    note = None
    if {each.dtype for each in model.parameters()} == {torch.float64}:
        note = "bf16 was not applied: the model is float64, which autocast leaves as it is; adapt model.float() for it"
    elif any(each.device.type in batch_norm.DEVICES for each in model.parameters()):
        norms = {type(each) for each in model.modules() if is_norm(each) and sample_norms.kind_of(each) is None}
        names = ", ".join(sorted(each.__name__ for each in norms - {nn.BatchNorm2d}))
        note = (
            f"norm layers that no kernel of poem is for, which torch computes, with the same answers: {names}"
            if names
            else None
        )
    if note is not None and note not in _TOLD:
        _TOLD.add(note)
        log.warning("%s", note)


def fitting_preset(model: nn.Module, classes: Sequence[int] | Tensor | None) -> Preset:
    """The published constants for so many classes, read from the last linear layer or the mask.

    Up to 20 classes those of CIFAR-10, up to 150 those of CIFAR-100, else ImageNet's; also where the number is unknown.
    """
    count = None if classes is None else len(classes)
    if count is None and isinstance(model, nn.Module):
        head = anatomy(model).head
        layer = None if head is None else model.get_submodule(head)
        count = layer.out_features if isinstance(layer, nn.Linear) else None
    if count is None or count > 150:
        return "imagenet"
    return "cifar" if count <= 20 else "cifar100"


def _own_word(word: str) -> None:
    """Refuses what is no field of a recipe but nearly an argument of `adapt`."""
    if word in GUARD_WORDS and word not in FIELDS + ALIASES:
        raise TypeError(f"adapt has no argument {word!r}: it is the guard's, guard={{{word!r}: ...}}")
    if word in ELSEWHERE:
        raise TypeError(f"adapt has no {word}: {ELSEWHERE[word]}")
    own = [name for name in inspect.signature(adapt).parameters if name != "changes"]
    near = nearest_names(word.lower(), own, cutoff=0.75)
    if near and word not in FIELDS + ALIASES:
        raise TypeError(f"adapt has no argument {word!r}. Did you mean {near[0]}?")
