"""Measure every row on every stream, and write for each which samples it gets right.

    PYTHONPATH=src:benchmarks python -m auto.measure --out results/auto/h200.jsonl --budget 540

One process prepares the images, the others measure. A task is a network, a stream, a seed and a batch size; all its
rows answer the same images. Each finished cell is one line of JSON; `--skip` leaves out the cells of earlier files, so
a run that its budget ended goes on in the next one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import multiprocessing as mp

import poem
from auto import rows as methods
from auto import streams
from auto.cells import Key, key_of, read_cells
from poem import zoo
from poem.bench.metrics import predicted
from poem.bench.sample_cells import bits_text

BATCHES = (64, 8, 1)
SHORT_N = 1000
"""Most images of a stream of short batches."""
MOST_BYTES, MOST_FILES = 15_000_000, 3
"""A result file that is full is followed by the next one, `NAME-2.jsonl`."""
LARGE_AT_ONCE = 4
"""Processes that run large networks at a time; each may need 20 GB of the device's memory."""
NET_COST = {"resnet50-keras": 20.0, "vit-tiny16": 6.0, "effnet-lite0": 8.0, "effnet-lite1": 11.0, "effnet-lite2": 14.0}
GRACE = 30.0
"""Seconds after the deadline in which processes may end by themselves."""


class OutOfTimeError(Exception):
    """The budget ended in the middle of a cell, or nobody waits for it any more."""


@dataclass(frozen=True)
class Task:
    """Cells that share their images: the rows of one network on one stream."""

    net: str
    stream: str
    seed: int
    batch: int
    rows: tuple[str, ...]
    n: int = 0
    """Images that the stream is made of."""

    def key(self, row: str) -> Key:
        """What tells a cell from every other."""
        return self.net, row, self.stream, self.seed, self.batch

    @property
    def cost(self) -> float:
        """About how long it takes, to run the dearest first."""
        seen = streams.scored_count(self.stream, self.n or 2000) * (2 if self.stream == "noise" else 1)
        large = NET_COST.get(self.net, 1.0)
        each = max(1.0, large * self.batch / 64)  # a small batch costs its launches
        return math.ceil(seen / self.batch) * each * sum(methods.passes(row) for row in ("source", *self.rows))


def tasks(args: argparse.Namespace) -> list[Task]:
    """Every task that the arguments ask for."""
    found = []
    for net in args.nets:
        for batch in args.batches:
            for stream in streams.names(net, batch):
                wanted = [row for row in methods.names(net, stream, batch) if args.rows is None or row in args.rows]
                if wanted and (args.streams is None or stream in args.streams):
                    own = [seed for seed in methods.seeds(net) if args.seeds is None or seed in args.seeds]
                    found += [Task(net, stream, seed, batch, tuple(wanted)) for seed in own]
    return found


def tree_hash(root: Path | None = None) -> str:
    """Twelve digits of a hash over the library's source files."""
    root = root or Path(poem.__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


# One task -------------------------------------------------------------------------------------------------------------


class Bench:
    """Measures tasks in one process; keeps the networks it has loaded."""

    def __init__(self, store: streams.Store, device: torch.device, *, fast: Any, weights: str | None) -> None:
        self.store, self.device, self.fast, self.weights = store, device, fast, weights
        self.tree, self.models = tree_hash(), dict[str, nn.Module]()

    def run(self, task: Task, deadline: float, emit: Any) -> None:
        """Measure a task's rows, source first; hand each finished cell to `emit`."""
        store, net, seed = self.store, task.net, task.seed
        labels = store.labels(net, seed)[: task.n]
        rows = streams.plan(task.stream, labels, seed)
        images = store.images(net, seed, rows, self.device)
        truth = labels[rows.image[rows.scored]]
        spare = store.spare(net, seed) if any("eata" in row for row in task.rows) else None
        about = {"net": net, "stream": task.stream, "seed": seed, "batch": task.batch, "n": len(truth)}
        about |= {"hash": rows.hashed(labels[rows.image]), "tree": self.tree}
        source: NDArray[np.int64] | None = None
        for row in ("source", *(each for each in task.rows if each != "source")):
            try:
                adapter = methods.make(
                    row, self._model(net), net, classes=store.mask(net, seed), spare=spare, seed=seed, fast=self.fast
                )
                answers, seconds, verdicts = self._answers(adapter, images, task.batch, deadline)
                adapter.unload()
            except OutOfTimeError:
                return
            except Exception as error:  # one row's failure is no reason to lose the others
                traceback.print_exc()
                emit({**about, "row": row, "error": f"{type(error).__name__}: {error}"[:300]})
                continue
            mine = answers[rows.scored]
            source = mine if row == "source" else source
            if row not in task.rows:
                continue
            right = mine == truth
            cell = {**about, "row": row, "right": int(right.sum()), "seconds": round(seconds, 2)}
            if source is not None:
                cell["differ"] = int((mine != source).sum())
            if row.startswith("guarded "):
                cell["events"] = len(adapter.events)
                cell["verdicts"] = {name: round(count / len(verdicts), 4) for name, count in Counter(verdicts).items()}
            emit({**cell, "bits": bits_text(right)})

    def _answers(
        self, adapter: Any, images: Tensor, batch: int, deadline: float
    ) -> tuple[NDArray[np.int64], float, list[str]]:
        """The class answered for every image, the seconds it took, and a guard's verdict after every batch."""
        found, verdicts, began = [], [], time.perf_counter()
        for pixels in images.split(batch):
            if time.time() > deadline or not still_wanted():
                raise OutOfTimeError
            found.append(predicted(adapter(pixels.float() / 255).detach()))
            if isinstance(adapter, poem.Guard):
                verdicts.append(adapter.verdict)
        answers = torch.cat(found).cpu().numpy()
        return answers, time.perf_counter() - began, verdicts

    def _model(self, net: str) -> nn.Module:
        if net not in self.models:
            self.models[net] = zoo.load(net, weights_of(net, self.weights))[0].to(self.device)
        return self.models[net]


def weights_of(net: str, weights: str | None) -> str | None:
    """Where a network's weights are: those of the small ones are part of the package."""
    return weights if weights == "random" or net in methods.LARGE else None


def still_wanted() -> bool:
    """Whether the process that started this one is still there to take what it finds."""
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def work(number: int, queues: list[Any], out: Any, deadline: float, settings: dict[str, Any]) -> None:
    """One process: takes tasks from its queues, in order, until they are empty or time is up."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        bench = Bench(
            streams.Store(Path(settings["store"])), torch.device(settings["device"]), fast=settings["fast"],
            weights=settings["weights"],
        )  # fmt: skip
        for each in queues:
            while time.time() < deadline and still_wanted():
                try:
                    task = each.get(timeout=2)
                except queue.Empty:
                    break
                try:
                    bench.run(task, deadline, out.put)
                except Exception:
                    traceback.print_exc()
                    print(f"process {number}: {task} failed", flush=True)
                if bench.device.type == "cuda" and task.net in methods.LARGE:
                    torch.cuda.empty_cache()
    finally:
        out.put(None)


# The whole ------------------------------------------------------------------------------------------------------------


class Writer:
    """Lines of JSON, each on the disk as soon as it is there; a full file is followed by the next."""

    def __init__(self, path: Path) -> None:
        self.path, self.number, self.cells, self.failed, self.lost = path, 1, 0, 0, 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def __call__(self, cell: dict[str, Any]) -> None:
        """Append a cell."""
        line = json.dumps(cell, separators=(",", ":")) + "\n"
        if self._file.tell() + len(line) > MOST_BYTES:
            if self.number == MOST_FILES:
                self.lost += 1
                return
            self.number += 1
            self._file.close()
            self._file = self.path.with_name(f"{self.path.stem}-{self.number}{self.path.suffix}").open("a")
        self._file.write(line)
        self._file.flush()
        self.cells, self.failed = self.cells + 1, self.failed + ("error" in cell)


def usable(nets: Sequence[str], root: Path | None, weights: str | None) -> list[str]:
    """Those networks that can be built and whose weights and images are there; the others are named."""
    found = []
    for net in nets:
        try:
            zoo.require_builder(zoo.base(net))
            if weights != "random":
                zoo.find_weights(zoo.base(net), weights_of(net, weights))
            streams.read(streams.set_of(net), root)
        except (ImportError, FileNotFoundError, ValueError) as error:
            print(f"left out: {net}: {str(error).splitlines()[0][:300]}", flush=True)
            continue
        found.append(net)
    return found


def prepared(args: argparse.Namespace, wanted: list[Task], store: streams.Store) -> list[Task]:
    """Write the images of the tasks; returns the tasks with their number of images, dearest first."""
    device, done = torch.device(args.device), {(*key_of(cell), cell["n"]) for cell in read_cells(args.skip)}
    found = []
    for task in wanted:
        n = store.prepare(task.net, task.seed, args.n, args.data, (), device)
        n = n if task.batch == 64 else min(n, SHORT_N)
        scored = streams.scored_count(task.stream, n)
        left = tuple(row for row in task.rows if (*task.key(row), scored) not in done)
        if left:
            found.append(Task(task.net, task.stream, task.seed, task.batch, left, n))
    for task in found:
        if task.net in methods.SMALL:
            shifts = streams.plan(task.stream, store.labels(task.net, task.seed), task.seed).shifts
            store.prepare(task.net, task.seed, args.n, args.data, shifts, device)
    return sorted(found, key=lambda task: -task.cost)


def measure(args: argparse.Namespace, store: streams.Store) -> Writer:
    """Prepare, start the processes, write what they find, stop in time."""
    began = time.time()
    deadline = began + args.budget
    reasons = {row: methods.missing(row) for row in args.rows or methods.ROWS}
    for row, why in reasons.items():
        if why:
            print(f"left out: {row}: {why[:200]}", flush=True)
    args.rows = [row for row, why in reasons.items() if not why]
    args.nets = usable(args.nets, args.data, args.weights)
    found = prepared(args, tasks(args), store)
    large = [task for task in found if task.net in methods.LARGE]
    small = [task for task in found if task.net not in methods.LARGE]
    cells = sum(len(task.rows) for task in found)
    print(f"{cells} cells in {len(found)} tasks; images ready after {time.time() - began:.0f} s", flush=True)
    context, write = mp.get_context("spawn"), Writer(args.out)
    queues = [context.Queue(), context.Queue()]
    for each, some in zip(queues, (large, small), strict=True):
        for task in some:
            each.put(task)
    out: Any = context.Queue()
    settings = {"store": str(store.folder), "device": args.device, "fast": args.fast, "weights": args.weights}
    count = min(args.processes, max(1, len(found)))
    own = [queues if number < args.large_processes and large else queues[1:] for number in range(count)]
    processes = [
        context.Process(target=work, args=(number, own[number], out, deadline, settings), daemon=True)
        for number in range(count if found else 0)
    ]
    for process in processes:
        process.start()
    collect(processes, out, write, deadline)
    words = f"{write.cells} of {cells} cells, {write.failed} of them failed, after {time.time() - began:.0f} s"
    print(words + (f"; {write.lost} did not fit into {MOST_FILES} files" if write.lost else ""), flush=True)
    for each in (*queues, out):
        each.cancel_join_thread()
    return write


def collect(processes: Sequence[Any], out: Any, write: Writer, deadline: float) -> None:
    """Write cells until every process has ended, or the grace after the deadline has."""
    ended, told = 0, time.time()
    while ended < len(processes) and time.time() < deadline + GRACE:
        try:
            cell = out.get(timeout=2)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                break
            continue
        if cell is None:
            ended += 1
            continue
        write(cell)
        if time.time() - told > 20:
            told = time.time()
            print(f"{write.cells} cells", flush=True)
    for process in processes:
        process.join(timeout=2)
        if process.is_alive():
            process.terminate()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, default=Path("results/auto/cells.jsonl"), help="file to append cells to")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets; default $POEM_DATA")
    parser.add_argument("--weights", default=None, help="folder of the large networks' weights; default $POEM_DATA")
    parser.add_argument("--nets", type=names_among(methods.NETS), default=list(methods.NETS))
    parser.add_argument("--rows", type=names_among(methods.ROWS), default=None)
    every = [stream for net in methods.NETS for stream in streams.names(net)]
    parser.add_argument("--streams", type=names_among(every), default=None)
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=None)
    parser.add_argument("--batches", type=lambda text: [int(each) for each in text.split(",")], default=list(BATCHES))
    parser.add_argument("--n", type=int, default=2000, help="images of a stream; 1,000 of a set that has fewer")
    parser.add_argument("--processes", type=int, default=15 if cuda else 1)
    parser.add_argument("--large-processes", type=int, default=LARGE_AT_ONCE, help="of them, for large networks")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds until it stops and keeps what it has")
    parser.add_argument("--skip", type=Path, nargs="*", default=[], help="earlier result files: their cells are done")
    parser.add_argument("--fast", action="store_true", help="record CUDA graphs (fast='auto')")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--store", type=Path, default=None, help="folder for the images; default one in memory")
    parser.add_argument("--list", action="store_true", help="print the number of cells of each network, and stop")
    parser.add_argument("--pack", type=Path, default=None, help="write cifar10.npz and digits-test.npz there, and stop")
    args = parser.parse_args(arguments)
    args.fast = "auto" if args.fast else False
    if args.data is None and os.environ.get("POEM_DATA"):
        args.data = Path(os.environ["POEM_DATA"]).expanduser()
    if args.data is not None:
        os.environ["POEM_DATA"] = str(args.data)  # the zoo looks for weights there, in every process
    if not set(args.batches) <= set(BATCHES):
        parser.error(f"expected --batches out of {', '.join(map(str, BATCHES))}, got {args.batches}")
    return args


def names_among(known: Sequence[str]) -> Any:
    """Names with commas between them, out of a list; `cifar10-*` stands for all that match."""
    from fnmatch import fnmatchcase

    def parsed(text: str) -> list[str]:
        found = []
        for word in text.split(","):
            matching = [name for name in dict.fromkeys(known) if fnmatchcase(name, word)]
            if not matching:
                raise argparse.ArgumentTypeError(f"expected names out of {', '.join(dict.fromkeys(known))}; got {word}")
            found += matching
        return list(dict.fromkeys(found))

    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 0 unless every cell failed."""
    args = parse(arguments)
    logging.getLogger("poem").setLevel(logging.ERROR)
    if args.pack is not None:
        for data in ("cifar10", "digits-test"):
            print(streams.pack(data, args.data, args.pack))
        return 0
    if args.list:
        for net in args.nets:
            count = sum(len(task.rows) for task in tasks(args) if task.net == net)
            print(f"{net}: {count} cells")
        return 0
    with contextmanager(streams.scratch)() as folder:
        write = measure(args, streams.Store(args.store or folder))
    return int(write.cells > 0 and write.cells == write.failed)


if __name__ == "__main__":
    sys.exit(main())
