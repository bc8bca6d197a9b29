"""Whether Triton's kernels run on a device: imported and called once, and torch's own kernels where that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

log = logging.getLogger("poem")
Affine = list[tuple[Tensor, Tensor]]
"""Scale and shift (channels,) of all rows, or of each half of them."""
WORKERS = 528
"""Programs to aim at: four on each multiprocessor of a large GPU."""


class TritonKernels:
    """Modules of kernels that are imported when they are first asked for, and tried once on each device.

    Args:
        what: The layers that they compute, for the warning that torch computes these instead.
        modules: Names of modules in this package.
        trials: Calls of the kernels, forward and backward, with few rows and with many; they are handed a device.
    """

    def __init__(self, what: str, modules: tuple[str, ...], trials: list[Callable[[torch.device], object]]) -> None:
        self._what, self._names, self._trials = what, modules, trials
        self._modules: tuple[ModuleType, ...] | None = None
        self._imports = True  # until an import failed
        self._works: dict[torch.device, bool] = {}

    @property
    def modules(self) -> tuple[ModuleType, ...] | None:
        """The modules, or None where Triton is not installed, or is broken."""
        if self._modules is None and self._imports:
            try:
                self._modules = tuple(import_module(f"poem.accelerate.{name}") for name in self._names)
            except Exception as error:
                self._imports = False
                self._warn(error)
        return self._modules

    def work(self, device: torch.device) -> bool:
        """Whether the kernels run there: Triton wants a compiler, which not every machine has."""
        if device not in self._works:
            try:
                self._works[device] = self.modules is not None and self._run(device)
            except torch.OutOfMemoryError:
                return False  # for now
        return self._works[device]

    def _run(self, device: torch.device) -> bool:
        try:
            for trial in self._trials:
                trial(device)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, torch has kernels of its own
            self._warn(error)
            return False
        return True

    def _warn(self, error: Exception) -> None:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning("%s as torch computes it: %s", self._what, reason)
