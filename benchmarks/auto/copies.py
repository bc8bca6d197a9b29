"""Answers from copies of the images, a candidate for `auto`: its parts, and what they give on held-out streams.

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
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import poem
from auto import streams
from auto.measure import names_among, tree_hash, weights_of
from auto.rows import has_batch_norm
from poem import zoo
from poem.bench.metrics import predicted
from poem.parts import Blended, LocalPrior, Nothing, Readout
from poem.parts.base import Memory, Need, Outcome, Outputs, Part, entropy
from poem.parts.fields import Count, NotNegative, Range
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


# The parts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ImageCopy(Part):
    """Each image mirrored, then moved down to the right, then smoothed; by default as it is.

    `smooth` is the standard deviation of a Gaussian filter in pixels of images of 32; where the shorter side has `s`,
    it is `smooth * (s / 32) ** 0.4`. `move` is a share of height and width, one pixel at least; the edge is repeated.

    Paper: none.
    """

    smooth: NotNegative = 0.0
    move: Annotated[float, Range(at_least=-0.5, at_most=0.5)] = 0.0
    mirrored: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        """The copy of images (B, C, H, W); other input stays as it is."""
        if images.dim() != 4 or min(images.shape[2:]) < 2:
            return images
        if self.mirrored:
            images = images.flip(-1)
        if self.move:
            images = moved(images, self.move)
        return smoothed(images, self.smooth * (min(images.shape[2:]) / 32) ** 0.4) if self.smooth else images


def moved(images: Tensor, share: float) -> Tensor:
    """Images moved down to the right by a share of their height and width, up to the left where it is negative."""
    height, width = images.shape[2:]
    down, right = (int(math.copysign(max(1, round(abs(share) * side)), share)) for side in (height, width))
    framed = F.pad(images, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)), mode="replicate")
    return framed[..., max(-down, 0) : max(-down, 0) + height, max(-right, 0) : max(-right, 0) + width]


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


PIXEL = 1 / 32
"""A pixel of images of 32, as a share of their side."""


@dataclass(frozen=True, repr=False)
class CopiesPrior(LocalPrior):
    """Averages the answers for the images and for copies of them, and corrects the mean by the local prior.

    Each of `copies` counts, as the images themselves do, by how well its answers tell the images of the stream apart,
    `exp(trust * information)`, with the information of `Blended`: the entropy of the mean prediction less the mean
    entropy, over the last `recent` images, as a share of the logarithm of the number of classes. `margin` is added to
    the information of the images as they are. Updates are not changed by it.

    Paper: none.
    """

    copies: tuple[ImageCopy, ...] = (ImageCopy(0.5), ImageCopy(0.7), ImageCopy(move=PIXEL), ImageCopy(move=-PIXEL))
    trust: NotNegative = 30.0
    margin: NotNegative = 0.02
    recent: Count = 256

    @property
    def needs(self) -> frozenset[Need]:
        """Images, of which there are copies to make."""
        return frozenset({Need.PICTURES})

    def start(self, outputs: Outputs) -> Memory:
        """No predictions seen, of no copy."""
        zeros = outputs.probs.new_zeros(1 + len(self.copies), outputs.classes)
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
        weighted = self._each(outputs) + scores.log_softmax(0)[:, None, None]
        return replace(outputs, logits=weighted.logsumexp(0), heads=outputs.heads[:1], cache={})

    def _running_means(self, outputs: Outputs, memory: Memory) -> Memory:
        """Mean prediction and mean entropy of each copy over the last images, the batch among them."""
        each, seen = self._each(outputs), memory["seen"]
        count = each.shape[1]
        share = (count / (seen + count)).clamp(min=min(1.0, count / self.recent))
        now = {"predicted": each.exp().mean(1), "entropy": entropy(each).mean(1)}
        return {name: torch.lerp(memory[name], value, share) for name, value in now.items()}

    def _each(self, outputs: Outputs) -> Tensor:
        """Log-probabilities (copies, B, C), the images as they are first; computed once for a pass."""
        if self not in outputs.cache:
            if outputs.images is None:
                raise ValueError(
                    f"{self!r} needs further forward passes, which an exported model and a teacher's answer have not; "
                    "give readout=Readout('last', LocalPrior())"
                )
            more = [outputs.forward(copy(outputs.batch.images)) for copy in self.copies]
            outputs.cache[self] = torch.stack([outputs.logits, *more]).detach().log_softmax(-1)
        return outputs.cache[self]


SHOWN = (ImageCopy(), ImageCopy(0.7, mirrored=True), ImageCopy(move=PIXEL), ImageCopy(), ImageCopy(move=PIXEL))
"""What each of `Blended`'s five copies shows of the images."""


class BlendedCopies:
    """`auto` on batch norm, each of `Blended`'s copies with images of its own: as many forward passes as without.

    The copies are adapters of one copy each, and `Blended` and `LocalPrior` are asked as the engine asks them, since
    the engine gives all copies the same images.
    """

    def __init__(self, model: nn.Module, shown: tuple[ImageCopy, ...] = SHOWN, **settings: Any) -> None:
        self.part, self.prior, self.shown = Blended(), LocalPrior(), shown
        choices = zip(self.part.weights, self.part.rates, self.part.doubts, strict=True)
        alone = [Blended((weight,), (rate,), (doubt,)) for weight, rate, doubt in choices]
        self.adapters = [
            poem.adapt(model, poem.Recipe(parameters=Nothing(), statistics=each), **settings) for each in alone
        ]
        self.memory: Memory = {}
        self.before: Memory | None = None

    def __call__(self, images: Tensor) -> Tensor:
        """The answer (B, C) for images in [0, 1]."""
        each = torch.stack([adapter(copy(images)) for adapter, copy in zip(self.adapters, self.shown, strict=True)])
        answer, record = self.part.combine(each, self.memory)
        self.memory = {**self.memory, **record}
        outputs = Outputs(answer, (answer,))
        before = self.prior.start(outputs) if self.before is None else self.before
        self.before = {**before, **self.prior.remember(Outcome(outputs, outputs, [], []), before)}
        return self.prior(outputs, before)

    def unload(self) -> None:
        """Give the model back."""
        for adapter in self.adapters:
            adapter.unload()


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


def rows(net: str, model: nn.Module) -> dict[str, Callable[[], Any]]:
    """What is run: functions that make what answers."""
    base = zoo.base(net)
    settings: dict[str, Any] = {"mean": base.mean, "std": base.std}

    def made(method: str, **own: Any) -> Callable[[], Any]:
        return lambda: poem.adapt(model, method, **settings, **own)

    copies = {"readout": Readout("last", CopiesPrior())}
    found = {
        "source": made("source"),
        "auto": made("auto", guard=False),
        "auto, copies": made("auto", guard=False, **copies),
        "guarded auto": made("auto", guard=True),
        "guarded auto, copies": made("auto", guard=True, **copies),
    }
    if has_batch_norm(net):
        del found["guarded auto, copies"]
        found["auto, copies"] = lambda: BlendedCopies(model, **settings)
    return found


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
        "seed, on held-out corruptions; copies: benchmarks/auto/copies.py, whose settings were chosen on such streams "
        "of cifar10-* and digits-* with another seed; 256 of the 768 digits and 58 of the CIFAR-10 images are in both"
    )
    command = "python -m auto.copies --data DATA --nets NETS --out FILE, then --join FILES, on a CPU"
    about = {"what": what, "command": command, "tree": tree, "torch": version}
    return {**about, "networks": {net: found[net] for net in NETS if net in found}}


def table(found: dict[str, Any]) -> str:
    """Means over the streams of each network, speckle noise alone, and the lowest differences, as Markdown."""
    names = {"source": "source", "auto": "`auto`", "auto, copies": "with copies", "guarded auto": "guarded `auto`"}
    names |= {"guarded auto, copies": "guarded, with copies"}
    head = [
        *names.values(),
        "speckle noise: source, `auto`, with copies",
        "lowest difference to `auto`",
        "lowest difference to source",
    ]
    lines = [f"| network, mean over streams | {' | '.join(head)} |", f"| --- |{' ---: |' * len(head)}"]
    for net, by_stream in found["networks"].items():
        every = list(by_stream.values())
        means = [f"{np.mean([each[row] for each in every]):.1f}" if row in every[0] else "" for row in names]
        noise = [f"{by_stream['speckle_noise-5'][row]:.1f}" for row in ("source", "auto", "auto, copies")]
        lowest = []
        for other in ("auto", "source"):
            gain = {stream: each["auto, copies"] - each[other] for stream, each in by_stream.items()}
            worst = min(gain, key=lambda stream: gain[stream])
            lowest.append(f"{gain[worst]:+.1f} ({worst})")
        lines.append(f"| {net} | {' | '.join(means)} | {', '.join(noise)} | {' | '.join(lowest)} |")
    both = ("guarded auto, copies", "guarded auto")
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
