"""Modules of the network compiled by `torch.compile`, with all that we do to their layers in place.

Torch traces a module of the twin as it is: tensors that stand where parameters stood are inputs, and replaced forwards
are followed. Without a branch that module is the whole network. With one it is every module that lies before the split
and holds norm layers; beyond it there are two backward passes through one graph, which torch does not compile.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from poem.accelerate.capture import SHAPES
from poem.engine.network import Network

log = logging.getLogger("poem")
BACKEND = "inductor"  # torch's own default


class CompiledModules:
    """Takes the place of the forward of each module; from the first time on that torch could not compile one, of none.

    Only passes of a batch that is answered are compiled, and none of the first: it is looked at in ways that do not
    come again. Of each module's input, as many shapes are kept as there are of captured loops.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.modules = [network.modules[0]] if network.branch is None else _before_split(network)
        self.answered = 0  # batches, since the adapter was made or reset
        self._answering = False
        self.failed = None if self.modules else "not compiled: no module with norm layers lies before the split"
        self._made: OrderedDict[Any, dict[Any, Any]] = OrderedDict()

    @property
    def why_not(self) -> str | None:
        """Why the network runs plainly, if it does."""
        if self._network.hooked:
            return "not compiled: the model has hooks, which a compiled pass would not call"
        if self._network.given is not None:
            return "not compiled: the model is called with more than one tensor"
        return self.failed

    def patch(self) -> None:
        """Replace the modules' forwards, except where the user did."""
        for module in self.modules:
            if "forward" not in module.__dict__:
                module.__dict__["forward"] = _CompiledForward(module.forward, self)

    def forget(self) -> None:
        """Let go of what was compiled."""
        self._made.clear()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A batch that is answered: inside, passes are compiled, unless it is the first such batch."""
        self._answering = True
        try:
            yield
            self.answered += 1
        finally:
            self._answering = False

    def run(self, own: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """What the module's own forward returns, compiled."""
        tensors = all(isinstance(each, Tensor) for each in args) and not named
        plain = not self._answering or self.answered == 0 or self._network.has_sample_rows()
        plain = plain or self._network.twin.is_watched  # a changed model's first pass, which has a hook of ours
        if plain or not tensors or self.why_not is not None:
            return own(*args, **named)
        call = self._compiled(own, args)
        try:
            return call(own, *args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is: if the model itself raises it, the plain call does too
            log.debug("torch could not compile", exc_info=True)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        output = own(*args)
        self.failed = f"not compiled: {reason}"
        log.warning("%s runs plainly, %s", type(self._network.model).__name__, self.failed)
        return output

    def _compiled(self, own: Any, args: tuple[Tensor, ...]) -> Any:
        """The compiled call for such inputs, made where there is none."""
        shape = own, *((x.shape, x.dtype, x.device) for x in args)
        made = self._made.setdefault(shape, {})
        self._made.move_to_end(shape)
        if len(self._made) > SHAPES * len(self.modules):
            self._made.popitem(last=False)
        mode = torch.is_grad_enabled(), *(x.requires_grad for x in args)
        if mode not in made:  # a code object of its own: torch compiles each a few times only
            call = FunctionType(_call.__code__.replace(), globals())
            made[mode] = torch.compile(call, fullgraph=True, dynamic=False, backend=BACKEND)
        return made[mode]


class _CompiledForward:
    def __init__(self, own: Any, owner: CompiledModules) -> None:
        self._own, self._owner = own, owner

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._owner.run(self._own, args, named)


def _call(own: Any, *args: Tensor) -> Any:
    return own(*args)


def _before_split(network: Network) -> list[nn.Module]:
    """The largest modules before the split that hold more than one norm layer's parameters."""
    split, norms = network.modules[network.split_index], {norm.layer for norm in network.norms}
    adapted = norms | {module for places in network.theta.places for module, _ in places}
    found: list[nn.Module] = []

    def search(module: nn.Module) -> bool:
        """Whether the split has been reached."""
        if module is split:
            return True
        inside = set(module.modules())
        if split not in inside:
            if inside & adapted and module not in adapted:
                found.append(module)
            return False
        return any(search(child) for child in module.children())

    search(network.modules[0])
    return found
