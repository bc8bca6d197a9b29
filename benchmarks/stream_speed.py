"""From files to answers: images per second through a run, beside the adapter's own and the loader's own.

    python benchmarks/stream_speed.py --device cuda --out results/speed/stream.json
    python benchmarks/stream_speed.py --device cpu --net resnet18-bn --images 128 --batches 4 --workers 0,1
    python benchmarks/stream_speed.py --costs --images 64 --out results/streams/loading_cost.json  # CPU time per image

Makes a folder of JPEG images (noise of several scales, 256 pixels) and reads it as ImageNet is read: short
side 256, centre 224. Rows: clean images, and images corrupted on the fly by each of `--corruptions`, for each number
of loader processes. ResNet-50 with random weights, POEM with one update, all samples selected (`--select 100`), bf16,
CUDA graphs. Needs torch, torchvision, numpy and Pillow. poem is found beside this file, installed or not.

- loader: the batches alone, as the run takes them, nothing else running: pixels where the device is a GPU, else
  floating point. `loader_cpu_ms` is CPU time of this process per batch: with loader processes it is the part that more
  of them do not share. `batch_bytes` go to the device.
- adapter: the adapter alone, on images that are on the device.
- run: `StreamRun`, with batches loaded ahead; "in turn" the same with `prefetch=0`. `run_cpu_ms` is CPU time of this
  process per batch, of the adapter's thread and of the one that loads ahead.

The clock starts when the first batch is there; `start_s` is how long that took. The file is written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _speed_nets import IMAGENET, network, with_forced_selection  # noqa: E402
from tree_hash import tree_hash  # noqa: E402

import poem  # noqa: E402
from poem._util.files import write_atomic  # noqa: E402
from poem._util.limits import available_cores  # noqa: E402
from poem._util.log_level import errors_only  # noqa: E402
from poem.bench.provenance import provenance  # noqa: E402
from poem.bench.run_stream import StreamRun  # noqa: E402
from poem.streams.datasets import Batches, batches, image_folder  # noqa: E402
from poem.streams.images import Images  # noqa: E402
from poem.streams.loading.prepare import IMAGENET_EVAL  # noqa: E402
from poem.streams.shift import CORRUPTIONS  # noqa: E402

SCHEMA, WARM_UP = 1, 4
CLASSES, STORED = 10, 256
"""Folders of images, and the side of an image in pixels."""
SHARES = (0.45, 0.3, 0.15, 0.1)
"""Of noise of 4, 16, 64 and 256 pixels in an image."""


def write_images(folder: Path, count: int) -> None:
    """Write JPEG images: noise of four scales, in files of about 25 KB, as photographs of that size are."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for at in range(count):
        layers = [
            Image.fromarray(draw.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize((STORED, STORED), 3)
            for side in (4, 16, 64, STORED)
        ]
        mixed = sum(share * np.asarray(each, np.float32) for share, each in zip(SHARES, layers, strict=True))
        path = folder / f"class{at % CLASSES}" / f"{at:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(mixed).astype(np.uint8)).save(path, quality=90)


def loaded(data: Images, args: argparse.Namespace, corruption: str, workers: int) -> Batches:
    """`args.batches` batches of the images, again from the beginning where there are not enough."""
    order = np.arange(args.batches * args.batch) % len(data)
    shift = None if corruption == "clean" else (corruption, 5)
    return batches(data, order, args.batch, corruption=shift, workers=workers)


def made_adapter(args: argparse.Namespace) -> Any:
    """POEM with one update on a network with random weights; the selection is forced unless --select is negative."""
    torch.manual_seed(0)
    model, _ = network(args.net)
    model = model.to(args.device, memory_format=torch.channels_last).eval()
    name, changes = with_forced_selection("poem1", args.select / 100, args.batch) if args.select >= 0 else ("poem", {})
    return poem.adapt(model, name, **changes, **IMAGENET, batch_size=args.batch, precision=args.precision, fast=True)


def timed(items: Iterable[Any], seconds: float) -> dict[str, float]:
    """Items per second, and CPU seconds per item, after the first one, until none are left or the time is over."""
    began, count, first, last, cpu = time.perf_counter(), 0, 0.0, 0.0, 0.0
    coming: Iterator[Any] = iter(items)
    for item in coming:
        del item
        last = time.perf_counter()
        first, cpu, count = first or last, cpu or time.process_time(), count + 1
        if last - first > seconds:
            break
    spent = time.process_time() - cpu
    if hasattr(coming, "close"):
        coming.close()
    if count < 2:
        raise ValueError(f"expected two batches or more, got {count}; raise --batches or --seconds")
    return {
        "per_s": (count - 1) / (last - first), "cpu_s": spent / (count - 1), "start_s": first - began, "batches": count,
    }  # fmt: skip


def adapter_alone(adapter: Any, args: argparse.Namespace) -> float:
    """Images per second of the adapter on batches that are on the device, answers copied to the CPU."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(args.batch, 3, 224, 224, generator=generator).to(args.device) for _ in range(4)]
    for at in range(WARM_UP):
        adapter(images[at]).cpu()
    return args.batch * timed((adapter(images[at % 4]).cpu() for at in range(args.batches)), args.seconds)["per_s"]


def measured(data: Images, adapter: Any, args: argparse.Namespace, corruption: str, workers: int) -> dict[str, Any]:
    """One row."""
    pixels = args.device.startswith("cuda")
    alone = loaded(data, args, corruption, workers)
    loader = timed(alone.pixels() if pixels else alone, args.seconds)
    row: dict[str, Any] = {"images": corruption, "workers": workers, "batch": args.batch, "status": "ok"}
    row |= {"loader_images_per_s": args.batch * loader["per_s"], "start_s": loader["start_s"]}
    row |= {"loader_cpu_ms": 1000 * loader["cpu_s"], "batch_bytes": args.batch * data[0].numel() * (1 if pixels else 4)}
    for name, depth in (("run", args.prefetch), ("in_turn", 0)):
        run = StreamRun(adapter, prefetch=depth)
        found = timed(run.answers(loaded(data, args, corruption, workers)), args.seconds)
        row |= {
            f"{name}_images_per_s": args.batch * found["per_s"], f"{name}_adapt_s": run.adapt_seconds,
            f"{name}_load_s": run.load_seconds, f"{name}_batches": found["batches"],
            f"{name}_cpu_ms": 1000 * found["cpu_s"],
        }  # fmt: skip
    return row


def derived(row: dict[str, Any], adapter: float) -> dict[str, Any]:
    """The row with its shares: of the adapter's speed, and of the slower of adapter and loader."""
    slower = min(adapter, row["loader_images_per_s"])
    return {
        **row, "adapter_images_per_s": adapter, "of_adapter": row["run_images_per_s"] / adapter,
        "of_slower": row["run_images_per_s"] / slower,
        "over_in_turn": row["run_images_per_s"] / row["in_turn_images_per_s"],
    }  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """One row as text."""
    return (
        f"{row['images']:>16} {row['workers']:>3} processes: loader {row['loader_images_per_s']:7.0f}/s, "
        f"adapter {row['adapter_images_per_s']:7.0f}/s, run {row['run_images_per_s']:7.0f}/s = "
        f"{row['of_adapter']:.0%} of the adapter, {row['of_slower']:.0%} of the slower, "
        f"{row['over_in_turn']:.2f} x in turn; CPU per batch: loader {row['loader_cpu_ms']:.1f} ms, run "
        f"{row['run_cpu_ms']:.1f} ms"
    )


def loading_costs(data: Images, count: int) -> dict[str, float]:
    """Milliseconds of CPU time to load an image, clean and with each corruption: the least of three, on one thread."""
    torch.set_num_threads(1)
    found = {}
    for name in ("clean", *CORRUPTIONS):
        times = []
        for _ in range(3):
            began = time.process_time()
            for _ in batches(data, range(count), 32, corruption=None if name == "clean" else (name, 5)):
                pass
            times.append(time.process_time() - began)
        found[name] = round(1000 * min(times) / count, 2)
        print(f"{name:>18} {found[name]:6.2f} ms", flush=True)
    return found


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    found.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    found.add_argument("--net", default="resnet50-bn", help="a network of benchmarks/speed.py")
    found.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16"])
    found.add_argument("--select", type=int, default=100, help="per cent of samples selected; -1: as POEM selects")
    found.add_argument("--batch", type=int, default=64)
    found.add_argument("--batches", type=int, default=200, help="per measurement, at most")
    found.add_argument("--seconds", type=float, default=8.0, help="per measurement, at most")
    found.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no row is begun")
    found.add_argument("--images", type=int, default=2000, help="files to make")
    found.add_argument("--folder", type=Path, help="where to make them, or where they are; default: a temporary one")
    found.add_argument("--corruptions", default="clean,contrast,glass_blur", help="by default one cheap, one costly")
    found.add_argument("--workers", default=f"0,4,8,{available_cores()}", help="loader processes")
    found.add_argument("--prefetch", type=int, help="batches ahead; default: that of StreamRun")
    found.add_argument("--threads", type=int, default=1, help="of the CPU, in this process")
    found.add_argument("--costs", action="store_true", help="only CPU time per image, of every corruption")
    found.add_argument("--out", type=Path, help="a JSON file")
    return found


def main(words: list[str] | None = None) -> int:
    """Make the images, measure every row, print it and write the file."""
    args, began = parser().parse_args(words), time.perf_counter()
    torch.set_num_threads(args.threads)
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    content: dict[str, Any] = {
        "schema": SCHEMA, "tree": tree_hash(), "provenance": provenance(), "device": device,
        "cores": available_cores(), "load": os.getloadavg()[0], "skipped": [], "rows": [], "finished": False,
        "settings": {name: str(value) for name, value in vars(args).items() if name not in ("out", "folder")},
    }  # fmt: skip
    rows = [(each, int(n)) for each in args.corruptions.split(",") for n in dict.fromkeys(args.workers.split(","))]
    with tempfile.TemporaryDirectory() as temporary, errors_only():
        folder = args.folder or Path(temporary)
        if not any(folder.glob("class*")):
            write_images(folder, args.images)
        data = image_folder(folder, prepare=IMAGENET_EVAL)
        if args.costs:
            content = {"schema": SCHEMA, "provenance": provenance(), "ms_per_image": loading_costs(data, args.images)}
            if args.out is not None:
                write_atomic(args.out, json.dumps(content, indent=1) + "\n")
            return 0
        adapter = made_adapter(args)
        speed = adapter_alone(adapter, args)
        for corruption, workers in rows:
            if time.perf_counter() - began > args.budget:
                content["skipped"].append([corruption, workers])
                continue
            row = derived(measured(data, adapter, args, corruption, workers), speed)
            content["rows"].append(row)
            print(line(row), flush=True)
            if args.out is not None:
                write_atomic(args.out, json.dumps(content, indent=1) + "\n")
        content |= {"notes": list(adapter.last.notes), "finished": True}
        adapter.unload()
    if args.out is not None:
        write_atomic(args.out, json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
