"""Measure two cells of each suite again, on a CPU, and compare them with those of results/study.

    PYTHONPATH=src:benchmarks python -m study.check --suites cifar10 --data DATA
    PYTHONPATH=src:benchmarks python -m study.check --suites imagenet-3k --data DATA --n 256

A cell agrees where its accuracy differs by at most one standard error of an accuracy over so many samples, and where
at most 1 sample in 200 is right in one of the two alone. The samples are the same ones, so that rounding turns few of
them, and another method of nearly the same accuracy turns more: `bn` in place of `tent` 24 of 2,000 on `cifar10-bn`.
With `--n`, a whole number of batches, the first n samples of the stream are measured and compared: an answer depends on
nothing that comes after it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from auto import streams
from auto.cells import read_cells

from poem.bench.sample_cells import read_bits
from poem.zoo.training_check import accuracy_error
from study import measure, parts
from study.evidence import Evidence, load_all


@dataclass(frozen=True)
class Chosen:
    """A cell to measure again; seed `SEED`, batch 64."""

    part: str
    net: str
    stream: str
    row: str


CELLS = {
    "cifar10": (Chosen("cifar10", "cifar10-bn", "fog-5", "tent"), Chosen("cifar10", "cifar10-vit", "snow-5", "poem")),
    "imagenet-3k": (
        Chosen("imagenet", "vit-tiny16", "snow-5", "tent"), Chosen("imagenet", "vit-tiny16", "fog-5", "auto"),
    ),
    "tiny-imagenet": (
        Chosen("lite0", "effnet-lite0", "contrast-5", "bn"), Chosen("lite0", "effnet-lite0", "fog-5", "tent"),
    ),
}  # fmt: skip
"""Cheap ones, and none that collapses: a run that does is another one with every rounding."""
SEED = 0
OTHER = 0.005
"""The largest share of samples that rounding may turn from right to wrong or back.

Chosen, not measured on a GPU: on one CPU with AVX-512 and without, the two cells of CIFAR-10 were equal in all 2,000
samples, while `bn` differs from `tent` in 24. Where methods hardly differ (EfficientNet-Lite0, 500 images) no bound
tells them apart."""


@dataclass(frozen=True)
class Result:
    """A cell that was measured again beside the one of the results; accuracies in percent."""

    chosen: Chosen
    n: int
    of: int
    """Samples of the cell in the results."""
    now: float
    then: float
    other: int
    """Samples that are right in one of the two alone."""

    @property
    def error(self) -> float:
        """Standard error of the accuracy."""
        return max(accuracy_error(self.then, self.n), 100 / self.n**1.5)

    @property
    def agrees(self) -> bool:
        """Within a standard error, and sample by sample but for a few."""
        return abs(self.now - self.then) <= self.error and self.other <= self.most

    @property
    def most(self) -> int:
        """Samples that may be other; one of a short stretch."""
        return max(1, math.floor(OTHER * self.n))

    def __str__(self) -> str:
        each, first = self.chosen, "" if self.n == self.of else f" (the first {self.n:,} of {self.of:,})"
        verdict = "agrees" if self.agrees else "DIFFERS"
        return (
            f"{each.net} {each.row} on {each.stream}{first}: {self.now:.2f} % now, {self.then:.2f} % in the results, "
            f"standard error {self.error:.2f}, {self.other} of {self.n:,} samples other (most: {self.most}): {verdict}"
        )


def compare(cell: Mapping[str, Any], evidence: Evidence, chosen: Chosen) -> Result:
    """A measured cell beside the results'.

    Raises:
        ValueError: The results have no such cell, or one of other samples.
    """
    held = evidence.run(chosen.net, chosen.row, chosen.stream).get(cell["seed"])
    if held is None:
        raise ValueError(f"no cell {chosen.net} {chosen.row} {chosen.stream} in results/study to compare with")
    n = cell["n"]
    if n > len(held.bits) or (n == len(held.bits) and cell["hash"] != held.stream):
        raise ValueError(
            f"expected the {len(held.bits):,} samples of the results for {chosen.net} {chosen.stream}, got {n:,} "
            "others: --data holds other images, or another copy of them"
        )
    now, then = read_bits(cell["bits"], n), held.bits[:n]
    return Result(
        chosen, n, len(held.bits), 100 * float(now.mean()), 100 * float(then.mean()), int(np.sum(now != then))
    )


def other_stream(chosen: Chosen, evidence: Evidence, data: Path | None) -> str | None:
    """Why the images in a folder are not those of the results' cell, in words; None where they are.

    The hash of a stream is over all of its samples, so that a prefix does not tell: streams take a set's images in an
    order that depends on their number.
    """
    held = evidence.run(chosen.net, chosen.row, chosen.stream).get(SEED)
    if held is None:
        return f"no cell {chosen.net} {chosen.row} {chosen.stream} in results/study to compare with"
    kind = streams.set_of(chosen.net)
    labels = streams.read(kind, data)[1]
    own = labels[streams.order(kind, labels, SEED)][: len(held.bits)]
    plan = streams.plan(chosen.stream, own, SEED)
    if plan.hashed(own[plan.image]) == held.stream:
        return None
    return (
        f"expected the {len(held.bits):,} samples of the results for {chosen.net} {chosen.stream} (hash "
        f"{held.stream}), got others: --data has {len(labels):,} images of {kind}, other ones or in another number"
    )


def measured(chosen: Chosen, args: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """The cell, measured now; None where its network or images are not found, which is printed."""
    out = folder / "again.jsonl"
    told = ["--parts", chosen.part, "--nets", chosen.net, "--streams", chosen.stream, "--rows", chosen.row]
    told += ["--seeds", str(SEED), "--again", "--device", args.device, "--processes", "1", "--out", str(out)]
    told += ["--store", str(args.store or folder / "store")]
    told += [] if args.data is None else ["--data", str(args.data)]
    told += [] if args.weights is None else ["--weights", args.weights]
    told += [] if args.n is None else ["--n", str(args.n)]
    measure.measure(measure.parse(told))
    cells = [cell for cell in read_cells([out]) if cell["row"] == chosen.row and cell["net"] == chosen.net]
    return cells[-1] if cells else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and compare; returns 1 where a cell differs or could not be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="cifar10", help=f"with commas between, out of {', '.join(parts.SUITES)}")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets; default $POEM_DATA")
    parser.add_argument("--weights", default=None, help="folder of the large networks' weights; default $POEM_DATA")
    parser.add_argument("--nets", default=None, help="only these networks, with commas between")
    parser.add_argument("--n", type=int, default=None, help="at most so many samples, a multiple of 64")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--store", type=Path, default=None, help="folder for prepared images; default a temporary one")
    args = parser.parse_args(arguments)
    suites = args.suites.split(",")
    if unknown := [suite for suite in suites if suite not in CELLS]:
        parser.error(f"expected --suites out of {', '.join(CELLS)}; got {', '.join(unknown)}")
    if args.n is not None and (args.n < 64 or args.n % 64):
        parser.error(f"expected --n as a multiple of 64, so that batches are those of the results; got {args.n}")
    evidence, _, _ = load_all()
    failed = 0
    for chosen in (each for suite in suites for each in CELLS[suite]):
        if args.nets is not None and chosen.net not in args.nets.split(","):
            continue
        try:
            if other := other_stream(chosen, evidence, args.data):
                raise ValueError(other)
            with tempfile.TemporaryDirectory() as folder:
                cell = measured(chosen, args, Path(folder))
            if cell is None:
                raise ValueError(f"{chosen.net} {chosen.row} on {chosen.stream} was not measured; see above")
            result = compare(cell, evidence, chosen)
        except (FileNotFoundError, ValueError) as error:
            print(error)
            failed += 1
            continue
        print(result)
        failed += not result.agrees
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
