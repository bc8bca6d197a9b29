"""What guarded `auto` costs beside Tent: rows per image, and time in turns within one run.

    PYTHONPATH=src python benchmarks/auto_cost.py --out results/auto/cost.json

Every method runs a few batches in turn, so that what else the machine does falls on all alike; the median over turns
is reported, as a multiple of the model's plain forward pass.
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


def measure(net: str, batch: int, device: torch.device, turns: int, calls: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a batch, and as multiples of the plain forward pass; passes as the adapter counts them."""
    model, base = zoo.load(net)
    model = model.to(device)
    data = open_dataset("digits-test")
    pixels = corrupt(torch.stack([data[at] for at in range(batch)]), "impulse_noise", 4)
    images = (pixels.float() / 255 if pixels.dtype == torch.uint8 else pixels).to(device)
    adapters = {
        name: poem.adapt(model, mean=base.mean, std=base.std, **{"preset": "cifar", **row})
        for name, row in ROWS.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in adapters}
    for turn in range(turns + 1):  # the first one warms up
        for name, adapter in adapters.items():
            began = time.perf_counter()
            for _ in range(calls):
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
            "forward_rows": round(totals.forwards / (batch * calls * (turns + 1)), 2),
            "backward_rows": round(totals.backwards / (batch * calls * (turns + 1)), 2),
        }  # fmt: skip
    return found


def main() -> None:
    """Measure, print a table, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=["digits-bn", "digits-gn", "digits-ln"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    logging.getLogger("poem").setLevel(logging.ERROR)
    device = torch.device(args.device)
    found = {net: measure(net, args.batch, device, args.turns, args.calls) for net in args.nets}
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, CPU"
    about = {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__, "batch": args.batch}
    for net, rows in found.items():
        print(net)
        for row, values in rows.items():
            print(f"  {row:14} " + "  ".join(f"{key} {value}" for key, value in values.items()))
    if args.out is not None:
        args.out.write_text(json.dumps({"about": about, "networks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
