"""Versions, commit, machine and peak memory, for results. Nothing here names a folder."""

from __future__ import annotations

import inspect
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from poem._util import outside
from poem._version import __version__
from poem.bench.cell import Cell
from poem.recipes.methods import outside_host
from poem.recipes.recipe import Recipe
from poem.streams.datasets import DATASETS, canonical
from poem.zoo import hub_bases
from poem.zoo.catalog import own_bases
from poem.zoo.outside_bases import Factory

if TYPE_CHECKING:
    from poem.bench.result import CellResult

PACKAGE = Path(__file__).resolve().parents[1]
OURS = ("poem", "__main__")
MODULE = "module "
"""What the names of hashes of code begin with, in the provenance of a result."""


def provenance() -> dict[str, Any]:
    """Versions, and the commit where the package runs from a checkout of its own."""
    versions = {"poem": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return {**versions, "python": platform.python_version(), **_commit()}


def outside_versions(cell: Cell, recipe: Recipe) -> dict[str, str]:
    """Version of every other package that a cell's method, parts, base or data come from, as `package NAME`."""
    hub, _, _ = cell.base.partition(":")
    libraries = {hub_bases.HUBS[hub]} if hub_bases.is_hub_id(cell.base) else set()
    found = outside.versions({*outside_modules(cell, recipe), *libraries})
    return {f"package {package}": version for package, version in found.items()}


def outside_code(cell: Cell, recipe: Recipe) -> dict[str, str]:
    """SHA-256 of the file of every other module that a cell's method, parts, base or data are in, as `module NAME`."""
    found = {module: outside.code_sha256(module) for module in sorted(outside_modules(cell, recipe))}
    return {f"{MODULE}{module}": digest for module, digest in found.items() if digest is not None}


def changed_code(result: CellResult) -> dict[str, tuple[str, str]]:
    """Modules whose code is another than when a result was measured: hash then and now.

    Nothing is imported: a module that this process has not imported is left out, as are results without hashes.
    """
    found = {}
    for name, then in result.provenance.items():
        module = name.removeprefix(MODULE)
        now = outside.code_sha256(module) if module != name else None
        if now is not None and now != then:
            found[module] = (str(then), now)
    return found


def outside_modules(cell: Cell, recipe: Recipe) -> set[str]:
    """Modules of other packages that a cell's method, base and data are looked up or written in, and its parts."""
    found = {type(part).__module__ for _, part in recipe.places}
    for kind, name in _outside_names(cell):
        path = outside.path_of(kind, name)
        found.add(path.partition(":")[0])
        made = outside.load(kind, name)
        made = made.build if isinstance(made, Factory) else made
        found |= {made.__module__} if inspect.isfunction(made) or inspect.isclass(made) else set()
    return {module for module in found if module.partition(".")[0] not in OURS}


def _outside_names(cell: Cell) -> Iterator[tuple[outside.Kind, str]]:
    """A cell's method, base and data that are of another package; names that this package has are its own."""
    own = cell.base in own_bases() or hub_bases.is_hub_id(cell.base)
    named: tuple[tuple[outside.Kind, str | None], ...] = (
        ("method", outside_host(cell.method)),
        ("base", None if own else cell.base),
        ("data set", _outside_data(cell.data)),
    )
    for kind, name in named:
        try:
            if name is not None and outside.is_outside(kind, name):
                outside.load(kind, name)
                yield kind, name
        except ValueError:  # two packages announce it, or it is not there: whoever uses the name is told
            continue


def _outside_data(name: str) -> str | None:
    """The name of a data set that is not of this package; None for its own and for unknown ones."""
    try:
        found = canonical(name)
    except ValueError:
        return None
    return None if found in DATASETS else found


@cache
def _commit() -> dict[str, Any]:
    """Commit and dirty flag; None each where there is no git, or the package is not tracked by it."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return {"commit": None, "dirty": None}
    changes = _git("status", "--porcelain", "--", ".")
    return {"commit": _git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *words], cwd=PACKAGE, capture_output=True, text=True, timeout=10, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def host(device: torch.device) -> dict[str, Any]:
    """Name of the device and the CPU, cores, platform and process id."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": name, "cpu": _processor(), "cores": os.cpu_count(), "platform": platform.platform(),
        "pid": os.getpid(),
    }  # fmt: skip


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.processor() or platform.machine())


def reset_peak_memory(device: torch.device) -> float:
    """Reset a GPU's peak counter; returns the bytes that are allocated already, by the models loaded so far."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    return float(torch.cuda.memory_allocated(device))


def peak_memory(device: torch.device) -> float:
    """Peak memory in bytes: the GPU's since `reset_peak_memory`, or the whole process's on the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return 0.0
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * (1 if sys.platform == "darwin" else 1024)
