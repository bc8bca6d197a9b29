"""Answers from smoothed copies of the images, a candidate for `auto`: a part, and what it gives on held-out streams.

    PYTHONPATH=src:benchmarks python -m auto.smoothed --data DATA --nets 'digits-*,cifar10-*' --out small.jsonl
    PYTHONPATH=src:benchmarks python -m auto.smoothed --data DATA --nets vit-tiny16 --out vit.jsonl
    PYTHONPATH=src:benchmarks python -m auto.smoothed --join small.jsonl vit.jsonl

Corruptions are the four extra ones of ImageNet-C, which no stream of `auto.measure` has; clean images and images of
noise are in both. Each line of the file is a network, stream and row with its accuracy; `--join` puts them into
`results/auto/smoothed.json` and the table of `docs/methods/auto.md`. A stream takes half a minute on one core for the
small networks, and five minutes for ViT-Tiny.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import poem
from auto import streams
from auto.measure import names_among, tree_hash, weights_of
from poem import zoo
from poem.bench.metrics import predicted
from poem.parts import LocalPrior, Readout
from poem.parts.base import Memory, Need, Outcome, Outputs, entropy
from poem.parts.fields import Count, NotNegative, Positive
from poem.streams.orders import Sorted, generator
from poem.streams.shift import CLEAN, Shift

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "results" / "auto" / "smoothed.json"
PAGE = ROOT / "docs" / "methods" / "auto.md"
BEGIN, END = "<!-- smoothed -->\n", "<!-- /smoothed -->"
"""Where the page has the table."""
NETS = ("cifar10-bn", "cifar10-gn", "cifar10-vit", "digits-bn", "digits-gn", "digits-ln", "vit-tiny16")
HELD_OUT = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
SMALL_SEED, COUNT, BATCH = 7, 768, 64
SIGMAS = {32: (0.5, 0.7), 224: (0.7, 1.5)}
"""Widths in pixels, by the side of the images."""


# The part -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SmoothedPrior(LocalPrior):
    """Averages the answers for the images and for smoothed copies of them, and corrects the mean by the local prior.

    A copy is every image of the batch after a Gaussian filter of `sigmas` pixels, which removes noise and leaves
    shapes. It counts by how well its answers tell the images of the stream apart, `exp(trust * information)`, with the
    information of `Blended`: the entropy of the mean prediction less the mean entropy, over the last `recent` images,
    as a share of the logarithm of the number of classes. `margin` is added to the information of the images as they
    are. Updates are not changed by it.

    Paper: none.
    """

    sigmas: tuple[Positive, ...] = (0.5, 0.7)
    trust: NotNegative = 60.0
    margin: NotNegative = 0.04
    recent: Count = 256

    @property
    def needs(self) -> frozenset[Need]:
        """Images, since a filter runs over neighbouring pixels."""
        return frozenset({Need.PICTURES})

    def start(self, outputs: Outputs) -> Memory:
        """No predictions seen, of no copy."""
        zeros = outputs.probs.new_zeros(1 + len(self.sigmas), outputs.classes)
        return super().start(outputs) | {"predicted": zeros, "entropy": zeros[:, 0]}

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """The weighted mean of all copies' probabilities, with the prior of the answers before."""
        return super().__call__(self._mean_answer(outputs, memory), memory)

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The prior of averaged answers, and what each copy predicts."""
        answer = outcome.answer or outcome.last
        averaged = self._mean_answer(answer, memory)
        return super().remember(replace(outcome, answer=averaged), memory) | self._running_means(answer, memory)

    def _mean_answer(self, outputs: Outputs, memory: Memory) -> Outputs:
        """The outputs with the mean over the copies as their logits."""
        means = self._running_means(outputs, memory)
        information = entropy(means["predicted"].clamp(min=1e-12).log()) - means["entropy"]
        scores = self.trust * information / math.log(max(2, outputs.classes))
        scores = scores + self.trust * self.margin * (torch.arange(len(scores), device=scores.device) == 0)
        weighted = self._copies(outputs) + scores.log_softmax(0)[:, None, None]
        return replace(outputs, logits=weighted.logsumexp(0), heads=outputs.heads[:1], cache={})

    def _running_means(self, outputs: Outputs, memory: Memory) -> Memory:
        """Mean prediction and mean entropy of each copy over the last images, the batch among them."""
        each, seen = self._copies(outputs), memory["seen"]
        count = each.shape[1]
        share = (count / (seen + count)).clamp(min=min(1.0, count / self.recent))
        now = {"predicted": each.exp().mean(1), "entropy": entropy(each).mean(1)}
        return {name: torch.lerp(memory[name], value, share) for name, value in now.items()}

    def _copies(self, outputs: Outputs) -> Tensor:
        """Log-probabilities (copies, B, C), the images as they are first; computed once for a pass."""
        if self not in outputs.cache:
            if outputs.images is None:
                raise ValueError(
                    f"{self!r} needs further forward passes, which an exported model and a teacher's answer have not; "
                    "give readout=Readout('last', LocalPrior())"
                )
            images = outputs.batch.images
            smooth = [outputs.forward(smoothed(images, sigma)) for sigma in self.sigmas]
            outputs.cache[self] = torch.stack([outputs.logits, *smooth]).detach().log_softmax(-1)
        return outputs.cache[self]


def smoothed(images: Tensor, sigma: float) -> Tensor:
    """Images (B, C, H, W) after a Gaussian filter of so many pixels, mirrored at the edges, cut off at three sigma."""
    radius = min(max(1, math.ceil(3 * sigma)), min(images.shape[-2:]) - 1)
    at = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    kernel = (-0.5 * (at / sigma).square()).exp()
    kernel, channels = kernel / kernel.sum(), images.shape[1]
    filtered = F.pad(images, (radius, radius, radius, radius), mode="reflect")
    for shape in ((1, 1, 1, -1), (1, 1, -1, 1)):
        filtered = F.conv2d(filtered, kernel.view(shape).expand(channels, *[-1] * 3), groups=channels)
    return filtered


# What it gives --------------------------------------------------------------------------------------------------------


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


def rows(net: str) -> dict[str, dict[str, Any]]:
    """What is run, as arguments of `poem.adapt`."""
    prior = SmoothedPrior(sigmas=SIGMAS[zoo.base(net).crop])
    smooth: dict[str, Any] = {"method": "auto", "readout": Readout("last", prior)}
    return {
        "source": {"method": "source", "guard": False},
        "auto": {"method": "auto", "guard": False},
        "auto, smoothed": {**smooth, "guard": False},
        "guarded auto": {"method": "auto", "guard": True},
        "guarded auto, smoothed": {**smooth, "guard": True},
    }


def measure(net: str, args: argparse.Namespace) -> None:
    """Append a line for every stream and row of a network."""
    base, store, seed = zoo.base(net), streams.Store(args.store), 0 if net == "vit-tiny16" else SMALL_SEED
    model, _ = zoo.load(net, weights_of(net, args.data))
    store.prepare(net, seed, COUNT, args.data, (), torch.device("cpu"))
    labels = store.labels(net, seed)
    for name, plan in plans(labels, seed, runs=base.classes < len(labels)):
        pixels, truth = store.images(net, seed, plan, torch.device("cpu")), labels[plan.image]
        for row, settings in rows(net).items():
            if args.rows and row not in args.rows:
                continue
            began = time.perf_counter()
            adapter = poem.adapt(model, mean=base.mean, std=base.std, **settings)
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
        f"Accuracies, percent, of {COUNT} images a stream, batches of {BATCH}, one seed, on held-out corruptions; "
        "smoothed: benchmarks/auto/smoothed.py, whose widths for 32 pixels, trust and margin were chosen on such "
        "streams of the six small networks; 399 of the 768 digits and 58 of the CIFAR-10 images are in both"
    )
    command = "python -m auto.smoothed --data DATA --nets NETS --out FILE, then --join FILES, on a CPU"
    about = {"what": what, "command": command, "tree": tree, "torch": version}
    return {**about, "networks": {net: found[net] for net in NETS if net in found}}


def table(found: dict[str, Any]) -> str:
    """Means over the streams of each network, speckle noise alone, and the lowest differences, as Markdown."""
    names = {"auto": "`auto`", "auto, smoothed": "smoothed", "guarded auto": "guarded `auto`"}
    names = {"source": "source", **names, "guarded auto, smoothed": "guarded, smoothed"}
    head = [
        *names.values(),
        "speckle noise: source, `auto`, smoothed",
        "lowest difference to `auto`",
        "lowest difference to source",
    ]
    lines = [f"| network, mean over streams | {' | '.join(head)} |", f"| --- |{' ---: |' * len(head)}"]
    for net, by_stream in found["networks"].items():
        every = list(by_stream.values())
        means = [f"{np.mean([each[row] for each in every]):.1f}" if row in every[0] else "" for row in names]
        noise = [f"{by_stream['speckle_noise-5'][row]:.1f}" for row in ("source", "auto", "auto, smoothed")]
        lowest = []
        for other in ("auto", "source"):
            gain = {stream: each["auto, smoothed"] - each[other] for stream, each in by_stream.items()}
            worst = min(gain, key=lambda stream: gain[stream])
            lowest.append(f"{gain[worst]:+.1f} ({worst})")
        lines.append(f"| {net} | {' | '.join(means)} | {', '.join(noise)} | {' | '.join(lowest)} |")
    words = [_lowest(found, row) for row in ("guarded auto, smoothed", "guarded auto")]
    lines += [
        "",
        "Guarded, the lowest difference to the source is {} with smoothed copies, and {} without.".format(*words),
    ]
    return "\n".join(lines) + "\n"


def _lowest(found: dict[str, Any], row: str) -> str:
    """A row's lowest difference to the source over all networks and streams, with both."""
    every = [(net, stream, each) for net, by in found["networks"].items() for stream, each in by.items() if row in each]
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
    parser.add_argument("--out", type=Path, default=Path("smoothed.jsonl"), help="file to append to")
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
