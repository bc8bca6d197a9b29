"""Things from outside the package by name: `package.module:name`, and names that installed packages announce.

A package announces its methods, parts, bases and data sets as entry points of the four `GROUPS`, in its pyproject.toml:

    [project.entry-points."poem.methods"]
    mine = "my_package.methods:mine"

`load("method", "mine")` and `load("method", "my_package.methods:mine")` then return the same object. This module only
finds and imports; what the object must be is checked by the package that asks. Nothing is imported to list names.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from poem._util.nearest import nearest_names

Kind = Literal["method", "part", "base", "data set"]
GROUPS: dict[Kind, str] = {
    "method": "poem.methods",
    "part": "poem.parts",
    "base": "poem.bases",
    "data set": "poem.datasets",
}
"""The group of entry points of each kind."""
_REFUSED: ContextVar[set[str] | None] = ContextVar("refused", default=None)
_CODE: dict[str, tuple[ModuleType, str | None]] = {}
CODE_DIGITS = 16
"""Digits of a module's SHA-256 that are kept."""
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class ImportRefusedError(ValueError):
    """A module that only data names, such as a folder of results, was not imported."""


@contextmanager
def announced_only() -> Iterator[set[str]]:
    """Inside, `load` imports nothing but what installed packages announce; yields the names that it refuses."""
    refused: set[str] = set()
    token = _REFUSED.set(refused)
    try:
        yield refused
    finally:
        _REFUSED.reset(token)


@dataclass(frozen=True)
class Announced:
    """An entry point of an installed package."""

    name: str
    path: str
    """`package.module:name` of the object."""
    package: str
    """Name and version of the package, such as `my-package 1.0`."""

    def __str__(self) -> str:
        return f"{self.path}, from the package {self.package}"


def is_path(name: str) -> bool:
    """Whether a name is written as `package.module:name`."""
    return _PATH.fullmatch(name) is not None


def announced(kind: Kind) -> dict[str, Announced]:
    """Every name of a kind that installed packages announce, sorted; nothing is imported.

    A name that two packages announce for different objects is left out: it has to be written as `package.module:name`.
    """
    found = _announced(kind, tuple(sys.path))
    return {name: each[0] for name, each in found.items() if len({one.path for one in each}) == 1}


@lru_cache(maxsize=16)
def _announced(kind: Kind, search: tuple[str, ...]) -> dict[str, list[Announced]]:
    """Entry points by name; read once for each search path."""
    found: dict[str, list[Announced]] = {}
    for point in sorted(metadata.entry_points(group=GROUPS[kind]), key=lambda each: each.name):
        package = "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        held = found.setdefault(point.name, [])
        held.append(Announced(point.name, point.value.replace(" ", "").partition("[")[0], package))
    return found


def is_outside(kind: Kind, name: str) -> bool:
    """Whether a name is a path or announced; it may still fail to import."""
    return is_path(name) or name in _announced(kind, tuple(sys.path))


def path_of(kind: Kind, name: str) -> str:
    """The `package.module:name` of an outside name.

    Raises:
        ValueError: Neither a path nor announced, or announced by two packages for different objects.
    """
    if is_path(name):
        return name
    several = _announced(kind, tuple(sys.path)).get(name, [])
    paths = list(dict.fromkeys(each.path for each in several))
    if len(paths) > 1:
        raise ValueError(
            f"expected one {kind} called {name!r}, got those of {' and '.join(each.package for each in several)}; "
            f"write {' or '.join(paths)}"
        )
    if not paths:
        raise ValueError(f"expected a {kind} as package.module:name, got {name!r}, which no package announces")
    return paths[0]


def load(kind: Kind, name: str) -> Any:
    """The object that an outside name stands for.

    Modules are looked for in the current folder too, as Python itself does.

    Raises:
        ValueError: No such module or name, or the module's own code raised; the message says what to type.
        ImportRefusedError: Inside `announced_only`, a name that no installed package announces.
    """
    path = path_of(kind, name)
    refused = _REFUSED.get()
    if refused is not None and path not in {each.path for each in announced(kind).values()}:
        refused.add(name)
        raise ImportRefusedError(f"expected a {kind} that an installed package announces, got {name!r}: not imported")
    module, _, attribute = path.partition(":")
    found: Any = _imported(kind, name, path, module)
    for word in attribute.split("."):
        if not hasattr(found, word):
            public = [each for each in dir(found) if not each.startswith("_")]
            near = nearest_names(word, public, most=3)
            hint = f"did you mean {' or '.join(f'{module}:{each}' for each in near)}?" if near else _known(public)
            raise ValueError(f"expected a {kind} at {_said(kind, name, path)}, where there is no {word!r}; {hint}")
        found = getattr(found, word)
    return found


def _imported(kind: Kind, name: str, path: str, module: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder
    try:
        found = importlib.import_module(module)
        code_sha256(module)  # now, since the file may be edited while this process goes on
        return found
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            raise ValueError(
                f"expected a {kind} at {_said(kind, name, path)}: there is no module {error.name!r}; install its "
                "package, or start in the folder that holds it or name that folder in PYTHONPATH"
            ) from error
        raise _import_failure(kind, name, path, module, error) from error
    except Exception as error:
        raise _import_failure(kind, name, path, module, error) from error


def _import_failure(kind: Kind, name: str, path: str, module: str, error: Exception) -> ValueError:
    reason = (str(error).strip() or "no reason given").splitlines()[0]
    return ValueError(
        f"expected a {kind} at {_said(kind, name, path)}, whose module fails to import: {type(error).__name__}: "
        f"{reason}; to see where, type: python -c 'import {module}'"
    )


def _said(kind: Kind, name: str, path: str) -> str:
    """A name as the user wrote it, with where it comes from."""
    if is_path(name):
        return repr(name)
    package = _announced(kind, tuple(sys.path))[name][0].package
    return f"{path!r}, which the package {package} announces as {name!r}"


def _known(names: list[str]) -> str:
    shown = ", ".join(names[:10])
    return f"it has {shown}{', ...' if len(names) > 10 else ''}" if names else "it is empty"


def versions(modules: Iterable[str]) -> dict[str, str]:
    """Version of the package that each module belongs to, by package; modules without one are left out."""
    tops = {module.partition(".")[0] for module in modules}
    by_module = metadata.packages_distributions() if tops else {}
    packages = sorted({package for top in tops for package in by_module.get(top, ())})
    return {package: metadata.version(package) for package in packages}


def code_sha256(module: str) -> str | None:
    """First digits of the SHA-256 of an imported module's file, as it was when this was first asked, at its import.

    None for a module that is not imported, or comes from no file. What the module imports itself is not in it.
    """
    found = sys.modules.get(module)
    if found is None:
        return None
    if module not in _CODE or _CODE[module][0] is not found:
        try:
            digest = hashlib.sha256(Path(str(getattr(found, "__file__", None))).read_bytes()).hexdigest()[:CODE_DIGITS]
        except OSError:
            digest = None
        _CODE[module] = found, digest
    return _CODE[module][1]


def search_path() -> tuple[str, ...]:
    """The folders that modules are looked for in, for processes elsewhere."""
    return tuple(dict.fromkeys(str(Path(each).absolute()) for each in sys.path))


def extend_search_path(folders: Iterable[str]) -> None:
    """Add the folders of another process to this one's search path: those that exist here, after its own."""
    sys.path += [each for each in folders if each not in sys.path and Path(each).exists()]
