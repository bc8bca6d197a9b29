"""Measure the cells of the study in several processes that share a GPU, those that matter most first.

    PYTHONPATH=src:benchmarks python -m study.measure --list
    PYTHONPATH=src:benchmarks python -m study.measure --data DATA --out results/study/raw/a.jsonl --budget 540

Streams, images and result files are those of `auto`. Work is a list that all processes take from, the first entry that
can be run first: an entry is a corruption of a data set to prepare, or rows on one stream. Rows wait until their images
are there and the GPU has room for them. Each finished cell is one line of JSON; `--skip` leaves out the cells of
earlier files, so that a run which its budget ended goes on in the next one.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import logging
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from auto import streams
from auto.cells import Key, key_of, read_cells
from auto.measure import OutOfTimeError, Writer, collect, names_among, still_wanted, tree_hash, usable, weights_of
from auto.rows import LARGE
from numpy.typing import NDArray
from torch import Tensor, nn
from torch import multiprocessing as mp

import poem
from poem import zoo
from poem.bench.metrics import predicted
from poem.bench.sample_cells import bits_text
from poem.streams.shift import CLEAN, Shift
from study import costs, parts, rows

ROOT = Path(__file__).resolve().parents[2]
EARLIER = tuple(sorted((ROOT / "results" / "auto").glob("*.jsonl")))
MEASURED = tuple(sorted((ROOT / "results" / "study").glob("*.json")))
"""Cells that are not run again, and whose seconds estimates are made from."""
LONGEST = 60.0
"""Seconds of one process that the rows of one entry take at most, unless a single one takes longer."""
SOURCE_IMAGES = 512
"""Clean images for EATA's anchor and the like; those of other methods that read some are as many as their paper has."""
MANY_SOURCE_IMAGES = 2000
STEPS = 255
"""Entropies are kept as whole numbers from 0 to this, which is ln C."""

Done = set[tuple[Key, int, str]]
"""Cells that are there: key, number of samples, hash of the stream."""
OTHER = (
    "--other-images measures other copies of a data set, such as JPEGs, all the same; keep their files apart "
    "(study.join --alone --out FOLDER)"
)
Stream = tuple[str, str, int, int, int]
"""Network, stream, seed, batch size, number of samples."""


@dataclass(frozen=True)
class Entry:
    """Work for one process: a corruption to prepare, or rows on one stream."""

    part: str
    net: str
    seed: int
    shift: Shift | None = None
    """What to prepare; None for rows."""
    stream: str = ""
    batch: int = 64
    images: int = 0
    names: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    """Places in the list of what must be prepared before."""
    seconds: float = 0.0
    gigabytes: float = 1.0

    def key(self, row: str) -> Key:
        """What tells a cell from every other."""
        return self.net, row, self.stream, self.seed, self.batch


# What there is to do --------------------------------------------------------------------------------------------------


def wanted(args: argparse.Namespace) -> Iterator[Entry]:
    """Every stream with its rows, in the order of the parts; a row that an earlier part has is not there again."""
    seen: set[tuple[Key, int]] = set()
    for part in args.parts:
        for block in parts.PARTS[part]:
            for stream in block.streams:
                for net in block.nets:
                    for batch in block.batches:
                        for seed in block.seeds(net):
                            images = min(block.images or args.images[parts.suite_of(net)], args.n or 10**9)
                            entry = Entry(part, net, seed, stream=stream, batch=batch, images=images)
                            names = [row for row in block.rows if rows.fits(row, net) and args.row_chosen(row)]
                            names = [row for row in names if (entry.key(row), images) not in seen]
                            seen |= {(entry.key(row), images) for row in names}
                            if names and net in args.nets and args.stream_chosen(stream) and args.seed_chosen(seed):
                                yield replace(entry, names=tuple(names))


def split(entry: Entry, estimate: costs.Estimate) -> Iterator[Entry]:
    """The rows of an entry in groups that take about a minute, in order, each with its seconds and memory."""
    scored = streams.scored_count(entry.stream, entry.images)
    cost = {row: estimate.seconds(entry.net, row, entry.batch, scored) for row in entry.names}
    memory = {row: costs.gigabytes(entry.net, row, entry.batch) for row in entry.names}
    left = list(entry.names)
    while left:
        group = [left.pop(0)]
        for row in list(left):
            alike = 0.5 <= memory[row] / memory[group[0]] <= 2
            if alike and sum(cost[each] for each in (*group, row)) <= LONGEST:
                group.append(row)
                left.remove(row)
        seconds = sum(cost[row] for row in group)
        yield replace(entry, names=tuple(group), seconds=seconds, gigabytes=max(memory[row] for row in group))


def without(entries: Iterator[Entry], done: Done, hashed: Callable[[Entry], str]) -> Iterator[Entry]:
    """Entries without the rows that are there already, of the same stream; `hashed` tells a stream's hash."""
    there = {key for key, _, _ in done}
    for entry in entries:
        scored = streams.scored_count(entry.stream, entry.images)
        left = entry.names
        if any(entry.key(row) in there for row in left):
            own = hashed(entry)
            left = tuple(row for row in left if (entry.key(row), scored, own) not in done)
        if left:
            yield replace(entry, names=left)


def other_order(entries: Iterable[Entry], done: Done, hashed: Callable[[Entry], str]) -> str | None:
    """A stream that was measured in another order or with other labels, in words; one of each network and seed is seen.

    Its cells could not be paired, and would look alike in a file.
    """
    there: dict[Stream, set[str]] = {}
    for (net, _, stream, seed, batch), n, own in done:
        there.setdefault((net, stream, seed, batch, n), set()).add(own)
    looked = set()
    for entry in entries:
        scored = streams.scored_count(entry.stream, entry.images)
        known = there.get((entry.net, entry.stream, entry.seed, entry.batch, scored), set())
        if known and (entry.net, entry.seed) not in looked:
            looked.add((entry.net, entry.seed))
            if (own := hashed(entry)) not in known:
                return f"{entry.net}, {entry.stream}, seed {entry.seed}: {' or '.join(sorted(known))}, got {own}"
    return None


def finished(paths: Sequence[Path]) -> Done:
    """The cells of result files, and of suites' files."""
    cells = read_cells([path for path in paths if path.suffix != ".json"])
    for path in paths:
        cells += json.loads(path.read_text())["cells"] if path.suffix == ".json" else []
    return {(key_of(cell), cell["n"], cell["hash"]) for cell in cells}


def store_of(folder: Path, images: int) -> streams.Store:
    """The images of a data set, of which streams take so many."""
    return streams.Store(folder / f"n{images}")


@dataclass(frozen=True)
class Images:
    """Where the images are, and how many each suite's streams have."""

    folder: Path
    counts: dict[str, int]

    def store(self, net: str) -> streams.Store:
        """The store of a network's suite."""
        return store_of(self.folder, self.counts[parts.suite_of(net)])

    def plan(self, entry: Entry) -> streams.Plan:
        """The rows of an entry's stream."""
        return streams.plan(entry.stream, self.labels(entry), entry.seed)

    def labels(self, entry: Entry) -> streams.Indices:
        """The labels of the images that an entry's stream is made of."""
        return self.store(entry.net).labels(entry.net, entry.seed)[: entry.images]

    def hashed(self, entry: Entry) -> str:
        """The hash of an entry's stream."""
        plan = self.plan(entry)
        return plan.hashed(self.labels(entry)[plan.image])


def with_preparation(entries: Sequence[Entry], images: Images) -> list[Entry]:
    """The list of work: before the first rows that need a corruption comes its preparation."""
    found: list[Entry] = []
    at: dict[Path, int] = {}
    for entry in entries:
        after = []
        for shift in images.plan(entry).shifts:
            path = images.store(entry.net).path(entry.net, entry.seed, shift)
            if shift == CLEAN or path.is_file():
                continue
            if path not in at:
                at[path] = len(found)
                found.append(Entry(entry.part, entry.net, entry.seed, shift, gigabytes=3.0))
            after.append(at[path])
        found.append(replace(entry, after=tuple(after)))
    return found


# One process ----------------------------------------------------------------------------------------------------------


class Bench:
    """Runs entries in one process; keeps the networks it has loaded."""

    def __init__(
        self, images: Images, device: torch.device, *, how: dict[str, Any], weights: str | None, about: dict[str, Any]
    ) -> None:
        self.images, self.device, self.how, self.weights, self.about = images, device, how, weights, about
        self.models = dict[str, nn.Module]()

    def prepare(self, entry: Entry) -> None:
        """Write the corrupted images of an entry."""
        assert entry.shift is not None
        store, count = self.images.store(entry.net), self.images.counts[parts.suite_of(entry.net)]
        store.prepare(entry.net, entry.seed, count, None, (entry.shift,), self.device)

    def run(self, entry: Entry, deadline: float, emit: Callable[[dict[str, Any]], None]) -> None:
        """Measure the rows of an entry; hand each finished cell to `emit`."""
        store, net, seed = self.images.store(entry.net), entry.net, entry.seed
        labels, plan = self.images.labels(entry), self.images.plan(entry)
        pixels = store.images(net, seed, plan, self.device)
        truth = labels[plan.image]
        about = {"net": net, "stream": entry.stream, "seed": seed, "batch": entry.batch, "n": int(plan.scored.sum())}
        about |= {"hash": plan.hashed(truth), **self.about}
        for row in entry.names:
            try:
                source = self._source_images(row, net, seed)
                adapter = rows.make(
                    row, self._model(net), net, classes=store.mask(net, seed), source_data=source, seed=seed,
                    **self.how,
                )  # fmt: skip
                began = time.perf_counter()
                answers, record = self._answers(adapter, row, pixels, entry.batch, deadline)
                seconds = time.perf_counter() - began
                adapter.unload()
            except OutOfTimeError:
                return
            except Exception as error:  # one row's failure is no reason to lose the others
                traceback.print_exc()
                emit({**about, "row": row, "error": f"{type(error).__name__}: {error}"[:300]})
                continue
            finally:
                if self.device.type == "cuda" and net in LARGE:
                    torch.cuda.empty_cache()
            right = (answers == truth)[plan.scored]
            cell = {**about, "row": row, "right": int(right.sum()), "seconds": round(seconds, 2)}
            if "before" in record:
                cell["before"] = bits_text(record.pop("before") == truth)
            emit({**cell, "bits": bits_text(right), **record})

    def _source_images(self, row: str, net: str, seed: int) -> Tensor | None:
        """Clean images for a row that reads some: those beside the stream's, or, where all are in it, the stream's."""
        if not rows.recipe_of(row, net).uses_source_data:
            return None
        store = self.images.store(net)
        spare = store.spare(net, seed)
        if spare is not None:
            return spare
        count = SOURCE_IMAGES if row.startswith("eata") else MANY_SOURCE_IMAGES
        every = np.arange(min(count, len(store.labels(net, seed))), dtype=np.int64)
        plan = streams.Plan((CLEAN,), np.zeros(len(every), np.int64), every, np.ones(len(every), bool))
        return store.images(net, seed, plan, torch.device("cpu")).float() / 255

    def _answers(
        self, adapter: poem.Adapter, row: str, pixels: Tensor, batch: int, deadline: float
    ) -> tuple[NDArray[np.int64], dict[str, Any]]:
        """The class answered for every image; of recorded rows also what became of each sample."""
        found, record = [], Record(adapter) if "recorded" in row else None
        for some in pixels.split(batch):
            if time.time() > deadline or not still_wanted():
                raise OutOfTimeError
            shown = some.float() / 255
            norms = adapter.gradient_norms(shown) if row.endswith("gradients") else None
            logits = adapter(shown).detach()
            found.append(predicted(logits))
            if record is not None:
                record.add(logits, norms)
        answers = torch.cat(found).cpu().numpy()
        return answers, {} if record is None else record.result()

    def _model(self, net: str) -> nn.Module:
        if net not in self.models:
            self.models[net] = zoo.load(net, weights_of(net, self.weights))[0].to(self.device)
        return self.models[net]


class Record:
    """What became of each sample: selected at first, newly reliable, answered before any update, how sure.

    All but `before` are text: bits (`selected`, `newly`), entropies in steps of ln C / 255 (`entropy_first`,
    `entropy_last`), gradient norms as float16.
    """

    def __init__(self, adapter: poem.Adapter) -> None:
        self.adapter, self.parts = adapter, dict[str, list[Tensor]]()
        self.top = 1.0

    def add(self, logits: Tensor, norms: Tensor | None) -> None:
        """Take what is known of the batch that was just answered."""
        last, self.top = self.adapter.last, math.log(max(2, logits.shape[-1]))
        now = {"selected": last.selected, "newly": last.newly_reliable, "before": predicted(last.first_logits)}
        now |= {"entropy_first": last.entropy[0], "entropy_last": last.entropy[1]}
        now |= {} if norms is None else {"gradients": norms}
        for name, tensor in now.items():
            self.parts.setdefault(name, []).append(tensor.detach())

    def result(self) -> dict[str, Any]:
        """The fields of a cell, and `before`, the classes answered before any update."""
        all_of = {name: torch.cat(found).cpu().numpy() for name, found in self.parts.items()}
        found: dict[str, Any] = {"before": all_of["before"]}
        found |= {name: bits_text(all_of[name].astype(bool)) for name in ("selected", "newly")}
        for name in ("entropy_first", "entropy_last"):
            steps = np.nan_to_num(all_of[name] / self.top * STEPS, nan=STEPS).round().clip(0, STEPS)
            found[name] = base64.b64encode(steps.astype(np.uint8).tobytes()).decode()
        if "gradients" in all_of:
            found["gradients"] = base64.b64encode(all_of["gradients"].astype("<f2").tobytes()).decode()
        return found


class Board:
    """Which entries of the list are taken and which are prepared, and how much memory is in use; shared."""

    def __init__(self, context: Any, count: int, gigabytes: float) -> None:
        self.lock = context.Lock()
        self.taken = context.Array("b", count, lock=False)
        self.ready = context.Array("b", count, lock=False)
        self.used = context.Value("d", 0.0, lock=False)
        self.limit = gigabytes

    def take(self, entries: Sequence[Entry]) -> tuple[int | None, bool]:
        """The first entry that can be run now, and whether there are others to wait for.

        An entry that waits for room keeps what comes after it from taking that room.
        """
        with self.lock:
            waiting, kept = False, 0.0
            for at, entry in enumerate(entries):
                if self.taken[at]:
                    continue
                waiting = True
                if not all(self.ready[before] for before in entry.after):
                    continue
                if self.used.value == 0 or self.used.value + kept + entry.gigabytes <= self.limit:
                    self.taken[at] = 1
                    self.used.value += entry.gigabytes
                    return at, True
                kept = max(kept, entry.gigabytes)
            return None, waiting

    def give_back(self, at: int, entry: Entry, *, ready: bool) -> None:
        """An entry has ended; where its preparation failed, the rows that need it prepare their images themselves."""
        with self.lock:
            self.ready[at] = 1 if ready or entry.shift is not None else 0
            self.used.value = max(0.0, self.used.value - entry.gigabytes)


def work(
    number: int, entries: Sequence[Entry], board: Board, out: Any, deadline: float, settings: dict[str, Any]
) -> None:
    """One process: takes entries until none is left or time is up."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        bench = Bench(
            Images(Path(settings["store"]), settings["counts"]), torch.device(settings["device"]),
            how=settings["how"], weights=settings["weights"], about=settings["about"],
        )  # fmt: skip
        while time.time() < deadline and still_wanted():
            at, more = board.take(entries)
            if at is None:
                if not more:
                    break
                time.sleep(0.2)
                continue
            entry, ready = entries[at], False
            try:
                if entry.shift is not None:
                    bench.prepare(entry)
                else:
                    bench.run(entry, deadline, out.put)
                ready = True
            except Exception:
                traceback.print_exc()
                print(f"process {number}: {entry} failed", flush=True)
            finally:
                if bench.device.type == "cuda":
                    torch.cuda.empty_cache()
                board.give_back(at, entry, ready=ready)
    finally:
        out.put(None)


# The whole ------------------------------------------------------------------------------------------------------------


def about_run(args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """A name for this run, and what its cells have in common."""
    device = torch.cuda.get_device_name() if str(args.device).startswith("cuda") else platform.processor() or "CPU"
    found = {
        "command": " ".join(["python -m study.measure", *args.given]), "tree": tree_hash(), "torch": torch.__version__,
        "device": device, "processes": args.processes, "poem": poem.__version__,
        "started": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()), "commit": os.environ.get("POEM_COMMIT", ""),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:8], found


def write_run(path: Path, name: str, about: dict[str, Any]) -> None:
    """Add a run to the file beside the cells, `NAME.runs.json`."""
    beside = path.with_suffix(".runs.json")
    beside.parent.mkdir(parents=True, exist_ok=True)
    held = json.loads(beside.read_text()) if beside.is_file() else {}
    beside.write_text(json.dumps({**held, name: about}, indent=1) + "\n")


def measure(args: argparse.Namespace) -> Writer:
    """Prepare, start the processes, write what they find, stop in time."""
    began = time.time()
    deadline, device = began + args.budget, torch.device(args.device)
    args.nets = usable(args.nets, args.data, args.weights)
    for suite, net in {parts.suite_of(net): net for net in args.nets}.items():
        read, labels = streams.read(streams.set_of(net), args.data)
        there, known = len(labels), streams.PIXELS.get(streams.set_of(net))
        if known and not args.other_images and (pixels := streams.pixel_hash(read)) != known:
            raise SystemExit(f"expected {streams.set_of(net)}'s original images (hash {known}), got {pixels}; {OTHER}")
        args.images[suite] = streams.image_count(args.images[suite], there)
    images = Images(args.store, args.images)
    entries = list(wanted(args))
    for net, seed in dict.fromkeys((entry.net, entry.seed) for entry in entries):
        images.store(net).prepare(net, seed, args.images[parts.suite_of(net)], args.data, (), device)
    other = None if args.other_images else other_order(entries, finished(EARLIER), images.hashed)
    if other is not None:
        raise SystemExit(f"expected the order and labels that results/auto was measured with, of {other}; {OTHER}")
    found = list(without(iter(entries), finished(args.skip), images.hashed))
    found = [each for entry in found for each in split(entry, args.estimate)]
    listed = with_preparation(found, images)
    cells = sum(len(entry.names) for entry in listed)
    words = f"{cells} cells in {len(found)} entries, {len(listed) - len(found)} corruptions to prepare"
    print(f"{words}; started after {time.time() - began:.0f} s", flush=True)
    name, about = about_run(args)
    context, write = mp.get_context("spawn"), Writer(args.out)
    write_run(args.out, name, about)
    out: Any = context.Queue()
    board = Board(context, max(1, len(listed)), args.gigabytes)
    settings = {
        "store": str(args.store), "counts": args.images, "device": args.device,
        "how": args.how, "weights": args.weights, "about": {"tree": about["tree"], "run": name, **args.other_precision},
    }  # fmt: skip
    processes = [
        context.Process(target=work, args=(number, listed, board, out, deadline, settings), daemon=True)
        for number in range(min(args.processes, len(listed)))
    ]
    for process in processes:
        process.start()
    collect(processes, out, write, deadline)
    words = f"{write.cells} of {cells} cells, {write.failed} of them failed"
    print(f"{words}, after {time.time() - began:.0f} s", flush=True)
    out.cancel_join_thread()
    return write


def listing(args: argparse.Namespace) -> str:
    """Cells and seconds of each part; those of earlier files are taken off where key and number of samples agree."""
    done = {(key, n) for key, n, _ in finished(args.skip)}
    table: dict[str, list[float]] = {}
    for entry in wanted(args):
        scored = streams.scored_count(entry.stream, entry.images)
        for row in entry.names:
            line = table.setdefault(f"{entry.part:<16} {entry.net}", [0, 0, 0.0])
            if (entry.key(row), scored) in done:
                line[0] += 1
                continue
            line[1] += 1
            line[2] += args.estimate.seconds(entry.net, row, entry.batch, scored)
    lines = [f"{'part':<16} {'network':<16} {'there':>6} {'to run':>6} {'s, one process':>14} {'s, GPU':>8}"]
    total = [0.0, 0.0, 0.0]
    for name, line in table.items():
        total = [a + b for a, b in zip(total, line, strict=True)]
        lines.append(f"{name:<33} {line[0]:>6.0f} {line[1]:>6.0f} {line[2]:>14.0f} {line[2] / args.processes:>8.0f}")
    lines.append(f"{'all':<33} {total[0]:>6.0f} {total[1]:>6.0f} {total[2]:>14.0f} {total[2] / args.processes:>8.0f}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    nets = [net for own in parts.SUITES.values() for net in own]
    parser.add_argument("--out", type=Path, default=Path("results/study/raw/cells.jsonl"), help="file to append to")
    parser.add_argument("--data", type=Path, default=None, help="folder of the data sets; default $POEM_DATA")
    parser.add_argument("--weights", default=None, help="folder of the large networks' weights; default $POEM_DATA")
    parser.add_argument(
        "--parts", type=names_among(tuple(parts.PARTS)), default=list(parts.PARTS), help="in this order"
    )
    parser.add_argument("--nets", type=names_among(nets), default=nets)
    parser.add_argument("--rows", default=None, help="only rows that match one of these patterns, with ; between")
    parser.add_argument("--streams", default=None, help="only these streams, with commas between")
    parser.add_argument("--seeds", default=None, help="only these seeds, with commas between")
    parser.add_argument("--n", type=int, default=None, help="at most so many images a stream; for trials")
    parser.add_argument("--processes", type=int, default=12 if cuda else 1)
    parser.add_argument("--gigabytes", type=float, default=110.0, help="memory of the GPU that rows may take together")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds until it stops and keeps what it has")
    parser.add_argument("--skip", type=Path, nargs="*", default=[], help="result files: their cells are done")
    parser.add_argument("--again", action="store_true", help="run cells that results/auto and results/study have, too")
    parser.add_argument(
        "--other-images", action="store_true", help="measure images that are not those of results/auto, too"
    )
    parser.add_argument("--fast", action="store_true", help="record CUDA graphs (fast='auto')")
    parser.add_argument("--precision", choices=("fp32", "tf32"), default="fp32", help="of the network's passes")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--store", type=Path, default=Path("/tmp/poem-study"), help="folder for images; kept")
    parser.add_argument("--list", action="store_true", help="print cells and estimated seconds, and stop")
    args = parser.parse_args(arguments)
    args.given = list(sys.argv[1:] if arguments is None else arguments)
    args.how = {"fast": "auto" if args.fast else False, "precision": args.precision}
    args.other_precision = {} if args.precision == "fp32" else {"precision": args.precision}  # a cell says it
    args.skip = [*args.skip, *([] if args.again else (*EARLIER, *MEASURED))]
    args.images = {suite: min(count, args.n or count) for suite, count in parts.IMAGES.items()}
    args.estimate = costs.Estimate(list(EARLIER))
    args.row_chosen = _chosen(args.rows, ";")
    args.stream_chosen = _chosen(args.streams, ",")
    own_seeds = args.seeds
    args.seed_chosen = lambda seed: own_seeds is None or str(seed) in own_seeds.split(",")
    if args.data is None and os.environ.get("POEM_DATA"):
        args.data = Path(os.environ["POEM_DATA"]).expanduser()
    if args.data is not None:
        os.environ["POEM_DATA"] = str(args.data)  # the zoo looks for weights there, in every process
    return args


def _chosen(text: str | None, between: str) -> Callable[[str], bool]:
    """Whether a name matches one of the patterns of a text; brackets stand for themselves."""
    from fnmatch import fnmatchcase

    patterns = None if text is None else [each.strip().replace("[", "[[]") for each in text.split(between)]
    return lambda name: patterns is None or any(fnmatchcase(name, each) for each in patterns)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 0 unless a cell failed."""
    args = parse(arguments)
    logging.getLogger("poem").setLevel(logging.ERROR)
    if args.list:
        print(listing(args))
        return 0
    return int(measure(args).failed > 0)


if __name__ == "__main__":
    sys.exit(main())
