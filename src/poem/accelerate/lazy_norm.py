"""Outputs of norm layers that are computed when they are first needed, with the addition and the ReLU after them.

Precondition: half precision, a norm layer that our kernels take, a model without hooks.
Effect: the layer returns a `LazyNorm`, a tensor that has shape, dtype and device but no data yet. ReLU and the addition
of another tensor are recorded on it; any other operation computes it first, so that one kernel writes
`relu(norm(x) + other)`. Fallback: the kernel runs at once, and torch adds and clips.

Why this is right. Every function of torch is handed to `LazyNorm.__torch_function__`: what is not known there gets the
computed tensor. In place, the operation is recorded on the object itself, which is returned, and whoever has it sees
it; not in place, on a new object. The kernel rounds before it adds, as torch does, so that no bit of an output depends
on when it runs. What it reads must still be as it was: each input's version counter is compared before the kernel runs,
and a changed one is an error; a write through `.data`, which is not counted, shows in the trial. Code that reads
tensors past torch's functions is an error too, or, in an `autograd.Function` of the model's own, loses a gradient. So a
model is tried first: on its first batch logits and gradients must be those of a pass in which nothing is lazy; else
none is for this model. What is still pending when a pass ends is computed then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from poem.engine.branch_check import MISFITS

Run = Callable[[Tensor | None, bool], Tensor]
"""Computes the layer's output, plus another tensor if there is one, and clipped at zero if told so."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TRIALS = 3  # after so many whose logits or gradients are not finite, outputs are not lazy
TOLERANCE = 5e-2  # of what a lazy pass computes: it rounds as any other, but convolutions may add in another order

ATTRIBUTES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_meta",
)
METHODS = (
    "dim", "size", "stride", "numel", "nelement", "ndimension", "is_contiguous", "is_floating_point", "is_complex",
    "element_size", "is_inference", "__len__",
)  # fmt: skip
METADATA: frozenset[Any] = frozenset(
    [torch.numel, torch.is_floating_point, torch.is_complex]
    + [getattr(Tensor, name).__get__ for name in ATTRIBUTES]
    + [getattr(Tensor, name) for name in METHODS]
)
"""Functions that read metadata alone, and so do not compute the output."""
RELU_IN_PLACE = frozenset([torch.relu_, Tensor.relu_])
RELU = RELU_IN_PLACE | {F.relu, torch.relu, Tensor.relu}
ADD_IN_PLACE = frozenset([Tensor.add_, Tensor.__iadd__])
ADD = ADD_IN_PLACE | {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}


@dataclass(frozen=True)
class Todo:
    """What is left to compute."""

    owner: LazyNorms
    run: Run
    held: tuple[tuple[Tensor, int], ...]  # what it reads, and how often each of these had been written to
    grad: bool  # whether gradients were on
    other: Tensor | None = None
    relu: bool = False

    def __call__(self) -> Tensor:
        """Run the kernel; an error if an input was written in place since."""
        if any(tensor._version != version for tensor, version in self.held):
            self.owner.right = False
            raise RuntimeError(
                "the model wrote in place to what a norm layer reads, before that layer's output was used; call the "
                "adapter again: from now on it computes each layer at once"
            )
        with torch.set_grad_enabled(self.grad):
            return self.run(self.other, self.relu)


class LazyNorm(Tensor):
    """What a norm layer returned: numbers, or what is left to do for them."""

    _todo: Todo | None  # None: it has been computed
    _computed: Tensor

    @staticmethod
    def pending(todo: Todo, like: Tensor, *, requires_grad: bool) -> LazyNorm:
        """One that is to be computed, of the type, shape and strides of another tensor."""
        made: LazyNorm = Tensor._make_wrapper_subclass(
            LazyNorm, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device,
            requires_grad=requires_grad,
        )  # fmt: skip
        made._todo = todo
        todo.owner.pending.append(weakref.ref(made))
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what can wait, answer what needs no numbers, and else call the function with the computed tensor."""
        first, named = args[0] if args else None, kwargs or {}
        if isinstance(first, LazyNorm) and first._todo is not None:
            if func in METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **named)
            if func in RELU and first._can_wait() and named.keys() <= {"inplace"}:
                in_place = func in RELU_IN_PLACE or any((*args[1:], *named.values()))
                return first._noted(in_place=in_place, relu=True)
        if func in ADD and len(args) == 2 and not named:
            in_place = func in ADD_IN_PLACE
            for one, other in (args,) if in_place else (args, args[::-1]):
                if isinstance(one, LazyNorm) and one._can_add(other):
                    return one._noted(in_place=in_place, other=computed(other))
        return func(*_all_computed(args), **_all_computed(named))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only what went past torch's functions ends here."""
        raise RuntimeError(f"{func} reads the output of a norm layer past torch's functions, as a compiled module does")

    def _can_wait(self) -> bool:
        return self._todo is not None and self._todo.grad == torch.is_grad_enabled()

    def _can_add(self, other: Any) -> bool:
        """Whether the other operand is one that the kernel reads beside its input, and there is none yet."""
        todo = self._todo
        if todo is None or not self._can_wait() or todo.other is not None or todo.relu or other is self:
            return False
        if type(other) not in (Tensor, nn.Parameter, LazyNorm) or other.is_inference():
            return False
        return _form(other) == _form(self)

    def _noted(self, *, in_place: bool, relu: bool = False, other: Tensor | None = None) -> LazyNorm:
        """This object, or a new one, with one more thing to do."""
        todo, wanted = self._todo, self.requires_grad
        assert todo is not None
        if other is not None:
            todo = replace(todo, other=other, held=(*todo.held, (other, other._version)))
            wanted = wanted or (todo.grad and other.requires_grad)
        todo = replace(todo, relu=todo.relu or relu)
        if not in_place:
            return LazyNorm.pending(todo, self, requires_grad=wanted)
        self._todo = todo
        with torch._C.DisableTorchFunctionSubclass():
            self.requires_grad_(wanted)
        return self


def computed(value: Any) -> Any:
    """The computed tensor of a lazy one; anything else as it is."""
    if not isinstance(value, LazyNorm):
        return value
    if value._todo is not None:
        value._computed, value._todo = value._todo(), None
    return value._computed


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """All that tells two tensors apart beside their numbers."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout


def _all_computed(values: Any) -> Any:
    """The same arguments, with computed tensors wherever lists, tuples and dictionaries hold lazy ones."""
    if isinstance(values, dict):
        return {key: _all_computed(each) for key, each in values.items()}
    if type(values) in (list, tuple):
        return type(values)(map(_all_computed, values))
    return computed(values)


def hooked(model: nn.Module) -> bool:
    """Whether hooks of the user may see outputs, or put functions of their own behind them."""
    everywhere = any(getattr(torch_module, f"_global{kind}") for kind in HOOKS)
    return everywhere or any(getattr(module, kind) for module in model.modules() for kind in HOOKS)


class LazyNorms:
    """Decides, pass by pass, whether outputs of norm layers are lazy, after one trial.

    Args:
        model: The user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._open, self._unproven = model, False, 0
        self.right: bool | None = None
        """Whether lazy passes compute what others do; None before that was tried."""
        self.pending: list[weakref.ref[LazyNorm]] = []
        """All of the pass under way that anybody may still hold."""

    def __call__(self, run: Run, x: Tensor, *affine: Tensor) -> Tensor:
        """What `run` computes from these tensors: now, or in a lazy pass when it is needed."""
        if not self._open or x.is_inference():
            return run(None, False)
        todo = Todo(self, run, tuple((each, each._version) for each in (x, *affine)), torch.is_grad_enabled())
        wanted = todo.grad and any(each.requires_grad for each in (x, *affine))
        return LazyNorm.pending(todo, x, requires_grad=wanted)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward pass, lazy if that was found right; nothing is pending after it."""
        self._open = self.right is True and not self._hooked()
        try:
            yield
            for each in self.pending:
                computed(each())
        finally:
            self._open, self.pending = False, []

    @property
    def untried(self) -> bool:
        """Whether it is still to be seen that lazy passes are right."""
        return self.right is None and not self._hooked()

    def _hooked(self) -> bool:
        return hooked(self._model)

    def try_once(self, answers: Callable[[], list[Tensor]]) -> str | None:
        """See whether passes may be lazy, unless that is known: `answers` runs one, for logits and gradients.

        Returns:
            Why they may not; None where they may, and where there is nothing to gain.
        """
        if not self.untried:
            return None
        if not any(isinstance(each, nn.BatchNorm2d | nn.GroupNorm) for each in self._model.modules()):
            self.right = False
            return None
        why, mine = "the answers differ", []
        self.right = True
        try:
            mine = answers()
            if not self.right:  # the error was caught on the way, as by the trial of copies that begin late
                mine, why = [], "the model wrote in place to what a norm layer reads"
        except MISFITS as error:
            why = (str(error).splitlines() or [type(error).__name__])[0].partition(";")[0]
        finally:
            self.right = None  # a pass is not lazy then
        theirs = answers()
        if not all(bool(each.isfinite().all()) for each in theirs):  # which proves nothing
            self._unproven += 1
            if self._unproven < TRIALS:
                return None
            self.right = False
            return "ReLU and additions run apart from the norm layers before them: logits are not finite"
        self.right = len(mine) == len(theirs) and all(
            bool((one - other).norm() <= TOLERANCE * other.norm()) for one, other in zip(mine, theirs, strict=True)
        )
        return None if self.right else f"ReLU and additions run apart from the norm layers before them: {why}"
