"""How fast adaptation is: images per second, latency and memory, beside a plain forward and a plain implementation.

    python benchmarks/speed.py --device cuda --out results/speed/h200.json            # rows, the important ones first
    python benchmarks/speed.py --device cuda --out FILE --nets resnet50-bn --curves --profile --budget 280
    python benchmarks/speed.py --device cpu --threads 2 --out FILE                    # one update against one forward

Needs torch and torchvision; timm where it is installed gives the ViT and EfficientNet-Lite0. poem is found beside this
file, installed or not. Random weights and random images, a new batch for every call (eight in turn).

The selection is forced, so that the work does not depend on what random weights predict: `--select 100` selects all
samples (the worst case), 50 the first half, 0 none. What cannot be measured is a row that says why, and what the budget
leaves out is listed; the file is written after every row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from _speed_nets import ALL_NETS, NETS, Forced, NotAvailableError, with_forced_selection  # noqa: E402
from _speed_place import Place, Row, in_turn  # noqa: E402
from _speed_profile import profiled, profiles  # noqa: E402
from _speed_ratio import ALLOCATOR, ratio, ratio_here, verdict  # noqa: E402
from _speed_rows import METHODS, MODES, SCHEMA, Job, attempted, forwards, made, measured, plan  # noqa: E402
from _speed_table import derive, gains, page, table  # noqa: E402
from tree_hash import GUARDED, tree_hash  # noqa: E402

from poem._util.files import write_atomic  # noqa: E402
from poem._util.log_level import errors_only  # noqa: E402
from poem.bench.provenance import provenance  # noqa: E402

__all__ = [
    "ALLOCATOR",
    "METHODS",
    "Bench",
    "Forced",
    "Job",
    "Place",
    "derive",
    "gains",
    "in_turn",
    "made",
    "main",
    "plan",
    "profiled",
    "with_forced_selection",
]

NOTES = {
    "select": "Forced(share) marks ceil(share * batch) samples, one place further on in every round. At 100 % the set "
    "cannot change and exploring would stop after one update, so poem2 and deyo+poem run Repeat(2) there: the same "
    "passes and updates, without the comparison. PLPD's pass is paid (drop above -2: all pass), EATA's cosine too; "
    "ROID's own choice of diverse samples is replaced. bn, auto and guarded-auto select as they do, with random "
    "weights next to nothing; RoTTA learns from a bank.",
    "slowest_call_s": "the longest call of the warm-up: with fast=True the one that captured.",
    "unloaded_mib": "allocated after the adapter was unloaded; loaded_mib was before it was made.",
    "modes": "eager: fast=False, fp32 (convolutions in TF32 where torch's switches allow it). captured: fast=True, "
    "fp32. bf16: fast=True, bf16. plain: _plain.py, fp32, contiguous. plain-separate: the same with a "
    "forward through the whole network for each branch. forward: the network alone in eval mode; its bf16-compiled is "
    "torch.compile under autocast, bf16-compiled-graph the same in a CUDA graph made by hand.",
    "layout": "convolutional networks in channels_last, ViTs contiguous; 'plain' is contiguous.",
    "median_ms, p99_ms": "one call at a time, synchronised before and after; p99 is the largest where calls < 100.",
    "images_per_s": "a run of calls with one synchronisation at its end.",
    "peak": "since the model and the images were loaded, warm-up and capture included; pools of CUDA graphs count as "
    "reserved.",
    "ratio_to_source": "time per image over that of 'source' in the same mode (plain: over source in eager).",
    "as_asked": "False: the mode could not be had and the row ran eagerly; its notes say why. No gain is made of it.",
    "share_of_limit": "images/s over what the compiled bf16 forward of this run would leave if an update cost its "
    "arithmetic alone: forward images/s / factor, the faster of the two compiled forwards.",
}


class Bench:
    """Measures job after job within a budget, and keeps the file up to date."""

    def __init__(self, place: Place, out: Path | None, budget: float, about: Row) -> None:
        self.place, self.out, self.budget, self.about = place, out, budget, about
        self.rows: list[Row] = []
        self.left: list[str] = []
        self.extra: Row = {}
        self.begun = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.begun

    def run(self, jobs: list[Job]) -> None:
        """One after the other, until the time is up or the device is broken; what is left is listed at any time."""
        for index, job in enumerate(jobs):
            self.left = [str(each) for each in jobs[index:]]
            broken = not _sound(self.place)
            if broken or self.spent > self.budget:
                why = "the device answers no more" if broken else f"{self.budget:g} s are over"
                print(f"{why}: {len(self.left)} rows skipped", flush=True)
                break
            self.one(job)
            del self.left[0]
        self.write()

    def one(self, job: Job) -> None:
        """One job: a row, or three where the network alone is measured."""
        self.place.clean()
        if job.method != "forward":
            self.enter(job, attempted(lambda: measured(self.place, job)))
        else:
            try:
                for mode, measure in forwards(self.place, job):
                    self.place.clean()
                    self.enter(dataclasses.replace(job, mode=mode), attempted(measure))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                status = "not available" if isinstance(error, NotAvailableError) else "error"
                self.enter(job, {"status": status, "reason": reason})
        if job.mode == "limit":
            torch.compiler.reset()

    def enter(self, job: Job, found: Row) -> None:
        """Into the file, and a line for whoever waits."""
        self.rows.append({**dataclasses.asdict(job), **found})
        print(f"{self.spent:6.1f} s  {job}: {_said(found)}", flush=True)
        self.write()

    def write(self, ended: bool = False) -> None:
        """The whole file as far as it goes; finished if everything that was asked for is there."""
        derive(self.rows)
        content = {
            "schema": SCHEMA, **self.about, "seconds": round(self.spent, 1), "finished": ended and not self.left,
            "notes": NOTES, "gains": gains(self.rows), "rows": self.rows, "skipped": self.left, **self.extra,
        }  # fmt: skip
        if self.out is not None:
            write_atomic(self.out, json.dumps(content, indent=1) + "\n", sync=False)


def _sound(place: Place) -> bool:
    try:
        place.sync()
    except RuntimeError:
        return False
    return True


def _said(found: Row) -> str:
    if found["status"] != "ok":
        return f"{found['status']}: {found['reason'].splitlines()[0][:160]}"
    notes = f"  ({'; '.join(found['notes'])})" if found["notes"] else ""
    return (
        f"{found['images_per_s']:.1f} images/s, {found['median_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms, "
        f"{found['updates']} updates, warm-up {found['warm_up_s']:.1f} s{notes}"
    )


def _without_folders(argument: str) -> str:
    """An argument of the command line; of a path its last part, so that no folder is published."""
    return Path(argument).name if os.sep in argument else argument


def about(args: argparse.Namespace) -> Row:
    """What the numbers depend on."""
    backends = torch.backends
    return {
        "tree": tree_hash(), "guarded": tree_hash(names=GUARDED),
        "command": " ".join(["python", "benchmarks/speed.py", *map(_without_folders, sys.argv[1:])]),
        "host": {
            **provenance(),
            "device": torch.cuda.get_device_name(0) if args.device == "cuda" else platform.processor() or "cpu",
            "cuda": torch.version.cuda, "cudnn": backends.cudnn.version() if args.device == "cuda" else None,
            "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        },
        "switches": {
            "cudnn.allow_tf32": backends.cudnn.allow_tf32, "cuda.matmul.allow_tf32": backends.cuda.matmul.allow_tf32,
            "cudnn.benchmark": backends.cudnn.benchmark,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "settings": {"size": args.size, "seconds": args.seconds, "budget": args.budget},
    }  # fmt: skip


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=None, help="JSON, written after every row")
    parser.add_argument(
        "--nets",
        type=names,
        default=None,
        help=f"some of {','.join(ALL_NETS)}; default on CUDA the first four, on the CPU none",
    )
    parser.add_argument("--batches", type=numbers, default=[64, 1, 16])
    parser.add_argument("--methods", type=names, default=list(METHODS), help=",".join(METHODS))
    parser.add_argument("--modes", type=names, default=list(MODES), help=",".join(MODES))
    parser.add_argument("--select", type=numbers, default=[100], help="selected shares of the batch, in percent")
    parser.add_argument("--seconds", type=float, default=1.0, help="per row, once for latency and once for throughput")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no row is begun")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--forward", action=argparse.BooleanOptionalAction, default=True,
                        help="the network alone, which shares of the limit are taken of")  # fmt: skip
    parser.add_argument("--curves", action="store_true", help="POEM with one update over batch sizes and depths")
    parser.add_argument("--profile", action="store_true", help="kernels of POEM with one update, in a file beside")
    parser.add_argument("--show", type=Path, default=None, help="a file of rows: print them for the documentation")
    parser.add_argument("--ratio", action=argparse.BooleanOptionalAction, default=None,
                        help="POEM with one update against one forward (default on the CPU)")  # fmt: skip
    parser.add_argument("--ratio-net", default="resnet50-bn")
    parser.add_argument("--ratio-batch", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5, help="of a forward and a POEM call")
    parser.add_argument("--ratio-here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for given, there in ((args.methods, METHODS), (args.modes, MODES), (args.nets or (), ALL_NETS)):
        strange = [name for name in given if name not in there]
        if strange:
            parser.error(f"expected some of {', '.join(there)}, got {', '.join(strange)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none; use --device cpu")
    if args.nets is None:
        args.nets = list(NETS) if args.device == "cuda" else []
    if args.ratio is None:
        args.ratio = args.device == "cpu"
    return args


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers(text: str) -> list[int]:
    return [int(name) for name in names(text)]


def main(argv: list[str] | None = None) -> int:
    """Measure, write, print; hints about random weights are kept back."""
    with errors_only():
        return measure(arguments(argv))


def shown(path: Path) -> str:
    """What a file of this benchmark holds."""
    try:
        content = json.loads(path.read_text())
        rows, ratio = content["rows"], content.get("ratio")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"expected a file that --out wrote, {path} is none: {error!r}") from error
    return "\n\n".join([*([page(rows)] if rows else []), *([verdict(ratio)] if ratio else [])])


def measure(args: argparse.Namespace) -> int:
    """What was asked for."""
    if args.show:
        print(shown(args.show))
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.ratio_here:
        print(json.dumps(ratio_here(args)))
        return 0
    place = Place(args.device, args.size, args.seconds)
    bench = Bench(place, args.out, args.budget, about(args))
    asked = args.nets, args.batches, args.methods, args.modes, args.select
    bench.run(plan(*asked, forward=args.forward, curves=args.curves))
    if args.profile and args.nets:
        profiles(place, args.out, bench.about, args.nets[0], [batch for batch in (64, 1) if batch in args.batches])
    if args.ratio:
        found = bench.extra["ratio"] = ratio(args)
        print(verdict(found), flush=True)
    bench.write(ended=True)
    if bench.rows:
        print(f"\n{table(bench.rows, gains(bench.rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
