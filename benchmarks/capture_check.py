"""Captured and eager answers side by side on a GPU: ResNet-50 and ViT-B/16 at 224, fp32, deterministic algorithms.

    python benchmarks/capture_check.py --out results/speed/agreement.json
    python benchmarks/capture_check.py --nets digits-bn,digits-gn,digits-ln --methods every --size 32 --out FILE

The networks for digits run every method, `--shard 0/8` an eighth of them, on smooth random pictures; the others those
below, with thresholds at the median of their entropies.

For each method and network: the largest difference of probabilities over the batches, the samples that only one path
selected and how far their entropy is from the threshold, and how often the host waited for the device per batch.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import torchvision  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from tree_hash import tree_hash  # noqa: E402

import poem  # noqa: E402
from poem import zoo  # noqa: E402
from poem._util.files import write_atomic  # noqa: E402
from poem.bench.provenance import provenance  # noqa: E402
from poem.parts import EntropyBelow, NotRedundant, PLPDAbove  # noqa: E402

METHODS = (
    "source",
    "tent",
    "eata",
    "sar",
    "deyo",
    "roid",
    "auto",
    "poem",
    "poem-official",
    "deyo+poem",
    "sar+poem",
    "eata+poem",
)
SLOW = ("memo", "cotta")
"""They come first, so that every process has its share of them."""
UNIT = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def network(name: str) -> nn.Module:
    """A network with random weights, its head scaled so that entropies lie on both sides of the threshold."""
    torch.manual_seed(0)
    made: nn.Module
    if name.startswith("digits-"):
        return zoo.load(name)[0].eval().cuda()
    if name == "vit-b16":
        made = torchvision.models.vit_b_16(weights=None)
        nn.init.normal_(made.heads.head.weight, std=0.12)
    else:
        norm = None if name == "resnet50-bn" else (lambda width: nn.GroupNorm(32, width))
        made = torchvision.models.resnet50(weights=None, norm_layer=norm)
        with torch.no_grad():
            made.fc.weight.mul_(12.0 if name == "resnet50-bn" else 6.0)
    return made.eval().cuda()


def settings(method: str, net: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    """Settings of a method, with the threshold at the median of this network's entropies."""
    if batches[0].shape[2] == 32:
        needs = poem.recipe(method, preset="cifar").uses_source_data
        return {**UNIT, "preset": "cifar", **({"source_data": [batches[0]]} if needs else {})}
    with torch.no_grad():
        log_p = torch.cat([poem.adapt(net, "bn", fast=False, **UNIT)(batch) for batch in batches[:2]]).log_softmax(1)
    fraction = float(-(log_p.exp() * log_p).sum(1).median()) / math.log(1000)
    more: dict[str, Any] = dict(UNIT)
    host = method.partition("+")[0]
    if host == "eata":
        more |= {"select": EntropyBelow(fraction) & NotRedundant(0.9999), "source_data": [batches[0]]}
    elif host in ("deyo", "poem-official"):
        more["select"] = EntropyBelow(fraction) & PLPDAbove(-1.0)
    elif host in ("sar", "poem"):
        more["threshold"] = fraction
    elif host == "auto" and not any(isinstance(each, nn.BatchNorm2d) for each in net.modules()):
        more["select"] = EntropyBelow(fraction) & NotRedundant(0.9999)  # on batch norm nothing is learnt
    return more


def compared(method: str, name: str, batches: list[Tensor]) -> dict[str, Any]:
    """The row of one method on one network."""
    net = network(name)
    more = settings(method, net, batches)
    plain = poem.adapt(net, method, fast=False, **more)
    fast = poem.adapt(net, method, fast=True, **more)
    far, flips, nearest, waits, notes = 0.0, 0, 0.0, [], set()
    margin = plain.recipe.select.margin
    started = time.perf_counter()
    for number, batch in enumerate(batches):
        expected = plain(batch)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if number > 1 else "default")
            answer = fast(batch)
            torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(each.message) for each in heard))
        notes.update(fast.last.notes)
        far = max(far, float((expected.softmax(1) - answer.softmax(1)).abs().max()))
        if margin is not None:
            other = plain.last.selected != fast.last.selected
            flips += int(other.sum())
            edge = (plain.last.first_entropy - margin * math.log(answer.shape[1])).abs()
            nearest = max(nearest, float(edge[other].max()) if bool(other.any()) else 0.0)
    return {
        "network": name, "method": method, "batches": len(batches), "batch": len(batches[0]),
        "largest_difference_of_probabilities": far, "selected_by_one_alone": flips, "farthest_from_threshold": nearest,
        "host_waits_per_batch": max(waits[2:], default=0), "rounds": fast.totals.rounds, "updates": fast.totals.updates,
        "same_totals": plain.totals == fast.totals, "notes": sorted(notes), "captured": bool(fast._captures._loops),
        "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def _fits(method: str, name: str) -> bool:
    """Whether a method is for a network: `rem` drops tokens of vision transformers."""
    return not method.startswith("rem") or name in ("digits-ln", "vit-b16")


def main() -> None:
    """Every method on every network; MEMO, which learns 32 views of each image by itself, in batches of two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--nets", default="resnet50-bn,resnet50-gn,vit-b16")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--shard", default="0/1", help="which part of the rows, as 0/8")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    rng = torch.Generator().manual_seed(0)
    batches = [torch.rand(args.size, 3, 224, 224, generator=rng).cuda() for _ in range(args.batches)]
    if "digits" in args.nets:
        coarse = [torch.rand(args.size, 3, 6, 6, generator=rng) for _ in range(args.batches)]
        batches = [functional.interpolate(each, 32, mode="bicubic").clamp(0, 1).cuda() for each in coarse]
    chosen = poem.methods() if args.methods == "every" else args.methods.split(",")
    command = ["python", "benchmarks/capture_check.py", *(Path(argument).name for argument in sys.argv[1:])]
    facts: dict[str, Any] = {
        "tree": tree_hash(),
        "command": " ".join(command),
        "device": torch.cuda.get_device_name(),
        **provenance(),
    }
    place, parts = map(int, args.shard.split("/"))
    every = [(name, method) for name in args.nets.split(",") for method in chosen if _fits(method, name)]
    jobs = sorted(every, key=lambda job: not job[1].startswith(SLOW))[place::parts]
    rows: list[dict[str, Any]] = []
    for done, (name, method) in enumerate(jobs, 1):
        try:
            row = compared(method, name, [each[:2] for each in batches] if method.startswith("memo") else batches)
        except Exception as error:  # the other rows are measured all the same
            row = {"network": name, "method": method, "error": f"{type(error).__name__}: {error}"[:500]}
            torch.cuda.set_sync_debug_mode("default")
        print(row, flush=True)
        rows.append(row)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        left = [" ".join(job) for job in jobs[done:]]
        write_atomic(
            args.out, json.dumps({**facts, "finished": not left, "left": left, "rows": rows}, indent=1).encode()
        )


if __name__ == "__main__":
    main()
