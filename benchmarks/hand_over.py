"""What a batch costs the process that takes it from loader processes: CPU time, bytes, and the rate that this allows.

    python benchmarks/hand_over.py --out results/streams/hand_over.json

Batches of 64 images of 224 pixels, by the two ways to hand them over, in turns:

- slots: as runs for a GPU take them. The pixels are in memory that all processes map; they are copied once, which
  stands for the copy to page-locked memory.
- tensors: each batch in shared memory of its own, made floating point on the CPU, and these numbers copied.

Once from memory, where a process has nothing to do but to stack images, so that handing over is the limit, and once
from JPEG files. `taker_ms` is CPU time of the taking process per batch: with loader processes the only part that more
of them do not share. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from stream_speed import timed, write_images  # noqa: E402
from torch import Tensor  # noqa: E402

from poem._util.files import write_atomic  # noqa: E402
from poem._util.limits import available_cores  # noqa: E402
from poem._util.log_level import errors_only  # noqa: E402
from poem.bench.provenance import provenance  # noqa: E402
from poem.streams.datasets import Batches, Tensors, batches, image_folder  # noqa: E402
from poem.streams.images import Images  # noqa: E402
from poem.streams.loading import processes  # noqa: E402
from poem.streams.loading.prepare import IMAGENET_EVAL  # noqa: E402

SCHEMA = 1


class Copied:
    """Copies every batch into the same memory, as page-locked memory is used again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def __call__(self, images: Tensor) -> Tensor:
        """The images, in that memory."""
        if self._memory.shape != images.shape or self._memory.dtype != images.dtype:
            self._memory = torch.empty_like(images)
        return self._memory.copy_(images)


def by_slots(found: Batches) -> Iterator[Tensor]:
    """The images as a run for a GPU has them: pixels."""
    copied = Copied()
    return (copied(batch.images) for batch in found.pixels())


def by_tensors(found: Batches) -> Iterator[Tensor]:
    """The images as floating point, from tensors that cross one by one."""
    copied, forks = Copied(), processes.forks
    processes.forks = lambda: False
    try:
        found.start()
    finally:
        processes.forks = forks
    return (copied(images) for images, _ in found)


WAYS: dict[str, Callable[[Batches], Iterator[Tensor]]] = {"tensors": by_tensors, "slots": by_slots}


def row(data: Images, args: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Both ways in turns: the best rate and the least CPU time of each."""
    order = np.arange(args.batches * args.batch) % len(data)
    found: dict[str, dict[str, float]] = {}
    for _ in range(args.turns):
        for name, way in WAYS.items():
            size = 0

            def taken(way: Callable[[Batches], Iterator[Tensor]] = way) -> Iterator[None]:
                nonlocal size
                for images in way(batches(data, order, args.batch, workers=workers)):
                    size = images.nbytes
                    yield

            got, held = timed(taken(), args.seconds), found.get(name)
            now = {"images_per_s": args.batch * got["per_s"], "taker_ms": 1000 * got["cpu_s"], "bytes": float(size)}
            found[name] = now if held is None else {
                "images_per_s": max(now["images_per_s"], held["images_per_s"]),
                "taker_ms": min(now["taker_ms"], held["taker_ms"]), "bytes": now["bytes"],
            }  # fmt: skip
    ratio = {key: found["slots"][key] / found["tensors"][key] for key in found["slots"]}
    return {"workers": workers, **found, "slots_over_tensors": ratio}


def in_memory(data: Images, count: int) -> Tensors:
    """The images, decoded."""
    return Tensors(torch.stack([data[at] for at in range(count)]), list(range(count)))


def line(found: dict[str, Any]) -> str:
    """One row as text."""
    slots, tensors = found["slots"], found["tensors"]
    return (
        f"{found['images']:>8} {found['workers']} processes: taker {tensors['taker_ms']:.1f} -> "
        f"{slots['taker_ms']:.1f} ms a batch, {tensors['bytes'] / 1e6:.1f} -> {slots['bytes'] / 1e6:.1f} MB copied, "
        f"{found['slots_over_tensors']['images_per_s']:.2f} x the images/s"
    )


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    found.add_argument("--batch", type=int, default=64)
    found.add_argument("--batches", type=int, default=40, help="per measurement, at most")
    found.add_argument("--seconds", type=float, default=4.0, help="per measurement, at most")
    found.add_argument("--turns", type=int, default=3, help="measurements of each way")
    found.add_argument("--images", type=int, default=256, help="files to make")
    found.add_argument("--workers", default="1,2", help="loader processes")
    found.add_argument("--out", type=Path, help="a JSON file")
    return found


def main(words: list[str] | None = None) -> int:
    """Measure every row, print it and write the file."""
    args = parser().parse_args(words)
    torch.set_num_threads(1)
    content: dict[str, Any] = {
        "schema": SCHEMA, "provenance": provenance(), "cores": available_cores(), "load": os.getloadavg()[0],
        "settings": {name: str(value) for name, value in vars(args).items() if name != "out"}, "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, errors_only():
        write_images(Path(folder), args.images)
        files = image_folder(folder, prepare=IMAGENET_EVAL)
        for name, data in (("memory", in_memory(files, min(args.batch, args.images))), ("files", files)):
            for workers in map(int, args.workers.split(",")):
                content["rows"].append({"images": name, **row(data, args, workers)})
                print(line(content["rows"][-1]), flush=True)
    if args.out is not None:
        write_atomic(args.out, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
