"""What one more stream of a ResNet-50 costs, beside the model that all share.

    python benchmarks/serve_memory.py [--base resnet50-bn] [--json results/serve/memory.json]

Streams are made with methods that adapt the norm layers' scale and shift, guarded, and fed; weights are untrained,
which changes no size. Per stream, each method in a process of its own: bytes of the tensors that its state holds,
without the guard's ring of earlier states; growth of Python's objects, by tracemalloc; growth of the resident memory of
the process, with nothing in the rings; and the ring when it is full, which is not counted in the limit of 2 MB.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import tracemalloc
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from poem import zoo
from poem.serve.learner import Learner, Served
from poem.streams.loading.prepare import Prepare

LIMIT = 2_000_000
METHODS = ("tent", "poem", "deyo", "sar")


def resident() -> int:
    """Resident memory of this process, in bytes."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def sizes(learner: Learner) -> tuple[int, int]:
    """Bytes of the tensors of a stream's state, without the guard's ring, and of the ring."""
    tensors = learner.state_dict()["tensors"]
    ring = {name for name in tensors if name.startswith("guard/ring/")}
    total = {name: each.numel() * each.element_size() for name, each in tensors.items()}
    return sum(size for name, size in total.items() if name not in ring), sum(total[name] for name in ring)


def measured(served: Served, streams: int, batches: int, side: int) -> dict[str, Any]:
    """The growth per stream, once as many exist as are warm."""
    images = torch.rand(4, 3, side, side, generator=torch.Generator().manual_seed(0))

    def made() -> Learner:
        learner = Learner(served, 4)
        for _ in range(batches):
            learner.answer(images)
        return learner

    held = [made() for _ in range(3)]  # what is made once is there
    gc.collect()
    began = resident()
    held += [made() for _ in range(streams)]
    gc.collect()
    grown = (resident() - began) / streams
    tracemalloc.start()  # afterwards: its own books are memory too
    traced = tracemalloc.get_traced_memory()[0]
    held += [made() for _ in range(3)]
    gc.collect()
    python = (tracemalloc.get_traced_memory()[0] - traced) / 3
    tracemalloc.stop()
    tensors, _ = sizes(held[-1])
    often = Served(**{**vars(served), "guard": {"view": "none", "snapshot_every": 1}})
    full = Learner(often, 4)
    for _ in range(6):
        full.answer(images)
    return {
        "tensors_of_the_state": tensors, "full_ring_not_counted": sizes(full)[1],
        "python_objects_traced": round(python), "resident_growth": round(grown),
        "tensors_and_objects": round(tensors + python),
    }  # fmt: skip


def main() -> int:
    """A row per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="resnet50-bn")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--side", type=int, default=32, help="pixels; the weights and what moves have no such size")
    parser.add_argument("--json", type=Path, default=Path("results/serve/memory.json"))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, base = zoo.load(args.base, "random")
    if args.only:
        settings = {"mean": base.mean, "std": base.std}
        served = Served(
            model=model, method=args.only, guard={"view": "none"}, settings=settings, prepare=Prepare(crop=args.side)
        )
        print(json.dumps(measured(served, args.streams, args.batches, args.side)))
        return 0
    rows: dict[str, dict[str, int]] = {}
    for method in METHODS:
        words = [sys.executable, *sys.argv, "--only", method]
        rows[method] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
        print(method, {name: f"{value / 1e6:.3f} MB" for name, value in rows[method].items()}, flush=True)
    below = {name: max(row["tensors_and_objects"], row["resident_growth"]) < LIMIT for name, row in rows.items()}
    weights = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    figures = {
        "command": f"python benchmarks/serve_memory.py --base {args.base}", "torch": version("torch"),
        "base": args.base, "model_bytes": weights, "limit_bytes": LIMIT, "streams": args.streams,
        "bytes_per_stream": rows,
        "below_the_limit": below,
    }  # fmt: skip
    print(json.dumps(below))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(below.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
