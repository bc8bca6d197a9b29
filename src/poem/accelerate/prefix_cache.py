"""Outputs of layers below every adapted layer, cached for the images in hand.

A batch is forwarded several times with the same images. What a layer computes before the first adapted one is the same
each time: its output is kept, keyed by the layer's input, and reused while neither has been written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from poem.accelerate.lazy_norm import computed
from poem.accelerate.sample_norms import FusedForward

PLAIN = (type(None), bool, int, float, str)  # arguments beside tensors that a key may hold


class PrefixCache:
    """The layers that run before anything adapted, and what is cached of them and of the images."""

    def __init__(
        self, modules: Sequence[nn.Module], moving: Iterable[nn.Module], hooked: Callable[[nn.Module], bool]
    ) -> None:
        self._all, self._moving, self._hooked = list(modules), set(moving), hooked
        self._modules: list[nn.Module] | None = None  # not yet known
        self._images: Tensor | None = None
        self._compare = True  # inputs on the CPU may be compared by value
        self._outputs: dict[Any, list[_Entry]] = {}
        self._computed: dict[Any, tuple[Any, list[int]]] = {}
        self._open = False

    def hold(self, images: Tensor | None) -> None:
        """Cache from now on for these images; None drops the cache."""
        self._images, self._outputs, self._computed, self._open = images, {}, {}, False

    def forget(self) -> None:
        """As before the first batch: drop the cache, and which layers it is for."""
        self.hold(None)
        self._modules = None

    def once(self, key: Any, images: Tensor, compute: Callable[[], Any]) -> Any:
        """What is computed from the images alone: once for the images in hand, again where it has been written to."""
        if images is not self._images:
            return compute()
        said, versions = self._computed.get(key, (None, None))
        if versions is None or versions != _versions(said):
            said = compute()
            self._computed[key] = said, _versions(said)
        return said

    @contextmanager
    def passing(self, images: Tensor, *, plain: bool) -> Iterator[None]:
        """A forward pass; `plain` if layers depend on nothing but their input and the adapted tensors."""
        self._open = plain and images is self._images
        hooks, found = self._watch() if self._open and self._modules is None else ([], list)
        try:
            yield
            if hooks:
                self._modules = found()
        finally:
            self._open = False
            for hook in hooks:
                hook.remove()
        if hooks:
            self.patch()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, no value is read: inputs are the same if they are the same memory."""
        self._compare = False
        try:
            yield
        finally:
            self._compare = True

    def patch(self) -> None:
        """Put the cache in front of the forward of each layer that it is for.

        Not where the forward is patched already, except by a faster norm layer, nor where the user has a hook inside,
        which is to see every pass.
        """
        for module in self._modules or []:
            patched = not isinstance(module.__dict__.get("forward"), FusedForward | None)
            if not patched and not any(map(self._hooked, module.modules())):
                module.__dict__["forward"] = _Cached(module, module.forward, self)

    def ask(self, module: nn.Module, own: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The layer's output for this input, from the cache where it is still valid."""
        args, kwargs = tuple(map(computed, args)), {name: computed(each) for name, each in kwargs.items()}
        given = (*args, *kwargs.values())
        tensors = [each for each in given if isinstance(each, Tensor)]
        known_kinds = all(isinstance(each, (Tensor, *PLAIN)) for each in given)
        if not (self._open and tensors and known_kinds) or any(each.requires_grad for each in tensors):
            return own(*args, **kwargs)
        if not all(map(_stored, tensors)):
            return own(*args, **kwargs)
        key = (
            module,
            len(args),
            *kwargs,
            *(_form(each) if isinstance(each, Tensor) else (type(each), each) for each in given),
        )
        known = self._outputs.setdefault(key, [])
        known[:] = [each for each in known if each.valid]
        output = next((each.output for each in known if each.is_of(tensors, compare=self._compare)), None)
        if output is None:
            before = _versions(tensors)
            output = computed(own(*args, **kwargs))
            if isinstance(output, Tensor) and not output.requires_grad and _versions(tensors) == before:
                known.append(_Entry(output, tensors))
        return output

    def _watch(self) -> tuple[list[Any], Callable[[], list[nn.Module]]]:
        """Hooks on every module, and how to read from them which ran whole before anything adapted."""
        order: list[nn.Module] = []
        moved = False

        def enter(module: nn.Module, args: Any) -> None:
            nonlocal moved
            moved = moved or module in self._moving

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not moved and isinstance(output, Tensor):
                inside = set(module.modules())
                order[:] = [each for each in order if each not in inside]
                order.append(module)

        def read() -> list[nn.Module]:
            return [each for each in order if any(True for _ in each.parameters())]

        hooks = [module.register_forward_pre_hook(enter) for module in self._all]
        hooks += [module.register_forward_hook(leave) for module in self._all]
        return hooks, read


class _Cached:
    """Takes the place of a layer's forward."""

    def __init__(self, module: nn.Module, own: Callable[..., Any], cache: PrefixCache) -> None:
        self._module, self._own, self._cache = module, own, cache

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._cache.ask(self._module, self._own, args, kwargs)


class _Entry:
    """An output and the inputs it is of, which stay alive so that no other tensor can lie at their addresses."""

    def __init__(self, output: Tensor, inputs: list[Tensor]) -> None:
        self.output, self._inputs = output, inputs
        self._written = _versions([output, *inputs])

    @property
    def valid(self) -> bool:
        """Whether nobody has written to the output or to an input."""
        return self._written == _versions([self.output, *self._inputs])

    def is_of(self, tensors: list[Tensor], *, compare: bool) -> bool:
        """Whether these are the same memory, or, where values may be read, hold the same numbers."""
        pairs = list(zip(self._inputs, tensors, strict=True))
        if all(one.data_ptr() == other.data_ptr() for one, other in pairs):
            return True
        return compare and all(other.device.type == "cpu" and torch.equal(one, other) for one, other in pairs)


def _stored(tensor: Tensor) -> bool:
    """Whether the tensor has memory of its own to tell it by; those inside `torch.vmap` have not."""
    try:
        return tensor.data_ptr() is not None
    except RuntimeError:
        return False


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """All that tells two tensors apart beside their numbers."""
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _versions(said: Any) -> list[int]:
    """How often each tensor has been written."""
    return [each._version for each in (said if isinstance(said, tuple | list) else [said])]
