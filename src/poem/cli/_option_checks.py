"""Checks of option values before a command starts: each error names the option, what it takes and what came."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path


def path_argument(text: str) -> Path:
    """Parse a path for argparse; an empty one, as of an unset shell variable, would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def rgb_argument(text: str) -> tuple[float, float, float]:
    """Parse three numbers between commas, or one for all three channels, for argparse."""
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


def check_range(args: argparse.Namespace, low: int, high: int | None, *names: str) -> None:
    """Raise if an option's integer, or one of its integers, is outside a range; options that are None pass."""
    for name in names:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and (value < low or (high is not None and value > high)):
                meant = f"of at least {low}" if high is None else f"from {low} to {high}"
                raise ValueError(f"expected --{name.replace('_', '-')} {meant}, got {value}")


def check_finite(args: argparse.Namespace, *names: str) -> None:
    """Raise if an option's number is NaN, infinite or negative; options that are None pass."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"expected --{name.replace('_', '-')} as a finite number of at least 0, got {value:g}")


def check_std(std: Sequence[float] | None) -> None:
    """Raise if a std is not above 0, since pixels are divided by it."""
    if std is not None and min(std) <= 0:
        raise ValueError(f"expected a std above 0, got {min(std):g}; for no normalisation pass --mean 0 --std 1")


def check_exists(args: argparse.Namespace, *names: str) -> None:
    """Raise if a file or folder is missing, where the command would otherwise silently use a default place."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not Path(value).expanduser().exists():
            raise FileNotFoundError(f"expected --{name} as a file or folder that is there, got {value!r}")


def check_devices(*names: str, here: bool = True) -> list[str]:
    """Parse devices, raise if one cannot be used, and return them as torch writes them.

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
