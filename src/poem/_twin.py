"""A module tree of our own over the tensors of the user's: same classes, attributes and storage, other objects.

An adapter patches forwards, swaps parameters and sets flags on the twin alone, so the user's modules can be called from
any thread while it runs, and an interrupted call leaves nothing to undo in them. Parameters of the twin are detached
aliases (`requires_grad=False`), so no weight gradient is ever computed; buffers are the very tensors.
"""

from __future__ import annotations

import copy
import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from poem._casts import whereabouts

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
OWN = {"_parameters", "_buffers", "_modules", "_compiled_call_impl", "training", *HOOKS}  # made anew for the twin
DEPTH = 4  # how far attributes of attributes are searched for modules


class Uncompiled(nn.Module):
    """Takes the place of a child wrapped by `torch.compile`: runs the module inside, whose layers can be patched."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module inside."""
        return self._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["_orig_mod"], name)


class Twin:
    """Builds the twin of a model, and rebuilds it when the model has changed between calls."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._twins: dict[nn.Module, nn.Module] = {}
        self._aliases: dict[int, nn.Parameter] = {}
        self._seen: list[Any] = []
        self.translated = Translation({})
        """Replaces each of the model's modules in a value by its twin."""
        self._where: list[Any] = []
        self.rebuild()

    @property
    def root(self) -> nn.Module:
        """The twin of the whole model."""
        return self._twins[self.model]

    def of(self, module: nn.Module) -> nn.Module:
        """The twin of one of the model's modules."""
        return self._twins[module]

    def changed(self) -> bool:
        """Whether a module, parameter, buffer, hook or attribute of the model is another object than at `rebuild`."""
        seen = self._look()
        same = _same(seen, self._seen)
        return not (same and self.translated.current) or whereabouts(self._parameters()) != self._where

    def rebuild(self) -> None:
        """Copy every module's attributes anew. A module that is still there keeps its twin; patches on it are gone."""
        modules = list(self.model.modules())
        self._twins = {each: self._twins[each] if each in self._twins else _empty(each) for each in modules}
        self.translated = Translation(self._twins)
        self._seen, self._where = self._look(), whereabouts(self._parameters())
        # One alias per parameter, so that tied parameters stay tied.
        with torch.inference_mode(False):
            self._aliases = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self._parameters()}
        for own, twin in self._twins.items():
            self._copy(own, twin)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a call of one of the user's own modules by this thread is an error: the twin did not reach it."""
        thread, names = get_ident(), {module: name for name, module in self.model.named_modules()}

        def refuse(module: nn.Module, args: Any) -> None:
            if get_ident() == thread and module in names:
                raise RuntimeError(
                    f"expected the model to reach its layer {names[module]!r} ({type(module).__name__}) through "
                    "attributes of its modules, but it is called through a global variable or an object that cannot "
                    "be copied; make it an attribute of the module that uses it"
                )

        handle = register_module_forward_pre_hook(refuse)
        try:
            yield
        finally:
            handle.remove()

    def _parameters(self) -> list[nn.Parameter]:
        """Every parameter in every place, in order."""
        return [each for module in self._twins for each in module._parameters.values() if each is not None]

    def _look(self) -> list[Any]:
        """All objects that the twin was made from, to compare by identity."""
        seen: list[Any] = []
        for module in self._twins:
            values = module.__dict__
            seen += values.values()
            seen += module._parameters.values()
            seen += module._buffers.values()
            seen += module._modules.values()
            for kind in HOOKS:
                if values.get(kind):
                    seen += values[kind].values()
        return seen

    def _copy(self, own: nn.Module, twin: nn.Module) -> None:
        """All attributes of one module, with twins in place of modules."""
        compiled = isinstance(twin, Uncompiled)
        # Copied at once: another thread may call the model plainly, and its forward may set attributes.
        given, parameters, modules = dict(own.__dict__), dict(own._parameters), dict(own._modules)
        held = {key: self.translated(value) for key, value in given.items() if key not in OWN and not compiled}
        held["_parameters"] = {key: None if p is None else self._aliases[id(p)] for key, p in parameters.items()}
        held["_buffers"] = dict(own._buffers)
        held["_modules"] = {key: None if each is None else self._twins[each] for key, each in modules.items()}
        held["_compiled_call_impl"] = None
        held["training"] = False
        for kind in HOOKS:
            held[kind] = OrderedDict((key, self._bound(hook)) for key, hook in dict(given.get(kind, {})).items())
        if compiled:
            held = {**nn.Module().__dict__, **held}
        twin.__dict__.clear()
        twin.__dict__.update(held)

    def _bound(self, hook: Any) -> Any:
        """A hook as it is, so that it writes where the user reads; a method of a module becomes its twin's."""
        function = hook.func if isinstance(hook, partial) else hook
        return self.translated(hook) if isinstance(getattr(function, "__self__", None), nn.Module) else hook


class Translation:
    """Replaces modules by others wherever a value holds them: in containers, methods, functions, plain objects."""

    def __init__(self, modules: Mapping[nn.Module, nn.Module]) -> None:
        self._twins = modules
        self._met: dict[int, tuple[Any, Any]] = {}  # values searched for modules, and what became of them
        self._nested: list[tuple[Callable[[], tuple[Any, ...]], tuple[Any, ...]]] = []  # those that held some

    def __call__(self, value: Any) -> Any:
        """The value with other modules; the value itself where it holds none of them."""
        return self._translate(value, DEPTH)

    @property
    def current(self) -> bool:
        """Whether every value that was made again still holds what it held then."""
        return all(_same(read(), held) for read, held in self._nested)

    def _translate(self, value: Any, depth: int) -> Any:
        """One value; what was met before, on the way here or elsewhere, is not searched again."""
        if isinstance(value, nn.Module):
            return self._twins.get(value, value)
        if depth == 0 or isinstance(value, _ATOMS):
            return value
        if id(value) not in self._met:
            self._met[id(value)] = value, value
            self._met[id(value)] = value, self._rebuilt(value, partial(self._translate, depth=depth - 1))
        return self._met[id(value)][1]

    def _rebuilt(self, value: Any, inner: Callable[[Any], Any]) -> Any:
        """A container, method, function or plain object that holds modules, made again with their twins."""
        kind: Any = type(value)
        if kind is types.MethodType:
            return self._remade(lambda: (value.__self__,), inner, lambda new: kind(value.__func__, new[0]), value)
        if kind is types.FunctionType:
            return self._function(value, inner)
        if isinstance(value, weakref.ref):
            target = value()
            return (
                weakref.ref(self._twins[target]) if isinstance(target, nn.Module) and target in self._twins else value
            )
        if kind is partial:
            count, names = 1 + len(value.args), tuple(value.keywords)
            return self._remade(
                lambda: (value.func, *value.args, *value.keywords.values()), inner,
                lambda new: partial(new[0], *new[1:count], **dict(zip(names, new[count:], strict=True))), value,
            )  # fmt: skip
        if kind in (list, tuple, set, frozenset):
            return self._remade(lambda: tuple(value), inner, kind, value)
        if kind in (dict, OrderedDict):
            return self._remade(
                lambda: tuple(value.values()), inner, lambda new: kind(zip(value, new, strict=True)), value
            )
        if hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in ("torch", "builtins", "functools"):
            return self._remade(lambda: tuple(vars(value).values()), inner, lambda new: _like(value, new), value)
        return value

    def _remade(
        self,
        read: Callable[[], tuple[Any, ...]],
        inner: Callable[[Any], Any],
        make: Callable[[tuple[Any, ...]], Any],
        value: Any,
    ) -> Any:
        """What `make` makes of the translated contents, or the value itself where they hold none of the modules."""
        held = read()
        new = tuple(map(inner, held))
        if all(map(operator.is_, new, held)):
            return value
        self._nested.append((read, held))
        return make(new)

    def _function(self, value: types.FunctionType, inner: Callable[[Any], Any]) -> Any:
        """A function whose closure or global names hold one of the model's modules sees the twin there."""

        def read() -> tuple[Any, ...]:
            return tuple(cell.cell_contents for cell in value.__closure__ or ())

        named = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        known = {name: self._twins[m] for name, m in named.items() if isinstance(m, nn.Module) and m in self._twins}

        def make(new: tuple[Any, ...]) -> types.FunctionType:
            seen = _Overlay(known, value.__globals__) if known else value.__globals__
            cells = tuple(map(types.CellType, new))
            made = types.FunctionType(value.__code__, seen, value.__name__, value.__defaults__, cells)
            made.__kwdefaults__ = value.__kwdefaults__
            return made

        try:
            return make(tuple(map(inner, read()))) if known else self._remade(read, inner, make, value)
        except ValueError:  # a cell of the closure is still empty
            return value


class _Overlay(dict[str, Any]):
    """Global names of a function, some of them replaced; all others are read from the module as they are now."""

    def __init__(self, names: dict[str, Any], rest: dict[str, Any]) -> None:
        super().__init__(names)
        self._rest = rest

    def __missing__(self, name: str) -> Any:
        return self._rest[name]


_ATOMS = (Tensor, str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, torch.dtype, torch.device)


def _empty(module: nn.Module) -> nn.Module:
    """A module of the same class, without any attribute yet."""
    compiled = type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules
    twin: nn.Module = object.__new__(Uncompiled if compiled else type(module))
    return twin


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two sequences hold the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _like(value: Any, attributes: tuple[Any, ...]) -> Any:
    """A shallow copy of an object with other attributes; the object itself where it cannot be copied."""
    try:
        twin = copy.copy(value)
        twin.__dict__.update(zip(vars(value), attributes, strict=True))
    except Exception:  # whatever it is: if a layer is called through it, `watched` says so
        return value
    return twin
