"""A twin of the user's model, run with other tensors in place of its own.

The user's modules are never patched: forwards are replaced and parameters swapped on a twin that shares their tensors.
Several adapters may therefore borrow one model, each with its own twin and state, while others call it plainly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poem.engine.acceleration import Acceleration
from poem.engine.anatomy import is_norm
from poem.engine.model_input import ModelInput
from poem.engine.norm_layers import Doubled, ForwardContext, PatchedNorm, contiguous_on_cpu
from poem.engine.parameter_groups import HALF, ParameterGroup, Swap, by_module, memory_places, swapped
from poem.engine.precision import Autocast, Precision, enter_tf32, leave_tf32
from poem.engine.sample_rows import ConstantMoments
from poem.engine.tokens import Tokens
from poem.engine.twin import Twin
from poem.parts.base import Memory
from poem.parts.statistics import FromBatch, Source, Statistics

log = logging.getLogger("poem")


_HELD, _CHILDREN, _VALUES = attrgetter("_parameters", "_buffers"), attrgetter("_modules"), methodcaller("values")
"""What `model_key` asks every module for; in C, since it asks at every call."""


class Network:
    """Runs a twin of the user's model: normalisation before it, class mask after it, one head or two."""

    def __init__(
        self,
        model: nn.Module,
        *,
        theta: Sequence[str],
        branch: Sequence[str] | None = None,
        split: str | None = None,
        norms: Sequence[str] = (),
        head: str | None = None,
        classes: Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        logits: Callable[[Any], Tensor] | None = None,
        precision: Precision = "fp32",
        acceleration: Acceleration | None = None,
        per_sample: bool = False,
        blocks: tuple[str, str] | None = None,
    ) -> None:
        self.model, self.twin = model, Twin(model)
        root = self.twin.root
        modules = dict(root.named_modules())
        self.theta = ParameterGroup(root, theta)
        self.branch = None if branch is None else ParameterGroup(root, branch)
        self.groups = [self.theta, self.branch] if self.branch else [self.theta]
        self._own = list(model.modules())  # the user's
        self.modules = list(modules.values())
        """The twin's, in the order of `model.modules()`."""
        self._split = modules[split] if split is not None else None
        self._head = modules[head] if head is not None else None
        self._tokens = Tokens(modules, blocks) if blocks is not None else None
        self.given_logits = logits or tensor_of
        self.autocast = Autocast(precision)
        self._classes = None if classes is None else torch.as_tensor(classes, dtype=torch.long)
        self._largest = 0 if classes is None else max(classes)
        self._mean = None if mean is None else torch.as_tensor(mean)
        self._std = None if std is None else torch.as_tensor(std)
        self.one_logit = False
        """Whether the model has one logit per image, as the last pass showed; the engine then sees two classes."""
        self.given: ModelInput | None = None
        """The arguments that go along with the batch in hand; None where the model takes one tensor alone."""
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._current: ForwardContext | None = None
        self.acceleration = acceleration or Acceleration()
        self.acceleration.attach(self)
        holders = [{module for places in group.places for module, _ in places} for group in self.groups]
        inside = holders[1] if self.branch else set()
        self.norms = [
            PatchedNorm(name, modules[name], self._running, self.acceleration, swappable=modules[name] in inside)
            for name in norms
            if isinstance(modules[name], nn.modules.batchnorm._BatchNorm)
            or modules[name] in inside
            or (per_sample and modules[name] in holders[0])
        ]
        names = {module: name for name, module in modules.items()}
        self._adapted = {each: names[each] for each in [*(norm.layer for norm in self.norms), *set().union(*holders)]}
        self.forget_checks()
        self._patch()

    @property
    def head(self) -> nn.Linear | None:
        """The twin's last linear layer, where it was asked for and is one."""
        return self._head if isinstance(self._head, nn.Linear) else None

    def classify(self, features: Tensor) -> Tensor:
        """Logits of the last linear layer for features (B, D), cut to the classes; its own weights, as they came."""
        assert self.head is not None
        if self.given_logits is not tensor_of:
            raise ValueError(
                "a part of this recipe runs the last layer on other features, which logits= would skip; leave it out"
            )
        logits = F.linear(features.to(self.head.weight.dtype), self.head.weight, self.head.bias)
        return self._cut(logits.float() if logits.dtype in HALF else logits)

    def frozen_beyond_split(self) -> list[nn.Module]:
        """Modules of the deep part without adapted parameters, where there is a branch."""
        if self.branch is None or self._split is None:
            return []
        adapted = {id(parameter) for group in self.groups for parameter in group.own}
        deep = self.modules[self.split_index :]
        return [module for module in deep if not any(id(each) in adapted for each in module.parameters())]

    @property
    def split_index(self) -> int:
        """Where the deep part begins in the order of `model.modules()`; past the end without a split."""
        return len(self.modules) if self._split is None else self.modules.index(self._split)

    def is_doubled(self) -> bool:
        """Whether a pass is under way whose batch has been doubled at the split."""
        return self._current is not None and self._current.doubled

    def undoubled(self, x: Tensor) -> Tensor | None:
        """The tensor of which both halves of `x` are copies, where `x` is what the split made of it."""
        made = [] if self._current is None else self._current.twins
        return next((each.once for each in made if each.twice is x and each.equal), None)

    def forget_checks(self) -> None:
        """What was found out about the model on a batch is to be found out again on the next."""
        self.doubles: bool | None = None
        """Whether the doubled batch gives what two passes give; None before the first batch."""
        self.samples_independent: bool | None = None
        """Whether each sample's logits depend on its own rows alone (`check_rows`); None before that was tried."""
        self._untracked: bool | None = None  # whether the model writes into its input through `.data`
        self._reached = False  # whether a pass has shown that the model never calls the user's modules
        self.shared: set[str] = set()
        """Names of arguments beside the batch that came with another length than the batch's: no rows of samples."""
        self._columns: int | None = None  # logits of a pass that repeats the batch, compared with a plain pass's
        self._late_copies: bool | None = None  # whether copies may begin at the first batch norm; None: not tried yet
        self.acceleration.reset()
        self._dirty = True  # attributes that the model's forward set go too, with the twin that has them

    @property
    def settings(self) -> tuple[Any, ...]:
        """What an answer depends on beside the weights and the images: normalisation, class mask, precision."""
        held = (self._mean, self._std, self._classes)
        values = (None if each is None else tuple(each.flatten().tolist()) for each in held)
        return (*values, self.autocast.precision, self.autocast.caller)

    @property
    def hooked(self) -> bool:
        """Whether the user has hooks on any layer, which only a plain forward pass calls."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._own)

    def refresh(self) -> None:
        """Rebuild the twin where the user changed the model since the last call, or a call was interrupted."""
        changed = self.twin.changed()
        if self._dirty or changed:
            self._dirty = True  # until it is whole
            self.twin.rebuild()
            if changed:
                self._reached, self._untracked, self._late_copies, self._columns = False, None, None, None
                self.acceleration.hold(None)
                self.acceleration.model_changed()
            for group in self.groups:
                group.refresh()
            self._patch()

    def _patch(self) -> None:
        """Replace forwards on the twin, and register our hooks there."""
        present = set(self.twin.root.modules())
        lost = [name for module, name in self._adapted.items() if module not in present]
        known = set(self._own)
        lost += [name for name, module in self.model.named_modules() if is_norm(module) and module not in known]
        if lost:
            raise RuntimeError(f"the layer {lost[0]!r} was replaced since adapt(); unload the adapter and adapt again")
        self._logits = self.twin.translated(self.given_logits)
        for module in self._adapted:
            # A hook also keeps torch's fused transformer layers from reading the weights without calling the forward.
            module.register_forward_pre_hook(self._inside)
            if isinstance(module, nn.GroupNorm):
                module.register_forward_pre_hook(_contiguous_first)
        for norm in self.norms:
            norm.patch()
        self.acceleration.patch()
        if self._split is not None:
            self._split.register_forward_pre_hook(self._double, with_kwargs=True)
        if self._head is not None:
            self._head.register_forward_pre_hook(self._keep)
        if self._tokens is not None:
            self._tokens.patch(lambda: self._current)
        self._dirty = False

    def _inside(self, module: nn.Module, args: Any) -> None:
        """An adapted layer runs inside a forward pass, while its tensors are in place."""
        if self._current is None:
            raise RuntimeError(
                f"the layer {self._adapted[module]!r} ran again outside its forward pass, as gradient checkpointing "
                "does; switch that off, as in model.set_grad_checkpointing(False)"
            )

    def abandon(self) -> None:
        """After an interrupted call: global switches that it may have left on."""
        self.twin.unwatch()
        leave_tf32(self)

    def prepare_replay(self) -> None:
        """Before a captured batch is replayed: the twin is up to date. What accelerations copy is in the capture."""
        if self._dirty:
            self.refresh()

    @property
    def ready(self) -> bool:
        """Whether the twin is as the last call left it, that call having ended well."""
        return not self._dirty

    def call_key(self) -> tuple[Any, ...]:
        """What a captured pass depends on beside the model and its tensors: switches, whether batches are doubled."""
        switches = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return self.autocast.caller, *switches, self.doubles

    def model_key(self) -> int:
        """Where the model's tensors lie, and which modules it has.

        Settings of a layer, such as its `eps`, are read when a pass is captured.
        """
        children = chain.from_iterable(map(_VALUES, map(_CHILDREN, self._own)))
        return hash((*map(id, children), *memory_places(self.tensors())))

    def tensors(self) -> list[Tensor | None]:
        """The model's parameters and buffers, layer by layer; None where a layer could have one and has none."""
        return list(chain.from_iterable(map(_VALUES, chain.from_iterable(map(_HELD, self._own)))))

    def plain_tensors(self) -> list[Tensor]:
        """Tensors that are plain attributes of the model's modules, neither parameters nor buffers."""
        attributes = chain.from_iterable(map(_VALUES, map(vars, self._own)))
        return [each for each in attributes if isinstance(each, Tensor)]

    @contextmanager
    def borrowed(self, device: str) -> Iterator[None]:
        """A call of the adapter: the twin is up to date, and only this thread uses it until the block ends.

        Outside the network nothing runs under autocast: entropies, thresholds and updates keep full precision.
        """
        with ExitStack() as undo:
            self.autocast.note(device)
            self.refresh()
            self.acceleration.refresh()
            self._dirty = True  # until the block ends well: an interrupt may leave the twin half patched
            self._current = None
            undo.enter_context(torch.autocast(device, enabled=False))
            if self.autocast.precision == "tf32":
                undo.callback(leave_tf32, self)
                enter_tf32(self)
            try:
                yield
                self._dirty = False
            finally:
                self.acceleration.hold(None)

    def heads(
        self,
        images: Tensor,
        theta: Tensor | None,
        branch: Tensor | None,
        statistics: Statistics,
        memory: Memory,
        mask: Tensor | None = None,
        *,
        doubled: bool | None = None,
        training: bool = False,
        keep: Tensor | None = None,
    ) -> tuple[tuple[Tensor, ...], ForwardContext]:
        """Logits of each head, and what the pass recorded. `theta=None` runs the source's own tensors.

        Rows (B, P) of `theta` and `branch` give each sample its own; all rows have the same values.
        """
        copies = self.copies(statistics)
        run = ForwardContext(statistics, memory, mask, training=training, copies=copies, keep=keep)
        if branch is None or self.branch is None:
            return (self._merged(self._once(images, theta, run), run),), run
        swaps: dict[nn.Module, list[Swap]] = {}
        branch_rows = by_module(self.branch.swaps(branch)) if branch.dim() == 2 else {}
        for swap in self.branch.swaps(branch[0] if branch_rows else branch):
            swaps.setdefault(swap[0], []).append(swap)
        run.branch_rows = branch_rows
        if doubled if doubled is not None else self.doubles is not False:
            run.branch, run.swaps = "doubled", swaps
            both = self._once(images, theta, run)
            if len(both) != 2 * copies * len(images):
                raise RuntimeError(f"expected {2 * copies * len(images)} rows from the doubled batch, got {len(both)}")
            source, adapted = (self._merged(half, run) for half in both.chunk(2))
            return (source, adapted), run
        source = self._merged(self._once(images, theta, run), run)
        other = ForwardContext(
            statistics, memory, mask, branch="alone", swaps=swaps, record=run.record, ran=run.ran, training=training,
            copies=copies, branch_rows=branch_rows, keep=keep,
        )  # fmt: skip
        return (source, self._merged(self._once(images, theta, other), other)), run

    def attention(self, run: ForwardContext) -> Tensor | None:
        """What the class token attends to in a pass that is learnt from, (B, T), where a part needs it."""
        return None if self._tokens is None or not run.training else self._tokens.scores(run.attention)

    def in_model_shape(self, answer: Tensor) -> Tensor:
        """An answer (B, C) of the engine in the shape of the model's: log-odds (B, 1) where the model has one logit."""
        return log_odds(answer) if self.one_logit else answer

    def source(self) -> Memory:
        """The model's own values for each group, flat."""
        groups = {"theta": self.theta, "branch": self.branch}
        return {key: group.source() for key, group in groups.items() if group is not None}

    def copies(self, statistics: Statistics) -> int:
        """How often an image runs through the network in one pass."""
        return statistics.copies if any(norm.batch for norm in self.norms) else 1

    def batch_normalised(self, statistics: Statistics) -> bool:
        """Whether any layer's answer depends on the batch."""
        return isinstance(statistics, FromBatch) and any(norm.batch for norm in self.norms)

    def branch_gradient(self, images: Tensor, ask: Callable[[], Tensor]) -> Tensor:
        """The gradient of the branch's own loss."""
        coarse = self.autocast.coarse(self.model, cuda=images.is_cuda)
        return self.acceleration.branch_gradient(ask, 2e-2 if coarse else 1e-3)

    def check_rows(self, images: Tensor, rows: Memory) -> None:
        """See, once, that the last sample's logits depend on its own rows alone; a forward and a backward pass.

        Statistics of batch-norm layers are constants in this pass, since they couple samples that are else independent.
        Parameters that a model reads without calling their layer come from the first row, and so show too. A batch of
        one has no other sample's row, so nothing can go wrong there; the check waits for a larger one.

        Raises:
            ValueError: They depend on rows of other samples, or on none.
        """
        if self.samples_independent is not None or len(images) == 1:
            return
        leaves = {key: tensor.detach().requires_grad_() for key, tensor in rows.items()}
        with torch.enable_grad():
            # A view, which is not the tensor that results are cached for: other passes have other statistics.
            heads, _ = self.heads(images.view_as(images), leaves["theta"], leaves.get("branch"), ConstantMoments(), {})
            loss = sum((head[-1].square().sum() for head in heads), heads[0].new_zeros(()))
        found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        own = torch.cat([gradient[-1] for gradient in found]).abs().max()
        other = torch.cat([gradient[:-1] for gradient in found], 1).abs().max()
        if not own.isfinite() or not other.isfinite():
            return
        if own == 0 or other > 1e-3 * own:
            raise ValueError(
                f"Clipped() needs each sample's gradient, and in {type(self.model).__name__} a norm layer mixes "
                "samples, has another axis first than the batch, or is not called; leave the clipping out, as in "
                "step=SGD()"
            )
        self.samples_independent = True

    def _once(self, images: Tensor, theta: Tensor | None, run: ForwardContext) -> Tensor:
        """One pass through the model; logits in at least single precision.

        Copies of the batch differ from the first batch norm on, so that they begin there, where the model lets them.
        """
        whole = run.branch == "none" and self.given is None and (theta is None or theta.dim() == 1)
        if run.copies > 1 and whole and self._late_copies is None and len(images) > 1:
            self._late_copies = self._copies_may_begin_late(images, theta, run)
        run.copied = not (run.copies > 1 and whole and self._late_copies)
        return self._pass(images, theta, run)

    def _copies_may_begin_late(self, images: Tensor, theta: Tensor | None, run: ForwardContext) -> bool | None:
        """Whether copies that the first batch norm makes give what copies of the input give; tried once, on a batch.

        Not so where layers before it also lead past it, or the model counts the rows of its input. None where logits
        are not finite, which proves nothing.
        """
        early, late = (replace(run, record={}, ran=set(), copied=copied) for copied in (True, False))
        try:
            with torch.no_grad():
                expected, found = (self._pass(images, theta, each) for each in (early, late))
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
        if not bool(expected.isfinite().all()):
            return None
        near = 2e-2 if self.autocast.coarse(self.model, cuda=images.is_cuda) else 1e-3
        return late.copied and torch.allclose(found, expected, rtol=near, atol=near)

    def _pass(self, images: Tensor, theta: Tensor | None, run: ForwardContext) -> Tensor:
        """One call of the model."""
        x = self._input(images, run.copies if run.copied else 1)
        if theta is not None and theta.dim() == 2:
            run.theta_rows = by_module(self.theta.swaps(theta))
            theta = theta[0]  # for layers that do not run as such
        swaps = [*([] if theta is None else self.theta.swaps(theta)), *self.acceleration.swaps]
        cacheable = (
            theta is not None
            and not self._untracked
            and run.mask is None
            and not any("statistics." in key for key in run.memory)
        )
        self._current, run.rows = run, len(images) * run.copies
        try:
            with (
                swapped(swaps),
                self.autocast.context(x.device.type),
                self.acceleration.forward_pass(images, cacheable=cacheable),
            ):
                args, named = ((x,), {}) if self.given is None else self.given.arguments(x)
                output = self.twin.root(*args, **named) if self._reached else self._checked(x, args, named)
                logits = _logits_of(self._logits(output), type(self.model).__name__)
        finally:
            self._current = None
        times = (run.copies if run.copied else 1) * (2 if run.doubled else 1)
        if len(logits) != len(images) * times:
            raise ValueError(
                f"expected logits for {len(images)} images, got {len(logits) // times} rows; "
                "the model must answer each image of the batch"
            )
        if times > 1 and self.given is not None and self.given.along and logits.shape[1] != self._columns:
            self._check_columns(images, self.given, logits.shape[1])
        if run.features is not None and times > 1:  # of the network's own head, the mean over the copies
            own = run.features[: len(images) * run.copies]
            run.features = own.unflatten(0, (run.copies, -1)).mean(0)
        if logits.dtype in HALF:
            logits = logits.float()
        run.columns = logits.shape[1]
        return self._cut(logits)

    def _check_columns(self, images: Tensor, given: ModelInput, columns: int) -> None:
        """A pass in which the batch stands several times has as many classes as a plain one; raises where not."""
        plain = ForwardContext(Source(), {})
        with torch.no_grad():
            self._once(images, None, plain)
        if plain.columns != columns:
            names = ", ".join(map(repr, given.along))
            raise ValueError(
                f"expected {plain.columns} classes, as in a plain pass, got {columns} where the batch is repeated: "
                f"{names} has {len(given)} rows, as many as the batch, and is taken as one per sample. If it is the "
                "same for all samples, begin with a batch of another size, or keep it in the model as a buffer"
            )
        self._columns = columns

    def _merged(self, logits: Tensor, run: ForwardContext) -> Tensor:
        """One answer (B, C) for the copies of the batch; what the first head's remembers is recorded."""
        if run.copies == 1:
            return logits
        copies, place = logits.unflatten(0, (run.copies, -1)), run.statistics.source_copy
        run.source = copies[place] if run.source is None and place is not None else run.source
        answer, record = run.statistics.combine(copies, run.memory)
        for key, value in record.items():
            run.record.setdefault(key, value)
        return answer

    def _cut(self, logits: Tensor) -> Tensor:
        """The logits of the classes that the user asked for; one logit becomes those of two classes."""
        self.one_logit = logits.shape[1] == 1
        if self._classes is None:
            return two_columns(logits)
        if self.one_logit:
            raise ValueError(
                "expected several logits for classes= to choose from, got one per image, which the adapter reads as "
                "two classes (sigmoid); leave classes= out"
            )
        if self._largest >= logits.shape[1]:
            raise ValueError(f"expected classes below {logits.shape[1]}, the number of logits, got {self._largest}")
        return logits[:, self._near(self._classes, logits.device, torch.long)]

    def normalisation(self, images: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean and std by which images like these are normalised, shaped to fit them; None where they are not."""
        if self._mean is None or self._std is None:
            return None
        shape = (1, -1, *[1] * (images.dim() - 2))
        mean, std = (self._near(each, images.device, images.dtype).view(shape) for each in (self._mean, self._std))
        return mean, std

    def _input(self, images: Tensor, copies: int) -> Tensor:
        """What the model is called with: a tensor of our own, which it may write into, once for the images in hand."""

        def prepared() -> Tensor:
            x, scale = images, self.normalisation(images)
            if scale is not None:
                x = (x - scale[0]) / scale[1]
            x = self.acceleration.layout(x)
            x = x.to(next(self.twin.root.parameters(), x).dtype)
            if copies > 1:
                return x.repeat(copies, *[1] * (x.dim() - 1))
            return x.clone() if x.data_ptr() == images.data_ptr() else x

        key = "input", copies
        once: Tensor = prepared() if self._untracked else self.acceleration.once(key, images, prepared)
        return once

    def _checked(self, x: Tensor, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The first pass: does the model reach its layers through the twin, and does it write into its input unseen?"""
        before, version = x.clone(), x._version
        with self.twin.watched():
            output = self.twin.root(*args, **named)
        ran = self._running().ran
        silent = [norm.name for norm in self.norms if norm.batch and norm.name not in ran]
        if silent:
            log.warning("%d batch-norm layers did not run and are not adapted, such as %r", len(silent), silent[0])
        if x._version == version:
            self._untracked = not bool(((x == before) | x.isnan()).all())
        self._reached = True
        return output

    def _near(self, constant: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A constant of ours on another device, taken there once: nobody waits for it in every pass."""
        key = id(constant), device, dtype
        if key not in self._copies:
            self._copies[key] = constant.to(device, dtype)
        return self._copies[key]

    def _running(self) -> ForwardContext:
        """The pass under way."""
        assert self._current is not None
        return self._current

    def _double(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """At the split: every tensor along the batch stands twice, once per head."""
        run = self._current
        if run is None or run.branch != "doubled":
            return None
        run.doubled = True
        shared = [] if self.given is None else [self.given.further.get(name) for name in self.given.shared]

        def twice(value: Any) -> Any:
            along = isinstance(value, Tensor) and value.dim() > 1 and len(value) == run.rows
            along = along and not any(value is each for each in shared)
            if not along:
                return value
            run.twins.append(Doubled.of(value))
            return run.twins[-1].twice

        return tuple(twice(value) for value in args), {key: twice(value) for key, value in kwargs.items()}

    def _keep(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """At the head: its input, for corrections that read it."""
        if self._current is not None and args and isinstance(args[0], Tensor):
            self._current.features = args[0].flatten(1)


def _contiguous_first(_: nn.Module, args: tuple[Any, ...]) -> Any:
    """For the first adapted group norm, whose input needs no gradient."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.requires_grad or not torch.is_grad_enabled():
        return None
    return (contiguous_on_cpu(x), *args[1:])


def two_columns(logits: Tensor) -> Tensor:
    """Logits (B, 1), where sigmoid(z) is the probability of class 1, as those of two classes (0, z); others stay."""
    if logits.shape[1] > 1:
        return logits
    both: Tensor = F.pad(logits, (1, 0))
    return both


def log_odds(logits: Tensor) -> Tensor:
    """(B, 1) of logits of two classes: the second minus the first, so that sigmoid gives the probability of class 1.

    Finite where class 0 has probability 0, so that a certain answer differs from one that is not finite.
    """
    odds = logits[:, 1:] - logits[:, :1]
    valid = logits.amax(1, keepdim=True).isfinite()
    return torch.where(valid, odds.clamp(max=torch.finfo(odds.dtype).max), odds)


def tensor_of(output: Any) -> Any:
    """The logits in what a model returned: a tensor, `.logits`, or `["logits"]`; anything else is returned as it is."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def _logits_of(found: Any, model: str) -> Tensor:
    """The logits, if they are a tensor (batch, classes)."""
    if not isinstance(found, Tensor):
        raise TypeError(
            f"expected logits (a tensor, .logits or ['logits']), got {type(found).__name__}{_told_by(found, model)}; "
            "pass logits=lambda out: ..."
        )
    if found.dim() == 2:
        return found
    how = {
        1: "lambda out: out[:, None] for one logit per image (two classes)",
        3: "lambda out: out[:, 0] or out.mean(1): no method here adapts by several answers per sample (tokens, boxes)",
        4: f"lambda out: out.mean((2, 3)), the image's mean prediction: {model} answers for each pixel, which no "
        "method here adapts by (docs/segmentation.md)",
    }.get(found.dim(), "")
    raise ValueError(f"expected logits of shape (batch, classes), got {tuple(found.shape)}; pass logits={how}")


def _told_by(found: Any, model: str) -> str:
    """What an output without logits shows of the model: that it detects, segments, or compares as CLIP does."""
    first = found[0] if isinstance(found, list | tuple) and found else found
    if isinstance(first, Mapping) and {"boxes", "scores"} <= set(first):
        return (
            f" of boxes, labels and scores: {model} detects, and a list of boxes has no entropy to adapt by. What can "
            "be adapted is its backbone with a classifier"
        )
    if isinstance(found, Mapping) and isinstance(found.get("out"), Tensor) and found["out"].dim() == 4:
        return (
            f" with 'out' of shape {tuple(found['out'].shape)}: {model} segments, which no method here adapts by "
            "(docs/segmentation.md); by the image's mean prediction it can be adapted, logits=lambda out: "
            "out['out'].mean((2, 3))"
        )
    if hasattr(found, "logits_per_image"):
        return f" with logits_per_image: {model} compares images with texts; examples/05_clip.py has a wrapper for it"
    return f" with {', '.join(map(repr, list(found)[:6]))}" if isinstance(found, Mapping) else ""
