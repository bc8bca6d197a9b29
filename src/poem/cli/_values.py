"""Values of options, checked before a command begins: each error names the option, what it takes and what came."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from poem._util.limits import MANY as MANY
from poem._util.limits import SEEDS as SEEDS


def named_path(text: str) -> Path:
    """A path for argparse. An empty one, as of a shell variable that is not set, would be the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def triple(text: str) -> tuple[float, float, float]:
    """Three numbers between commas, or one for all three channels, for argparse."""
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 3):
        raise argparse.ArgumentTypeError(f"expected one number or three as 0.485,0.456,0.406, got {text!r}")
    if not all(map(math.isfinite, values)):
        raise argparse.ArgumentTypeError(f"expected finite numbers, as 0.485,0.456,0.406, got {text!r}")
    first, second, third = values * 3 if len(values) == 1 else values
    return first, second, third


def within(args: argparse.Namespace, low: int, high: int | None, *names: str) -> None:
    """Refuse integers, or lists of them, outside a range; an option that was not given is not looked at."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and (value < low or (high is not None and value > high)):
                meant = f"of at least {low}" if high is None else f"from {low} to {high}"
                raise ValueError(f"expected --{name.replace('_', '-')} {meant}, got {value}")


def finite(args: argparse.Namespace, *names: str) -> None:
    """Refuse NaN, infinity and negative numbers."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"expected --{name.replace('_', '-')} as a finite number of at least 0, got {value:g}")


def positive_std(std: Sequence[float] | None) -> None:
    """Refuse what cannot be divided by."""
    if std is not None and min(std) <= 0:
        raise ValueError(f"expected a std above 0, got {min(std):g}; for no normalisation pass --mean 0 --std 1")


def existing(args: argparse.Namespace, *names: str) -> None:
    """Refuse a file or folder that is not there, where the command would otherwise look elsewhere without a word."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not Path(value).expanduser().exists():
            raise FileNotFoundError(f"expected --{name} as a file or folder that is there, got {value!r}")


def device(*names: str, here: bool = True) -> list[str]:
    """Devices as torch writes them.

    Args:
        names: Such as cpu, cuda or cuda:1.
        here: Whether this machine must have them.

    Raises:
        ValueError: A name that torch does not know, or a device that is not there or cannot compute.
    """
    import torch

    found = []
    for name in names:
        try:
            found.append(torch.device(name))
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"expected a device such as cpu, cuda or cuda:1, got {name!r}") from error
    for name, each in zip(names, found, strict=True):
        if not here or each.type == "cpu":
            continue
        if each.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"expected a machine with CUDA for --device {' '.join(names)}; leave it out for the CPU")
        if each.type == "cuda" and (each.index or 0) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise ValueError(f"expected a GPU below {count} for --device {name}: this machine has {count} with CUDA")
        try:
            torch.zeros(1, device=each).cpu()
        except Exception as error:  # a backend that torch was built without, or one without numbers
            raise ValueError(f"expected a device that can compute, got {name!r}; leave it out for the CPU") from error
    return [str(each) for each in found]
