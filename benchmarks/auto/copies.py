"""What `auto` gains by its copies of the images, smoothed, moved and mirrored, on held-out streams.

    PYTHONPATH=src:benchmarks python -m auto.copies --data DATA --nets 'digits-*,cifar10-*' --out small.jsonl
    PYTHONPATH=src:benchmarks python -m auto.copies --data DATA --nets vit-tiny16 --out vit.jsonl
    PYTHONPATH=src:benchmarks python -m auto.copies --join small.jsonl vit.jsonl

Corruptions are the four extra ones of ImageNet-C, which no stream of `auto.measure` has; clean images and images of
noise are in its streams too. Each line of the file is a network, stream and row with its accuracy; `--join` puts
them into `results/auto/copies.json` and the table of `docs/methods/auto.md`. A stream takes half a minute on one core
for the small networks, and five minutes for ViT-Tiny.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import poem
from auto import streams
from auto.measure import names_among, tree_hash, weights_of
from auto.rows import has_batch_norm
from poem import zoo
from poem.bench.metrics import predicted
from poem.parts import Blended, LocalPrior, Readout
from poem.streams.orders import Sorted, generator
from poem.streams.shift import CLEAN, Shift

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "results" / "auto" / "copies.json"
PAGE = ROOT / "docs" / "methods" / "auto.md"
BEGIN, END = "<!-- copies -->\n", "<!-- /copies -->"
"""Where the page has the table."""
NETS = ("cifar10-bn", "cifar10-gn", "cifar10-vit", "digits-bn", "digits-gn", "digits-ln", "vit-tiny16")
HELD_OUT = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SMALL_SEED, COUNT, BATCH = 7, 768, 64
LARGE_COUNT = 384
"""Images of a stream of ViT-Tiny."""


def plans(labels: streams.Indices, seed: int, *, runs: bool = True) -> Iterator[tuple[str, streams.Plan]]:
    """Held-out streams by name: single, in turn, mixed, clean images between images of noise, and sorted by class.

    Without `runs` the sorted ones are left out, as for a network with more classes than there are images.
    """
    rng, n = generator(seed, "auto smoothed", "all"), len(labels)
    every, turns = np.arange(n, dtype=np.int64), np.repeat(np.arange(4), n // 4)
    order, all_of = Sorted()(labels, rng, seed), tuple(Shift(name, 5) for name in HELD_OUT)

    def one(shift: Shift, rows: streams.Indices) -> streams.Plan:
        return streams.Plan((shift,), np.zeros(n, np.int64), rows, np.ones(n, bool))

    yield "clean", one(CLEAN, every)
    for shift in (*all_of, Shift("speckle_noise", 2), Shift("spatter", 2)):
        yield f"{shift.corruption}-{shift.severity}", one(shift, every)
    yield "in turn", streams.Plan(all_of, turns, rng.permutation(len(turns)), np.ones(len(turns), bool))
    yield "mixed", streams.Plan(all_of, rng.randint(0, 4, n).astype(np.int64), every, np.ones(n, bool))
    noise = np.tile(np.array([0, streams.NOISE], np.int64), n)
    yield "noise", streams.Plan((CLEAN,), noise, np.repeat(every, 2), noise == 0)
    for shift in (CLEAN, all_of[0], all_of[3]) if runs else ():
        yield f"sorted {shift.corruption}", one(shift, order)


def rows(net: str, model: nn.Module) -> dict[str, Callable[[], Any]]:
    """What is run: functions that make what answers."""
    base = zoo.base(net)
    settings: dict[str, Any] = {"mean": base.mean, "std": base.std}

    def made(method: str, **own: Any) -> Callable[[], Any]:
        return lambda: poem.adapt(model, method, **settings, **own)

    plain: dict[str, Any] = {"readout": Readout("last", LocalPrior())}
    if has_batch_norm(net):
        plain = {"statistics": Blended()}
    return {
        "source": made("source"),
        "auto without copies": made("auto", guard=False, **plain),
        "auto": made("auto", guard=False),
        "guarded auto without copies": made("auto", guard=True, **plain),
        "guarded auto": made("auto", guard=True),
    }


def measure(net: str, args: argparse.Namespace) -> None:
    """Append a line for every stream and row of a network."""
    base, store, seed = zoo.base(net), streams.Store(args.store), 0 if net == "vit-tiny16" else SMALL_SEED
    model, _ = zoo.load(net, weights_of(net, args.data))
    wanted = LARGE_COUNT if net == "vit-tiny16" else COUNT
    store.prepare(net, seed, wanted, args.data, (), torch.device("cpu"))
    labels = store.labels(net, seed)[:wanted]
    if len(labels) < wanted:
        raise ValueError(f"expected {wanted} images in {args.store}, got {len(labels)}; give another --store")
    for name, plan in plans(labels, seed, runs=base.classes < len(labels)):
        pixels, truth = store.images(net, seed, plan, torch.device("cpu")), labels[plan.image]
        for row, make in rows(net, model).items():
            if args.rows and row not in args.rows:
                continue
            began = time.perf_counter()
            adapter = make()
            answers = torch.cat([predicted(adapter(some.float() / 255).detach()) for some in pixels.split(BATCH)])
            adapter.unload()
            accuracy = 100 * float((answers.numpy() == truth)[plan.scored].mean())
            cell = {"net": net, "stream": name, "row": row, "n": int(plan.scored.sum()), "accuracy": round(accuracy, 3)}
            cell |= {"seconds": round(time.perf_counter() - began, 1), "tree": tree_hash(), "torch": torch.__version__}
            with args.out.open("a") as file:
                file.write(json.dumps(cell) + "\n")
            print(f"{net}, {name}: {row} {accuracy:.1f}", flush=True)


def join(paths: list[Path]) -> dict[str, Any]:
    """The cells of all files, by network, stream and row; one that was measured again counts as it came last.

    Raises:
        ValueError: The cells are of several versions of the library or of torch.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    versions = set()
    for path in paths:
        for line in path.read_text().splitlines():
            cell = json.loads(line)
            versions.add((cell["tree"], cell["torch"]))
            found.setdefault(cell["net"], {}).setdefault(cell["stream"], {})[cell["row"]] = cell["accuracy"]
    if len(versions) != 1:
        raise ValueError(f"expected cells of one version of the library and of torch, got {sorted(versions)}")
    ((tree, version),) = versions
    what = (
        f"Accuracies, percent, of {COUNT} images a stream ({LARGE_COUNT} of vit-tiny16), batches of {BATCH}, one "
        "seed, on held-out corruptions; the copies' settings were chosen on such streams of cifar10-* and digits-* "
        "with another seed; 256 of the 768 digits and 58 of the CIFAR-10 images are in both"
    )
    command = "python -m auto.copies --data DATA --nets NETS --out FILE, then --join FILES, on a CPU"
    about = {"what": what, "command": command, "tree": tree, "torch": version}
    return {**about, "networks": {net: found[net] for net in NETS if net in found}}


def table(found: dict[str, Any]) -> str:
    """Means over the streams of each network, speckle noise alone, and the lowest differences, as Markdown."""
    names = {"source": "source", "auto without copies": "`auto` without copies", "auto": "`auto`"}
    names |= {"guarded auto without copies": "guarded, without copies", "guarded auto": "guarded `auto`"}
    head = [
        *names.values(),
        "speckle noise: source, without copies, `auto`",
        "lowest difference of `auto` to that without copies",
        "lowest difference of `auto` to source",
    ]
    lines = [f"| network, mean over streams | {' | '.join(head)} |", f"| --- |{' ---: |' * len(head)}"]
    for net, by_stream in found["networks"].items():
        every = list(by_stream.values())
        means = [f"{np.mean([each[row] for each in every]):.1f}" if row in every[0] else "" for row in names]
        noise = [f"{by_stream['speckle_noise-5'][row]:.1f}" for row in list(names)[:3]]
        lowest = []
        for other in ("auto without copies", "source"):
            gain = {stream: each["auto"] - each[other] for stream, each in by_stream.items()}
            worst = min(gain, key=lambda stream: gain[stream])
            lowest.append(f"{gain[worst]:+.1f} ({worst})")
        lines.append(f"| {net} | {' | '.join(means)} | {', '.join(noise)} | {' | '.join(lowest)} |")
    both = ("guarded auto", "guarded auto without copies")
    if any(set(both) <= each.keys() for by in found["networks"].values() for each in by.values()):
        words = (
            "Guarded, where both were measured, the lowest difference to the source is {} with copies, and {} without."
        )
        lines += ["", words.format(*(_lowest(found, row, both) for row in both))]
    return "\n".join(lines) + "\n"


def _lowest(found: dict[str, Any], row: str, both: tuple[str, ...]) -> str:
    """A row's lowest difference to the source where these rows were measured, with its network and stream."""
    cells = [(net, stream, each) for net, by in found["networks"].items() for stream, each in by.items()]
    every = [cell for cell in cells if set(both) <= cell[2].keys()]
    net, stream, worst = min(every, key=lambda one: one[2][row] - one[2]["source"])
    return f"{worst[row] - worst['source']:+.1f} points ({net}, {stream})"


def filled(page: str, found: dict[str, Any]) -> str:
    """The page with its table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str] | None = None) -> int:
    """Measure, or join what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the images and of the large network's weights")
    parser.add_argument("--nets", type=names_among(NETS), default=list(NETS))
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=None, help="only these, with ; between")
    parser.add_argument("--out", type=Path, default=Path("copies.jsonl"), help="file to append to")
    parser.add_argument(
        "--store", type=Path, default=None, help="folder for images, kept; by default removed at the end"
    )
    parser.add_argument(
        "--join", type=Path, nargs="+", default=None, help=f"files to put into {RESULT.name} and the page"
    )
    args = parser.parse_args(arguments)
    logging.getLogger("poem").setLevel(logging.ERROR)
    if args.join:
        found = join(args.join)
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
        PAGE.write_text(filled(PAGE.read_text(), found))
        return 0
    with contextmanager(streams.scratch)() as folder:
        args.store = args.store or folder
        for net in args.nets:
            measure(net, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
