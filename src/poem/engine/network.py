"""A twin of the user's model, run with other tensors in place of its own.

The user's modules are never patched: forwards are replaced and parameters swapped on a twin that shares their tensors.
Several adapters may therefore borrow one model, each with its own twin and state, while others call it plainly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from poem.accelerate.batch_norm import work
from poem.accelerate.half_backward import Halves
from poem.accelerate.prefix_cache import Early
from poem.accelerate.weight_casts import Casts, Swap, packed, whereabouts
from poem.engine.anatomy import is_norm
from poem.engine.borrowed import HALF, Group
from poem.engine.norm_layers import BorrowedNorm, Pass, swapped
from poem.engine.twin import Twin
from poem.parts.base import Memory
from poem.parts.statistics import FromBatch, Source, Statistics

if TYPE_CHECKING:
    from poem.accelerate.compiled import Compiled

log = logging.getLogger("poem")
MISFITS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""What a model raises that cannot take a batch; not what a signal handler does, such as TimeoutError."""
Precision = Literal["fp32", "tf32", "bf16"]


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
        compile: bool = False,
    ) -> None:
        self.model, self.twin = model, Twin(model)
        root = self.twin.root
        modules = dict(root.named_modules())
        self.theta = Group(root, theta)
        self.branch = None if branch is None else Group(root, branch)
        self._groups = [self.theta, self.branch] if self.branch else [self.theta]
        self._own = list(model.modules())  # the user's
        self._all = list(modules.values())  # ours
        self._split = modules[split] if split is not None else None
        self._head = modules[head] if head is not None else None
        self.given_logits = logits or tensor_of
        self._precision = precision
        self._classes = None if classes is None else torch.as_tensor(classes, dtype=torch.long)
        self._largest = 0 if classes is None else max(classes)
        self._mean = None if mean is None else torch.as_tensor(mean)
        self._std = None if std is None else torch.as_tensor(std)
        self._tracing = False
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        self._current: Pass | None = None
        self._autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16)
        holders = [{module for places in group.places for module, _ in places} for group in self._groups]
        inside = holders[1] if self.branch else set()
        moving = {id(parameter) for group in self._groups for parameter in group.own}
        self._casts = Casts(self._all, moving, torch.bfloat16) if precision == "bf16" else None
        self.early = Early(self._all, set().union(*holders), self.twin.hooked)
        self._passes = _compiler(self.early) if compile else None
        deep = list(modules)[list(modules).index(split) :] if branch and split is not None else []
        still = [modules[name] for name in deep if not any(id(p) in moving for p in modules[name].parameters())]
        self.halves = Halves(still, lambda: self._current is not None and self._current.doubled)
        self.norms = [
            BorrowedNorm(name, modules[name], self._running, swappable=modules[name] in inside)
            for name in norms
            if isinstance(modules[name], nn.modules.batchnorm._BatchNorm) or modules[name] in inside
        ]
        names = {module: name for name, module in modules.items()}
        self._adapted = {each: names[each] for each in [*(norm.layer for norm in self.norms), *set().union(*holders)]}
        self.forget_proofs()
        self._patch()

    def forget_proofs(self) -> None:
        """What was found out about the model on a batch is to be found out again on the next."""
        self.doubles: bool | None = None
        """Whether the doubled batch gives what two passes give; None before the first batch."""
        self.alone: bool | None = None
        """Whether samples get the same logits alone as among others; None before it was tried."""
        self._untracked: bool | None = None  # whether the model writes into its input through `.data`
        self._reached = False  # whether a pass has shown that the model never calls the user's modules
        self.halves.right = None
        self.early.forget()
        self._dirty = True  # attributes that the model's forward set go too, with the twin that has them

    @property
    def settings(self) -> tuple[Any, ...]:
        """What an answer depends on beside the weights and the images: normalisation, class mask, precision."""
        held = (self._mean, self._std, self._classes)
        values = (None if each is None else tuple(each.flatten().tolist()) for each in held)
        return (*values, self._precision, self._autocast)

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
                self._reached, self._untracked = False, None
                self.early.forget()
            for group in self._groups:
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
        for norm in self.norms:
            norm.patch()
        self.halves.patch()
        self.early.patch()
        if self._split is not None:
            self._split.register_forward_pre_hook(self._double, with_kwargs=True)
        if self._head is not None:
            self._head.register_forward_pre_hook(self._keep)
        self._dirty = False

    def _inside(self, module: nn.Module, args: Any) -> None:
        """An adapted layer runs inside a forward pass, while its tensors are in place."""
        if self._current is None:
            raise RuntimeError(
                f"the layer {self._adapted[module]!r} ran again outside its forward pass, as gradient checkpointing "
                "does; switch that off, as in model.set_grad_checkpointing(False)"
            )

    def abandon(self) -> None:
        """After a call that broke off: global switches that it may have left."""
        self.twin.unwatch()
        _leave_tf32(self)

    def meet(self, device: str) -> None:
        """Take note of the caller's autocast, which a pass and its recording depend on."""
        self._autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def recast(self) -> None:
        """Copy the frozen weights as they are now to where passes in half precision read them."""
        if self._dirty:
            self.refresh()
        if self._casts is not None:
            self._casts.refresh()

    def depends(self) -> tuple[Any, ...]:
        """All that a recorded or compiled pass depends on, beside the tensors that are handed in.

        Where the model's tensors lie, which modules it has, and torch's switches. Settings of a layer, such as its
        `eps`, are read when it is recorded.
        """
        held = [each for module in self._own for each in (module._parameters, module._buffers) if each]
        children = [id(child) for module in self._own if module._modules for child in module._modules.values()]
        where = hash((*children, *whereabouts([tensor for each in held for tensor in each.values()])))
        switches = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        return self._autocast, *switches, self.doubles, where

    @contextmanager
    def borrowed(self, device: str) -> Iterator[None]:
        """A call of the adapter: the twin is up to date, and only this thread uses it until the block ends.

        Outside the network nothing runs under autocast: entropies, thresholds and updates keep full precision.
        """
        with ExitStack() as undo:
            self.meet(device)
            self.refresh()
            self.recast()
            self._dirty = True  # until the block ends well: an interrupt may leave the twin half patched
            self._current, self._tracing, self.halves.branch_alone = None, False, False
            undo.enter_context(torch.autocast(device, enabled=False))
            if self._precision == "tf32":
                undo.callback(_leave_tf32, self)
                _enter_tf32(self)
            try:
                yield
                self._dirty = False
            finally:
                self.early.hold(None)

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
    ) -> tuple[tuple[Tensor, ...], Pass]:
        """Logits of each head, and what the pass recorded. `theta=None` runs the source's own tensors."""
        run = Pass(statistics, memory, mask, traced=self._tracing)
        if self._passes is not None and not self._tracing and doubled is None and not self.hooked:
            return self._heads_compiled(images, theta, branch, run), run
        if branch is None or self.branch is None:
            return (self._once(images, theta, run),), run
        swaps: dict[nn.Module, list[Swap]] = {}
        for swap in self.branch.swaps(branch):
            swaps.setdefault(swap[0], []).append(swap)
        if doubled if doubled is not None else self.doubles is not False:
            run.branch, run.swaps = "doubled", swaps
            both = self._once(images, theta, run)
            if len(both) != 2 * len(images):
                raise RuntimeError(f"expected {2 * len(images)} rows from the doubled batch, got {len(both)}")
            source, adapted = both.chunk(2)
            run.features = None if run.features is None else run.features.chunk(2)[0]
            return (source, adapted), run
        source = self._once(images, theta, run)
        other = Pass(statistics, memory, mask, branch="alone", swaps=swaps, record=run.record, ran=run.ran,
                     traced=self._tracing)  # fmt: skip
        return (source, self._once(images, theta, other)), run

    def _heads_compiled(
        self, images: Tensor, theta: Tensor | None, branch: Tensor | None, run: Pass
    ) -> tuple[Tensor, ...]:
        """The same, compiled once for each kind of pass; what it recorded is put into `run`."""
        assert self._passes is not None
        known = {key: value for key, value in run.memory.items() if "statistics." in key}
        given = {"images": images, "theta": theta, "branch": branch, "mask": run.mask, **known}
        inputs = {key: value for key, value in given.items() if value is not None}

        def plainly(*tensors: Tensor) -> tuple[list[Tensor], tuple[int, bool, list[str]]]:
            now = dict(zip(inputs, tensors, strict=True))
            self._tracing = True
            try:
                heads, traced = self.heads(
                    now["images"], now.get("theta"), now.get("branch"), run.statistics,
                    {key: now[key] for key in known}, now.get("mask"),
                )  # fmt: skip
            finally:
                self._tracing = False
            more = [] if traced.features is None else [traced.features]
            return [*heads, *more, *traced.record.values()], (len(heads), bool(more), list(traced.record))

        work(images.device)  # tried before anything is written down
        kind = run.statistics, *inputs, *self.depends()
        outputs, (count, features, record) = self._passes(kind, plainly, inputs)
        run.features = outputs[count] if features else None
        run.record = dict(zip(record, outputs[count + features :], strict=True))
        return outputs[:count]

    def forget(self) -> None:
        """Let go of copied weights and compiled passes."""
        if self._casts is not None:
            self._casts.forget()
        if self._passes is not None:
            self._passes.forget()

    def source(self) -> Memory:
        """The model's own values for each group, flat."""
        groups = {"theta": self.theta, "branch": self.branch}
        return {key: group.source() for key, group in groups.items() if group is not None}

    def batch_normalised(self, statistics: Statistics) -> bool:
        """Whether any layer's answer depends on the batch."""
        return isinstance(statistics, FromBatch) and any(norm.batch for norm in self.norms)

    def apart(self, statistics: Statistics) -> bool:
        """Whether no sample sees another (no batch norm but the source's), and passes of any size are welcome."""
        mixing = [norm for norm in self.norms if norm.batch]
        if isinstance(statistics, Source):
            mixing = [norm for norm in mixing if norm.source_mean is None]
        return self._passes is None and not mixing and self.alone is not False

    def prove(self, images: Tensor, statistics: Statistics, memory: Memory) -> float:
        """How far the doubled pass is from two plain ones, each half with its own tensors; decides `doubles`.

        The branch is moved away from the source first, so that a deep part that mixes samples cannot hide.
        """
        assert self.branch is not None
        start = self.branch.source()
        moved = start + 0.1 * torch.cos(torch.arange(start.numel(), device=start.device)).to(start.dtype)
        plain, run = self.heads(images, None, moved, statistics, memory, doubled=False)
        silent = [norm.name for norm in self.norms if norm.swappable and norm.name not in run.ran]
        if silent:
            raise ValueError(f"the branch's layers {silent[:3]} do not run through their own forward; pass split=")
        try:
            doubled, _ = self.heads(images, None, moved, statistics, memory, doubled=True)
            far = max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(doubled, plain, strict=True))
        except MISFITS:  # whatever a model does with a batch of another size, two passes are right
            far = torch.inf
        self.doubles = far < (5e-2 if self.coarse(images) else 1e-3)
        return far

    def coarse(self, images: Tensor) -> bool:
        """Whether the network computes in less than single precision, so that equal passes differ visibly."""
        tf32 = images.is_cuda and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32)
        half = self._autocast[0] or next(self.model.parameters()).dtype in HALF
        return self._precision != "fp32" or tf32 or half

    def branch_gradient(self, images: Tensor, ask: Callable[[], Tensor]) -> Tensor:
        """The gradient of the branch's own lesson, through its half of the doubled batch where that is right."""
        return self.halves.gradient(ask, 2e-2 if self.coarse(images) else 1e-3)

    def _once(self, images: Tensor, theta: Tensor | None, run: Pass) -> Tensor:
        """One pass through the model; logits in at least single precision."""
        x = self._input(images)
        swaps = [] if theta is None else self.theta.swaps(theta)
        if self._casts is not None:
            swaps = [*swaps, *self._casts.swaps]
        plain = (
            theta is not None
            and not self._tracing
            and not self._untracked
            and run.mask is None
            and not any("statistics." in key for key in run.memory)
        )
        self._current, run.rows = run, len(images)
        try:
            with swapped(swaps), self._computing(x.device.type), self.early.passing(images, plain=plain):
                call = self.twin.root if self._reached or self._tracing else self._checked
                logits = _logits_of(self._logits(call(x)))
        finally:
            self._current = None
        if len(logits) != len(images) * (2 if run.doubled else 1):
            raise ValueError(
                f"expected logits for {len(images)} images, got {len(logits) // (2 if run.doubled else 1)} rows; "
                "the model must answer each image of the batch"
            )
        if logits.dtype in HALF:
            logits = logits.float()
        if self._classes is None:
            return logits
        if self._largest >= logits.shape[1]:
            raise ValueError(f"expected classes below {logits.shape[1]}, the number of logits, got {self._largest}")
        return logits[:, self._near(self._classes, logits.device, torch.long)]

    def _input(self, images: Tensor) -> Tensor:
        """What the model is called with: a tensor of our own, which it may write into, once for the images in hand."""

        def prepared() -> Tensor:
            x = images
            if self._mean is not None and self._std is not None:
                shape = (1, -1, *[1] * (images.dim() - 2))
                mean, std = (self._near(each, x.device, x.dtype).view(shape) for each in (self._mean, self._std))
                x = (x - mean) / std
            if self._casts is not None:
                x = packed(x)
            x = x.to(next(self.twin.root.parameters(), x).dtype)
            same = not self._tracing and x.data_ptr() == images.data_ptr()
            return x.clone() if same else x

        once: Tensor = prepared() if self._untracked else self.early.once("input", images, prepared)
        return once

    def _checked(self, x: Tensor) -> Any:
        """The first pass: does the model reach its layers through the twin, and does it write into its input unseen?"""
        before, version = x.clone(), x._version
        with self.twin.watched():
            output = self.twin.root(x)
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

    @contextmanager
    def _computing(self, device: str) -> Iterator[None]:
        """Our own autocast: the caller's cache would hold on to weights that have moved since."""
        asked, dtype = (True, torch.bfloat16) if self._precision == "bf16" else self._autocast
        with torch.autocast(device, dtype=dtype, enabled=asked, cache_enabled=False):
            yield

    def _running(self) -> Pass:
        """The pass under way."""
        assert self._current is not None
        return self._current

    def _double(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """At the split: every tensor along the batch stands twice, once per head."""
        run = self._current
        if run is None or run.branch != "doubled":
            return None
        run.doubled = True

        def twice(value: Any) -> Any:
            along = isinstance(value, Tensor) and value.dim() > 1 and len(value) == run.rows
            if along and self._tracing and self._passes is not None:
                value = self._passes.mark(value)
            return torch.cat([value, value]) if along else value

        return tuple(twice(value) for value in args), {key: twice(value) for key, value in kwargs.items()}

    def _keep(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """At the head: its input, for corrections that read it."""
        if self._current is not None and args and isinstance(args[0], Tensor):
            self._current.features = args[0].flatten(1)


def _compiler(early: Early) -> Compiled:
    """Only for those who compile: what it imports takes a while."""
    from poem.accelerate.compiled import Compiled

    return Compiled(early.once)


def tensor_of(output: Any) -> Any:
    """The logits in what a model returned: a tensor, `.logits`, or `["logits"]`; anything else is returned as it is."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def _logits_of(found: Any) -> Tensor:
    """The logits, if they are a tensor (batch, classes)."""
    if not isinstance(found, Tensor):
        kind = type(found).__name__
        raise TypeError(f"expected logits (a tensor, .logits or ['logits']), got {kind}; pass logits=lambda out: ...")
    if found.dim() != 2:
        raise ValueError(f"expected logits of shape (batch, classes), got {tuple(found.shape)}; pass logits=")
    return found


_TF32_LOCK = threading.Lock()
_TF32: dict[int, tuple[bool, bool]] = {}  # the switches as they were, for each network that has them on


def _enter_tf32(network: Network) -> None:
    """TF32 in products and convolutions, forwards and backwards, until the last network of any thread leaves."""
    with _TF32_LOCK:
        now = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        _TF32[id(network)] = next(iter(_TF32.values()), now)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def _leave_tf32(network: Network) -> None:
    """The switches as they were, if nobody else has them on; a second time it does nothing."""
    with _TF32_LOCK:
        before = _TF32.pop(id(network), None)
        if before is not None and not _TF32:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
