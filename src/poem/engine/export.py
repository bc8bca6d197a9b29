"""The adapted weights as a plain module, for ONNX, torch.export or a checkpoint."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from poem.engine.model_input import ModelInput, read_input
from poem.engine.network import Network, log_odds, two_columns
from poem.engine.parameter_groups import HALF
from poem.engine.state import State
from poem.engine.twin import Translation
from poem.parts.base import Memory, Need, Outputs, inside
from poem.parts.readout import Uncorrected
from poem.parts.statistics import BatchLayer, FromBatch, Robust, RunningMean, Source, Statistics, moments
from poem.recipes.recipe import Recipe

log = logging.getLogger("poem")
ExportStatistics = Literal["recipe", "frozen"]
Moments = dict[str, tuple[Tensor, Tensor]]
HEAD = "heads.0."


class Exported(nn.Module):
    """Normalisation, one network or two, class mask. Two networks stand whole, side by side: plain beats small.

    With one network `state_dict` has the keys of the user's model, all of them, and loads into its class. With two, of
    a recipe with an adapt branch, keys begin with `heads.0.` and `heads.1.`.
    """

    def __init__(self, heads: list[nn.Module], network: Network, recipe: Recipe, memory: Memory) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self._branch, self._correct = recipe.branch, recipe.readout.correct
        owns = [dict(zip(network.model.modules(), head.modules(), strict=True)) for head in heads]
        self._logits = [Translation(own)(network.given_logits) for own in owns]
        for name in ("_mean", "_std", "_classes"):
            self.register_buffer(name, getattr(network, name), persistent=len(heads) > 1)
        self._remembered = self._hidden("remembered", memory)
        own_keys, mine = network.model.state_dict(), heads[0].state_dict()
        kept = {key: value for key, value in own_keys.items() if key not in mine and isinstance(value, Tensor)}
        self._kept = self._hidden(
            "kept", {key: value.clone() for key, value in kept.items()} if len(heads) == 1 else {}
        )

    def forward(self, images: Any = None, **further: Any) -> Tensor:
        """What the adapter answers when frozen; takes what the adapter takes."""
        given = images
        if further or not isinstance(images, Tensor):
            given = read_input(self.heads[0], images, further)
        images = given.images if isinstance(given, ModelInput) else given
        mean, std, classes = self._mean, self._std, self._classes
        if isinstance(mean, Tensor) and isinstance(std, Tensor):
            shape = (1, -1, *[1] * (images.dim() - 2))
            images = (images - mean.view(shape)) / std.view(shape)
        images = images.to(next(self.heads.parameters()).dtype)
        logits = []
        for head, logits_of in zip(self.heads, self._logits, strict=True):
            args, named = given.arguments(images.clone()) if isinstance(given, ModelInput) else ((images.clone(),), {})
            logits.append(logits_of(head(*args, **named)))
        logits = [each.float() if each.dtype in HALF else each for each in logits]
        one_logit = logits[0].shape[1] == 1
        logits = [each[:, classes] if isinstance(classes, Tensor) else two_columns(each) for each in logits]
        answer = logits[0] if self._branch is None else self._branch.together(logits[0], logits[1])
        memory = {name: getattr(self, key) for name, key in self._remembered.items()}
        answer = self._correct(Outputs(answer, tuple(logits)), memory)
        return log_odds(answer) if one_logit else answer

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """The weights: under the names of the user's model where there is one network."""
        if len(self.heads) > 1:
            return super().state_dict(*args, **named)
        prefix = named.get("prefix", args[1] if len(args) > 1 else "")
        found = self.heads[0].state_dict(*args, **named)
        found.update({f"{prefix}{name}": getattr(self, key) for name, key in self._kept.items()})
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Take weights under the names that `state_dict` gives."""
        if len(self.heads) == 1:
            keys = [key for key in state_dict if key.startswith(prefix)]
            found = {key.removeprefix(prefix): state_dict.pop(key) for key in keys}
            for name in self._kept.keys() & found.keys():
                getattr(self, self._kept[name]).copy_(found.pop(name))
            # A model with a `heads` of its own has such names too: the whole set of names decides.
            own = set(self.heads[0].state_dict())
            inner = len(found.keys() & {HEAD + name for name in own}) > len(found.keys() & own)
            state_dict.update({f"{prefix}{'' if inner else HEAD}{name}": value for name, value in found.items()})
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _hidden(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Tensors as buffers, which move with the module and are not saved: the name that each buffer has."""
        names = {name: f"_{kind}_{index}" for index, name in enumerate(tensors)}
        for name, key in names.items():
            self.register_buffer(key, tensors[name], persistent=False)
        return names


def exported(
    network: Network,
    recipe: Recipe,
    state: State,
    statistics: ExportStatistics = "recipe",
    batches: Iterable[Tensor | ModelInput] = (),
) -> nn.Module:
    """Copies of the model with the adapted values written into them, one per head.

    Args:
        network: Whose model is copied.
        recipe: Names the statistics and the readout.
        state: The adapted values, and what statistics remember.
        statistics: `"recipe"`: batch norm normalises as the recipe does; with `RunningMean`, with the average so far
            and without the batch in hand. `"frozen"`: with the stream's statistics, which are written into the running
            averages; a correction of the readout, which looks at other samples, is then left out.
        batches: For `"frozen"`, on what the statistics are measured where the recipe's remember nothing.

    Raises:
        ValueError: The recipe's statistics or readout depend on each batch and are not frozen.
    """
    part, frozen = recipe.statistics, statistics == "frozen"
    taught = recipe.teacher if recipe.readout.which == "teacher" else None
    values = state.moving if taught is None else state.teacher
    memory = inside(state.memory, "teacher") if taught is not None and taught.own_statistics else state.memory
    written: Moments | None
    if frozen:
        written = _frozen(network, part, values, memory, batches)
        recipe = _uncorrected(recipe)
    else:
        written = _as_recipe(network, part, memory)
        if Need.FEATURES in recipe.readout.correct.needs:
            raise ValueError(f"{recipe.readout.correct!r} reads features and cannot be exported; use readout=Readout()")
    heads = []
    for keys in [("theta",), ("theta", "branch")][: 1 + ("branch" in values)]:
        head = copy.deepcopy(network.model).eval()
        own = dict(head.named_parameters())
        for key in keys:
            group = network.theta if key == "theta" else network.branch
            assert group is not None
            with torch.no_grad():
                for name, value in group.named(values[key]).items():
                    own[name].copy_(value)
        names = [name for name, _ in network.model.named_modules()]
        deep = names[network.split_index :] if "branch" in keys else []
        _settle(head, written, deep)
        heads.append(head.requires_grad_(False))
    kind = type(network.model).__name__
    if len(heads) > 1:
        log.warning(
            "the recipe has an adapt branch, so the export holds two networks, with keys heads.0. and heads.1.; its "
            "state_dict does not load into %s", kind,
        )  # fmt: skip
    return Exported(heads, network, recipe, state.memory_of("readout.correct") if not frozen else {}).eval()


def _uncorrected(recipe: Recipe) -> Recipe:
    """The recipe without a correction of its answers, which depends on other samples."""
    correct = recipe.readout.correct
    if isinstance(correct, Uncorrected):
        return recipe
    log.warning("%r depends on other samples; the export with frozen statistics leaves it out", correct)
    return recipe.changed({"readout": type(recipe.readout)(recipe.readout.which)})


def _as_recipe(network: Network, part: Statistics, memory: Memory) -> Moments | None:
    """What is written into running averages, by the layer's key; None: layers take the batch's statistics."""
    if not isinstance(part, FromBatch | Robust | RunningMean | Source) and any(norm.batch for norm in network.norms):
        raise ValueError(
            f"{part!r} depends on each batch and cannot be exported; use statistics=Source(), or "
            "adapter.export(statistics='frozen')"
        )
    if isinstance(part, FromBatch):
        return None
    return {} if isinstance(part, Source) else _remembered(network, part, memory)


def _remembered(network: Network, part: Statistics, memory: Memory) -> Moments:
    """Each layer's statistics as they are remembered, the branch's own under `branch.`."""
    norms = [norm for norm in network.norms if norm.batch]
    keyed = [(norm, key) for norm in norms for key in (norm.key, f"branch.{norm.key}")]
    found = {key: part.frozen(norm, memory, key) for norm, key in keyed}
    return {key: each for key, each in found.items() if each is not None}


def _frozen(
    network: Network, part: Statistics, values: Memory, memory: Memory, batches: Iterable[Tensor | ModelInput]
) -> Moments:
    """The stream's statistics of each layer: remembered, or measured on these batches as the recipe normalises them."""
    norms = [norm for norm in network.norms if norm.batch]
    bare = [norm.name for norm in norms if norm.source_mean is None]
    if bare:
        raise ValueError(
            f"the layer {bare[0]!r} has no running averages to write into (track_running_stats=False), so its answers "
            "depend on the batch; export(statistics='recipe') keeps that"
        )
    if part.remembers or not norms:
        return _remembered(network, part, memory)
    watched = _Watched(part)
    theta, branch = values["theta"], values.get("branch")
    for given in batches:
        images, network.given = (given.images, given) if isinstance(given, ModelInput) else (given, None)
        with torch.no_grad(), network.borrowed(images.device.type):
            network.heads(
                images, theta if theta.numel() else None, branch, cast(Statistics, watched), memory,
                doubled=bool(network.doubles),
            )  # fmt: skip
        watched.close(len(images))
    network.given = None
    if not watched.seen:
        raise ValueError(
            f"{part!r} normalises with each batch's own statistics and remembers none; pass some of the stream: "
            "adapter.export(statistics='frozen', stream=images)"
        )
    return watched.together()


class _Watched:
    """Statistics of a recipe that note what each layer was normalised with."""

    only_in_training, copies = True, 1

    def __init__(self, part: Statistics) -> None:
        self.part, self.now, self.seen = part, Moments(), list[tuple[int, Moments]]()

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        return self.part(cast(BatchLayer, _WatchedLayer(layer, key, self.now)), x, mask, memory, key)

    def remember_layer(self, *_: Any) -> Memory:
        """Nothing: the state stays as it is."""
        return {}

    def normalised(self, *given: Any) -> tuple[Tensor, Memory]:
        """As the part normalises, and nothing to remember."""
        return self(*given), {}

    def close(self, rows: int) -> None:
        """The end of a batch."""
        self.seen.append((rows, self.now))
        self.now = {}

    def together(self) -> Moments:
        """Mean and variance of all batches' samples together."""
        total, keys = sum(rows for rows, _ in self.seen), {key for _, found in self.seen for key in found}
        result: Moments = {}
        for key in keys:
            each = [(rows / total, *found[key]) for rows, found in self.seen]
            mean = torch.stack([share * mean for share, mean, _ in each]).sum(0)
            spread = [share * (var + (own - mean).square()) for share, own, var in each]
            result[key] = mean, torch.stack(spread).sum(0)
        return result


class _WatchedLayer:
    """A layer whose statistics are noted as it is asked; the first pass of a batch counts."""

    def __init__(self, layer: BatchLayer, key: str, found: Moments) -> None:
        self._layer, self._key, self._found = layer, key, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def with_source(self, x: Tensor) -> Tensor:
        """As the layer came."""
        assert self._layer.source_mean is not None
        assert self._layer.source_var is not None
        self._found.setdefault(self._key, (self._layer.source_mean, self._layer.source_var))
        return self._layer.with_source(x)

    def with_batch(self, x: Tensor) -> Tensor:
        """With the statistics of `x`."""
        self._found.setdefault(self._key, moments(x, None))
        return self._layer.with_batch(x)

    def with_moments(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """With this mean and variance, which are noted for the layer."""
        self._found.setdefault(self._key, (mean, var))
        return self._layer.with_moments(x, mean, var)


def _settle(head: nn.Module, written: Moments | None, deep: list[str]) -> None:
    """Batch-norm layers with these statistics, or the batch's; `deep` are those with the branch's own."""
    for name, layer in head.named_modules():
        if not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            continue
        if written is None:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
            continue
        key = f"statistics.{name}"
        found = written.get(f"branch.{key}") if name in deep else None
        found = found or written.get(key)
        if found is not None and layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.copy_(found[0])
            layer.running_var.copy_(found[1])
