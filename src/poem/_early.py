"""What the first look found below the lowest layer that moves: later looks at the same images take it as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class Early:
    """Modules, or pieces of a compiled pass, that run before anything moves; and what they said of images in hand."""

    def __init__(self, modules: Sequence[nn.Module], moving: Iterable[nn.Module]) -> None:
        self._all, self._moving = list(modules), set(moving)
        self._modules: list[nn.Module] | None = None  # not yet known
        self._images: Tensor | None = None
        self._said: dict[nn.Module, tuple[Tensor, int]] = {}
        self._computed: dict[Any, tuple[Any, list[int]]] = {}
        self._open = False

    def hold(self, images: Tensor | None) -> None:
        """From now on these images are the ones in hand; None forgets."""
        self._images, self._said, self._computed = images, {}, {}

    def once(self, key: Any, images: Tensor, compute: Callable[[], Any]) -> Any:
        """What is computed from the images alone: once for the images in hand, unless somebody wrote into it."""
        if images is not self._images:
            return compute()
        said, versions = self._computed.get(key, (None, None))
        if versions is None or versions != _versions(said):
            said = compute()
            self._computed[key] = said, _versions(said)
        return said

    @contextmanager
    def passing(self, images: Tensor, *, plain: bool) -> Iterator[None]:
        """A pass over images; `plain` if nothing else than images and moving tensors decides what layers say."""
        self._open = plain and images is self._images
        hooks, found = self._watch() if self._open and self._modules is None else ([], list)
        try:
            yield
            self._modules = found() if hooks else self._modules
        finally:
            self._open = False
            for hook in hooks:
                hook.remove()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While a call lasts, early modules answer from what they said, where that is still true."""
        modules = [module for module in self._modules or [] if "forward" not in module.__dict__]
        for module in modules:
            module.__dict__["forward"] = _Remembering(module, module.forward, self)
        try:
            yield
        finally:
            for module in modules:
                del module.__dict__["forward"]
            self.hold(None)

    def ask(self, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the module says of the images in hand, computed once."""
        if not self._open:
            return own(*args, **kwargs)
        if module in self._said:
            said, version = self._said[module]
            if said._version == version:
                return said
            self._modules = []  # somebody writes into it: never again
            self._open = False
            return own(*args, **kwargs)
        said = own(*args, **kwargs)
        if isinstance(said, Tensor) and not said.requires_grad:
            self._said[module] = said, said._version
        return said

    def _watch(self) -> tuple[list[Any], Callable[[], list[nn.Module]]]:
        """Hooks on every module, and how to read from them which ran, once and whole, before anything moved."""
        order: list[nn.Module] = []
        calls: dict[nn.Module, int] = {}
        moved = False

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal moved
            moved = moved or module in self._moving
            calls[module] = calls.get(module, 0) + 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not moved and isinstance(output, Tensor):
                inside = set(module.modules())
                order[:] = [each for each in order if each not in inside]
                order.append(module)

        def read() -> list[nn.Module]:
            weighty = (each for each in order if any(True for _ in each.parameters()))
            return [each for each in weighty if calls[each] == 1 and "forward" not in each.__dict__]

        hooks = [module.register_forward_pre_hook(enter) for module in self._all]
        hooks += [module.register_forward_hook(leave) for module in self._all]
        return hooks, read


class _Remembering:
    """Stands in for an early module's forward."""

    def __init__(self, module: nn.Module, own: Callable[..., Any], early: Early) -> None:
        self._module, self._own, self._early = module, own, early

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._early.ask(self._module, self._own, args, kwargs)


def _versions(said: Any) -> list[int]:
    """How often each tensor has been written."""
    return [each._version for each in (said if isinstance(said, tuple | list) else [said])]
