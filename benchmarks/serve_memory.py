"""What one more stream of a ResNet-50 costs, beside the model that all share.

    python benchmarks/serve_memory.py [--base resnet50-bn] [--json results/serve/memory.json]

Streams are guarded and run as the service runs them: the first batch of each alone, the next ones stacked, in rounds of
four streams. Weights are untrained, which changes no size. Per stream, each method in a process of its own: bytes of
the tensors of its saved state; bytes of all tensors that further streams hold, which has the row of a stacked stream
and what its adapter keeps beside it; growth of Python's objects, by tracemalloc; growth of the resident memory, after
freed memory was returned. Nothing is in the guards' rings: a full ring is measured apart and not counted in the limit
of 2 MB, which is for methods that adapt the norm layers' scale and shift.
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
from poem._util.malloc import return_freed_memory
from poem.serve.learner import Learner, Served, answer_stacked
from poem.serve.stack import Stack
from poem.streams.loading.prepare import Prepare

LIMIT = 2_000_000
METHODS = ("tent", "poem", "deyo", "sar", "auto")
REMEMBERS = ("auto",)
"""Not held to the limit: on batch norm it remembers statistics of every layer, for each of its copies."""
TOGETHER, IMAGES = 4, 4
"""Streams of a round, and images of each."""


def resident() -> int:
    """Resident memory of this process, in bytes."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def sizes(learner: Learner) -> dict[str, int]:
    """Bytes of the tensors of a stream's saved state: adapted ones and their steps, parts' memory, ring, the rest."""
    kinds = {"moved": "adapted", "step": "adapted", "memory": "memory"}
    found = dict.fromkeys(("adapted", "memory", "ring", "rest"), 0)
    for name, each in learner.state_dict()["tensors"].items():
        kind = "ring" if name.startswith("guard/ring/") else kinds.get(name.partition("/")[0], "rest")
        found[kind] += each.numel() * each.element_size()
    return found


def held_tensors() -> int:
    """Bytes of all tensors that Python reaches; what several tensors share counts once."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Streams:
    """Learners over one model that are computed in rounds of `TOGETHER` streams, stacked."""

    def __init__(self, served: Served, side: int) -> None:
        self.served, self.learners = served, list[Learner]()
        like = Learner(served, IMAGES)
        like.close()
        self.stack = Stack(like.adapter)
        self.images = torch.rand(IMAGES, 3, side, side, generator=torch.Generator().manual_seed(0))

    def add(self, count: int, rounds: int) -> None:
        """More streams: the first batch of each is computed alone, the next ones stacked, as the service does."""
        for _ in range(count // TOGETHER):
            made = [Learner(self.served, IMAGES, stack=self.stack) for _ in range(TOGETHER)]
            for learner in made:
                learner.answer(self.images)
            for _ in range(rounds):
                self.round(made)
            self.learners += made

    def round(self, learners: list[Learner]) -> None:
        """One batch of each, at once."""
        why = {learner.why_not_stacked(self.images) for learner in learners}
        if why != {""}:
            raise SystemExit(f"expected streams that can be stacked: {why}")
        for found in answer_stacked(self.stack, learners, [self.images] * len(learners)):
            if isinstance(found, Exception):
                raise found


def measured(served: Served, streams: int, rounds: int, side: int) -> dict[str, Any]:
    """The growth per stream, once as many exist as are warm."""
    all_of_them = Streams(served, side)
    all_of_them.add(TOGETHER, rounds)  # what is made once is there
    tensors = held_tensors()
    return_freed_memory()
    began = resident()
    all_of_them.add(streams, rounds)
    grown_tensors = (held_tensors() - tensors) / streams
    return_freed_memory()
    grown = (resident() - began) / streams
    tracemalloc.start()  # afterwards: its own books are memory too
    traced = tracemalloc.get_traced_memory()[0]
    all_of_them.add(TOGETHER, rounds)
    gc.collect()
    python = (tracemalloc.get_traced_memory()[0] - traced) / TOGETHER
    tracemalloc.stop()
    one = sizes(all_of_them.learners[-1])
    often = Learner(Served(**{**vars(served), "guard": {"view": "none", "snapshot_every": 1}}), IMAGES)
    for _ in range(6):
        often.answer(all_of_them.images)
    return {
        "state_adapted": one["adapted"], "state_remembered_by_parts": one["memory"], "state_rest": one["rest"],
        "ring_when_full_not_counted": sizes(often)["ring"], "ring_counted": one["ring"],
        "held_tensors": round(grown_tensors), "python_objects_traced": round(python),
        "held_tensors_and_objects": round(grown_tensors + python), "resident_growth": round(grown),
    }  # fmt: skip


def main() -> int:
    """A row per method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="resnet50-bn")
    parser.add_argument("--streams", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2, help="stacked batches of each stream, after its first alone")
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
        print(json.dumps(measured(served, args.streams, args.rounds, args.side)))
        return 0
    rows: dict[str, dict[str, int]] = {}
    for method in METHODS:
        words = [sys.executable, *sys.argv, "--only", method]
        rows[method] = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
        print(method, {name: f"{value / 1e6:.3f} MB" for name, value in rows[method].items()}, flush=True)
    counted = [name for name in METHODS if name not in REMEMBERS]
    below = {
        name: max(rows[name]["held_tensors_and_objects"], rows[name]["resident_growth"]) < LIMIT for name in counted
    }
    weights = sum(each.numel() * each.element_size() for each in (*model.parameters(), *model.buffers()))
    figures = {
        "command": f"python benchmarks/serve_memory.py --base {args.base}", "torch": version("torch"),
        "base": args.base, "model_bytes": weights, "limit_bytes": LIMIT, "streams": args.streams,
        "together": TOGETHER, "rounds": args.rounds, "bytes_per_stream": rows, "below_the_limit": below,
        "without_the_limit": list(REMEMBERS),
    }  # fmt: skip
    print(json.dumps(below))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if all(below.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
