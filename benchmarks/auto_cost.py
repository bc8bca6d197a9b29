"""What guarded `auto` costs beside Tent: rows per image, and time in turns within one run.

    PYTHONPATH=src python benchmarks/auto_cost.py --out results/auto/cost.json

Every method runs a few batches in turn, so that what else the machine does falls on all alike; the median over turns
is reported, as a multiple of the model's plain forward pass. No image comes twice: the corrupted digits go by batch by
batch, with the next corruption where they end. Methods that leave out what they know would learn next to nothing from
images that come again.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import poem
from poem import zoo
from poem.streams import corrupt
from poem.streams.datasets import open_dataset

ROWS: dict[str, dict[str, Any]] = {
    "source": {"method": "source"},
    "tent": {"method": "tent"},
    "poem": {"method": "poem"},
    "auto": {"method": "auto"},
    "guarded tent": {"method": "tent", "guard": True},
    "guarded auto": {},
}


CORRUPTIONS = ("impulse_noise", "fog", "defocus_blur", "contrast", "gaussian_noise", "brightness")


def fresh(batch: int, count: int, device: torch.device) -> list[Tensor]:
    """Batches of corrupted digits, none of which comes twice.

    Raises:
        ValueError: More batches than there are.
    """
    data = open_dataset("digits-test")
    each = len(data) // batch
    if count > each * len(CORRUPTIONS):
        raise ValueError(f"expected at most {each * len(CORRUPTIONS)} batches of {batch}, got {count}; fewer --turns")
    pixels = torch.stack([data[at] for at in range(each * batch)])
    found: list[Tensor] = []
    for name in CORRUPTIONS[: -(-count // each)]:
        found += (corrupt(pixels, name, 4).float() / 255).to(device).split(batch)
    return found[:count]


def measure(net: str, batch: int, device: torch.device, turns: int, calls: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a batch, and as multiples of the plain forward pass; rows per image as the adapter counts them.

    The guard's own passes are not in its adapter's counts.
    """
    model, base = zoo.load(net)
    model = model.to(device)
    batches = fresh(batch, (turns + 1) * calls, device)
    adapters = {
        name: poem.adapt(model, mean=base.mean, std=base.std, **{"preset": "cifar", **row})
        for name, row in ROWS.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in adapters}
    for turn in range(turns + 1):  # the first one warms up
        for name, adapter in adapters.items():
            began = time.perf_counter()
            for images in batches[turn * calls : (turn + 1) * calls]:
                adapter(images)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                taken[name].append((time.perf_counter() - began) / calls)
    plain = statistics.median(taken["source"])
    found = {}
    for name, seconds in taken.items():
        median = statistics.median(seconds)
        totals = adapters[name].totals
        found[name] = {
            "ms": round(1000 * median, 2), "times_source": round(median / plain, 2),
            "forward_rows": round(totals.forwards_computed / totals.images, 2),
            "backward_rows": round(totals.backwards_computed / totals.images, 2),
            "taught": round(totals.taught / totals.images, 2),
        }  # fmt: skip
    return found


def main() -> None:
    """Measure, print a table, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=["digits-bn", "digits-gn", "digits-ln"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    logging.getLogger("poem").setLevel(logging.ERROR)
    device = torch.device(args.device)
    found = {net: measure(net, args.batch, device, args.turns, args.calls) for net in args.nets}
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, CPU"
    about = {
        "device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "batch": args.batch,
        "turns": args.turns, "calls": args.calls,
    }  # fmt: skip
    for net, rows in found.items():
        print(net)
        for row, values in rows.items():
            print(f"  {row:14} " + "  ".join(f"{key} {value}" for key, value in values.items()))
    if args.out is not None:
        args.out.write_text(json.dumps({"about": about, "networks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
