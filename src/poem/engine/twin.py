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
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from poem.engine.parameter_groups import memory_places

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
STANDARD = frozenset(nn.Module().__dict__)  # what every module has; nothing of it but OWN leads to other modules
VALUES = 20_000  # values that are searched for modules, at most
FOLLOWED = 1000  # entries of a container whose changes are noticed, at most


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
        self._hooked: set[nn.Module] = set()
        self._watching: int | None = None  # the thread in which calls of the user's modules are errors
        self.rebuild()

    @property
    def root(self) -> nn.Module:
        """The twin of the whole model."""
        return self._twins[self.model]

    def hooked(self, twin: nn.Module) -> bool:
        """Whether the user has hooks on the module that this is the twin of."""
        return twin in self._hooked

    def changed(self) -> bool:
        """Whether a module, parameter, buffer, hook or attribute of the model is another object than at `rebuild`."""
        seen = self._look()
        same = _same(seen, self._seen)
        return not (same and self.translated.current) or memory_places(self._parameters()) != self._where

    def rebuild(self) -> None:
        """Copy every module's attributes anew. A module that is still there keeps its twin; patches on it are gone."""
        modules = list(self.model.modules())
        self._twins = {each: self._twins[each] if each in self._twins else _empty(each) for each in modules}
        self.translated = Translation(self._twins)
        self._seen, self._where = self._look(), memory_places(self._parameters())
        # One alias per parameter, so that tied parameters stay tied.
        with torch.inference_mode(False):
            self._aliases = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in self._parameters()}
        self._hooked = {twin for own, twin in self._twins.items() if own._forward_hooks or own._forward_pre_hooks}
        for own, twin in self._twins.items():
            self._copy(own, twin)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a call of one of the user's own modules by this thread is an error: the twin did not reach it."""
        names = {module: name for name, module in self.model.named_modules()}

        def refuse(module: nn.Module, args: Any) -> None:
            if get_ident() == self._watching and module in names:
                raise RuntimeError(
                    f"expected the model to reach its layer {names[module]!r} ({type(module).__name__}) through "
                    "attributes of its modules, but it is called through a global variable or an object that cannot "
                    "be copied; make it an attribute of the module that uses it"
                )

        handle = register_module_forward_pre_hook(refuse)
        try:
            self._watching = get_ident()
            yield
        finally:
            self.unwatch()
            handle.remove()

    def unwatch(self) -> None:
        """No call is an error any more; a hook that an interrupt left behind does nothing."""
        self._watching = None

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
        mine = {key: value for key, value in given.items() if key not in OWN and not compiled}
        held = {key: value if key in STANDARD else self.translated(value) for key, value in mine.items()}
        held["_parameters"] = {key: None if p is None else self._aliases[id(p)] for key, p in parameters.items()}
        held["_buffers"] = dict(own._buffers)
        held["_modules"] = {key: None if each is None else self._twins[each] for key, each in modules.items()}
        held["_compiled_call_impl"] = None
        held["training"] = False
        for kind in HOOKS:
            hooks = dict(given.get(kind, {}))
            if kind == "_forward_hooks":
                hooks = {key: _OfUser(self._bound(hook), own) for key, hook in hooks.items()}
            held[kind] = OrderedDict((key, self._bound(hook)) for key, hook in hooks.items())
        if compiled:
            held = {**nn.Module().__dict__, **held}
        twin.__dict__.clear()
        twin.__dict__.update(held)
        for parent in type(own).__mro__:
            for name in () if compiled else _slots(parent):
                if hasattr(own, name):
                    parent.__dict__[name].__set__(twin, self.translated(getattr(own, name)))

    def _bound(self, hook: Any) -> Any:
        """A hook as it is, so that it writes where the user reads; a method of a module becomes its twin's."""
        function = hook.func if isinstance(hook, partial) else hook
        return self.translated(hook) if isinstance(getattr(function, "__self__", None), nn.Module) else hook


class _OfUser:
    """A forward hook, called with the user's module, by which it may know the layer, in place of the twin."""

    def __init__(self, hook: Callable[..., Any], own: nn.Module) -> None:
        self._hook, self._own = hook, own

    def __call__(self, module: nn.Module, *rest: Any) -> Any:
        return self._hook(self._own, *rest)


class Translation:
    """Replaces modules by others wherever a value holds them: in containers, methods, functions, plain objects."""

    def __init__(self, modules: Mapping[nn.Module, nn.Module]) -> None:
        self._twins = modules
        self._met: dict[int, tuple[Any, Any]] = {}  # values searched for modules, and what became of them
        self._nested: list[tuple[Callable[[], tuple[Any, ...]], tuple[Any, ...]]] = []  # those that held some

    def __call__(self, value: Any) -> Any:
        """The value with other modules; the value itself where it holds none of them."""
        return self._translate(value)

    @property
    def current(self) -> bool:
        """Whether every value that was made again still holds what it held then."""
        try:
            return all(_same(read(), held) for read, held in self._nested)
        except (ValueError, RuntimeError):  # a cell was emptied, or a container changed while it was read
            return False

    def _translate(self, value: Any) -> Any:
        """One value; what was met before, on the way here or elsewhere, is not searched again."""
        if isinstance(value, _ATOMS) or type(value) in weakref.ProxyTypes:
            return value
        if isinstance(value, nn.Module):
            return self._twins.get(value, value)
        if id(value) not in self._met and len(self._met) < VALUES:
            self._met[id(value)] = value, value
            self._met[id(value)] = value, self._rebuilt(value)
        return self._met.get(id(value), (value, value))[1]

    def _rebuilt(self, value: Any) -> Any:
        """A container, method, function or plain object that holds modules, made again with their twins."""
        kind: Any = type(value)
        if kind is types.MethodType:
            return self._remade(lambda: (value.__self__,), lambda new: kind(value.__func__, new[0]), value)
        if kind is types.FunctionType:
            return self._function(value)
        if isinstance(value, weakref.ref):
            target = value()
            known = isinstance(target, nn.Module) and target in self._twins
            return weakref.ref(self._twins[target]) if known else value  # type: ignore[index]
        if kind is partial:
            count, names = 1 + len(value.args), tuple(value.keywords)
            return self._remade(
                lambda: (value.func, *value.args, *value.keywords.values()),
                lambda new: partial(new[0], *new[1:count], **dict(zip(names, new[count:], strict=True))), value,
            )  # fmt: skip
        if kind in (list, tuple, set, frozenset):
            return self._remade(lambda: tuple(value), kind, value)
        if isinstance(value, tuple) and hasattr(kind, "_make"):
            return self._remade(lambda: tuple(value), kind._make, value)
        if kind is deque:
            return self._remade(lambda: tuple(value), lambda new: deque(new, value.maxlen), value)
        if isinstance(value, dict) and kind in (dict, OrderedDict, defaultdict):
            return self._remade(lambda: (*value, *value.values()), lambda new: _filled(value, new), value)
        if hasattr(value, "__dict__") and kind.__module__.partition(".")[0] not in ("torch", "builtins", "functools"):
            return self._remade(lambda: tuple(vars(value).values()), lambda new: _like(value, new), value)
        return value

    def _remade(self, read: Callable[[], tuple[Any, ...]], make: Callable[[tuple[Any, ...]], Any], value: Any) -> Any:
        """What `make` makes of the translated contents, or the value itself where they hold none of the modules."""
        held = read()
        new = tuple(map(self._translate, held))
        unchanged = _same(new, held)
        # A container without modules may get one later, unless it cannot change or holds plain values such as sizes.
        fixed = isinstance(value, tuple | frozenset) or (held and all(isinstance(each, _ATOMS) for each in held))
        if not unchanged or not (fixed or len(held) > FOLLOWED):
            self._nested.append((read, held))
        return value if unchanged else make(new)

    def _function(self, value: types.FunctionType) -> Any:
        """A function whose closure, defaults or global names hold one of the model's modules sees the twin there."""
        count = len(value.__closure__ or ())

        def read() -> tuple[Any, ...]:
            cells = (cell.cell_contents for cell in value.__closure__ or ())
            return (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())

        named = {name: value.__globals__.get(name) for name in value.__code__.co_names}
        known = {name: self._twins[m] for name, m in named.items() if isinstance(m, nn.Module) and m in self._twins}

        def make(new: tuple[Any, ...]) -> types.FunctionType:
            seen = _Overlay(known, value.__globals__) if known else value.__globals__
            cells, defaults = tuple(map(types.CellType, new[:count])), len(value.__defaults__ or ())
            given = new[count : count + defaults] if value.__defaults__ is not None else None
            made = types.FunctionType(value.__code__, seen, value.__name__, given, cells)
            if value.__kwdefaults__ is not None:
                made.__kwdefaults__ = dict(zip(value.__kwdefaults__, new[count + defaults :], strict=True))
            return made

        try:
            return make(tuple(map(self._translate, read()))) if known else self._remade(read, make, value)
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


def _slots(kind: type) -> Sequence[str]:
    """Names that a class keeps outside `__dict__`."""
    names = kind.__dict__.get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name in kind.__dict__]


def _filled(value: Any, contents: tuple[Any, ...]) -> Any:
    """A dictionary of the same kind with other keys and values."""
    twin = copy.copy(value)
    twin.clear()
    twin.update(zip(contents[: len(value)], contents[len(value) :], strict=True))
    return twin


def _like(value: Any, attributes: tuple[Any, ...]) -> Any:
    """A shallow copy of an object with other attributes; the object itself where it cannot be copied."""
    try:
        twin = copy.copy(value)
        twin.__dict__.update(zip(vars(value), attributes, strict=True))
    except Exception:  # whatever it is: if a layer is called through it, `watched` says so
        return value
    return twin
