"""What many streams of single images over one model cost: stacked, in turns, and as one stream of a large batch.

python benchmarks/stacked.py --device cuda --net resnet50 --methods tent,poem,auto --streams 64 --seconds 2 --out FILE

Methods that filter by entropy select every sample (`--threshold`), so that all three do the same work. One stream of a
large batch is `poem.adapt` as it is, with CUDA graphs on a GPU. `--lr` in place of the method's learning rate makes
streams move further while answers are compared; rounding then grows with it, on networks with random weights quickly.

Needs torch and torchvision alone (`--net digits-bn`, `digits-gn` and `digits-ln` need neither weights nor torchvision).
Weights are random where they cannot be loaded: speed does not depend on them, and neither does the comparison of
stacked answers with those of each stream alone. The comparison is made with deterministic algorithms and without TF32.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from tree_hash import STACKED, tree_hash  # noqa: E402

import poem  # noqa: E402
from poem.adapter import Adapter  # noqa: E402
from poem.guarded.guard import Guard  # noqa: E402
from poem.serve.stack import Stack  # noqa: E402
from poem.serve.stack_state import Member  # noqa: E402

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def network(name: str, device: str) -> tuple[nn.Module, int]:
    """A network by name and the side of its images; random weights, the same at every run."""
    torch.manual_seed(0)
    if name.startswith("digits-"):
        from poem import zoo

        return zoo.load(name)[0].to(device), 32
    import torchvision

    if name.endswith("-gn"):
        model = getattr(torchvision.models, name.removesuffix("-gn"))(norm_layer=lambda wide: nn.GroupNorm(32, wide))
    else:
        model = getattr(torchvision.models, name)()
    return model.eval().to(device), 224


def main() -> None:
    """Measure every method, print a table and write it."""
    args = _arguments()
    logging.getLogger("poem").setLevel(logging.ERROR)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    model, side = network(args.net, args.device)
    side = args.side or side
    rows = []
    for method in args.methods.split(","):
        for guarded in (False, True) if args.guard else (False,):
            rows.append(measured(args, model, side, method, guarded))
            print(text(rows[-1]), flush=True)
    found = {
        "tree": tree_hash(), "serve": tree_hash(names=STACKED), "command": _command(args),
        "net": args.net, "device": _device(args.device), "torch": torch.__version__, "streams": args.streams,
        "images_each": args.images, "side": side, "tf32": args.tf32, "threads": torch.get_num_threads(), "rows": rows,
    }  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def _command(args: argparse.Namespace) -> str:
    """What was typed; of the file's path the last part, so that no file names a machine's folders."""
    typed = " ".join(sys.argv[1:])
    return f"python benchmarks/stacked.py {typed if args.out is None else typed.replace(str(args.out), args.out.name)}"


def measured(args: argparse.Namespace, model: nn.Module, side: int, method: str, guarded: bool) -> dict[str, Any]:
    """Images per second of one method in three ways, and how far stacked answers are from each stream alone."""
    count, each, device = args.streams, args.images, args.device
    images = [torch.rand(each, 3, side, side, generator=torch.Generator().manual_seed(at)) for at in range(8 * count)]
    images = [_placed(one, args.pin, device) for one in images]

    changes = changed(method, args.threshold)

    def make() -> Adapter | Guard:
        return poem.adapt(model, method, mean=MEAN, std=STD, batch_size=each, guard=guarded, **changes)

    streams = [make() for _ in range(count)]
    stack = Stack(streams[0])
    members = [Member(one.adapter if isinstance(one, Guard) else one) for one in streams]
    for at, one in enumerate(streams):
        one(images[at])
    why = [stack.why_not(member, images[at]) for at, member in enumerate(members)]
    row: dict[str, Any] = {"method": method, "guarded": guarded, "why_not": next((one for one in why if one), "")}
    if not row["why_not"]:
        turn = iter(range(10**9))

        def stacked() -> None:
            start = next(turn) % 8 * count
            stack.answer(streams, members, images[start : start + count])

        row["stacked"] = count * each * rate(stacked, args.seconds, device)
        for member in members:
            stack.settle(member)
        row["difference"] = difference(model, method, guarded, images, args)
    places = iter(range(10**9))

    def in_turns() -> None:
        at = next(places)
        streams[at % count](images[at % len(images)])

    row["turns"] = each * rate(in_turns, args.seconds, device)
    for one in streams:
        one.unload()
    alone = poem.adapt(model, method, mean=MEAN, std=STD, batch_size=count * each, guard=guarded, **changes)
    batches = [torch.cat(images[start : start + count]) for start in range(0, len(images), count)]
    batch = iter(range(10**9))
    row["one_stream"] = count * each * rate(lambda: alone(batches[next(batch) % 8]), args.seconds, device)
    alone.unload()
    if "stacked" in row:
        row["ratio"], row["over_turns"] = row["stacked"] / row["one_stream"], row["stacked"] / row["turns"]
    return row


def changed(method: str, threshold: float) -> dict[str, Any]:
    """What makes a method select every sample, where it selects by entropy."""
    select = poem.recipe(method).select
    return {"select": select.with_margin(threshold)} if threshold and select.margin is not None else {}


def difference(
    model: nn.Module, method: str, guarded: bool, images: list[Tensor], args: argparse.Namespace, most: int = 8
) -> float:
    """The largest difference in probability between stacked streams and each alone, over some rounds from the start.

    As many rows are stacked as there are streams; the first eight are compared, from batches that they learn from.
    """
    count = args.streams
    compared = min(most, count)

    def make() -> Adapter | Guard:
        return poem.adapt(
            model, method, mean=MEAN, std=STD, batch_size=args.images, guard=guarded, fast=False, lr=args.lr, **changes
        )

    changes = changed(method, args.threshold)

    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    streams, alone = [make() for _ in range(count)], [make() for _ in range(compared)]
    stack = Stack(streams[0])
    members = [Member(one.adapter if isinstance(one, Guard) else one) for one in streams]
    worst = 0.0
    try:
        for turn in range(args.rounds):
            now = images[turn % 8 * count : (turn % 8 + 1) * count]
            expected = [one(batch) for one, batch in zip(alone, now, strict=False)]
            if turn == 0:
                for one, batch in zip(streams, now, strict=True):
                    one(batch)
                why = [stack.why_not(member, batch) for member, batch in zip(members, now, strict=True)]
                if any(why):
                    raise RuntimeError(f"expected streams that can be stacked, got: {why[0]}")
                continue
            found = stack.answer(streams, members, now)
            for one, right in zip(found, expected, strict=False):
                if one.logits is None:
                    raise RuntimeError("a stream failed") from one.error
                worst = max(worst, float((one.logits.softmax(1) - right.softmax(1)).abs().max()))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
        for one in (*streams, *alone):
            one.unload()
    return worst


def rate(call: Callable[[], object], seconds: float, device: str) -> float:
    """Calls per second, after some that are not counted: so many that CUDA graphs are captured."""
    for _ in range(2 if device == "cpu" else 14):
        call()
    _wait(device)
    began, calls = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or calls < 3:
        call()
        calls += 1
        if calls % 4 == 0:
            _wait(device)
    _wait(device)
    return calls / (time.perf_counter() - began)


def text(row: dict[str, Any]) -> str:
    """A row as a line."""
    name = row["method"] + (", guarded" if row["guarded"] else "")
    slow = f"turns {row['turns']:8.1f}  one stream {row['one_stream']:8.1f} images/s"
    if row["why_not"]:
        return f"{name:16} {slow}  not stacked: {row['why_not']}"
    return (
        f"{name:16} stacked {row['stacked']:8.1f}  {slow}  {100 * row['ratio']:.0f} % of one stream, "
        f"{row['over_turns']:.1f} times turns, largest difference {row['difference']:.1e}"
    )


def _placed(images: Tensor, pin: bool, device: str) -> Tensor:
    return images.pin_memory() if pin and device != "cpu" else images.to(device)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _device(name: str) -> str:
    return torch.cuda.get_device_name() if name != "cpu" else "cpu"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cpu")
    add("--net", default="digits-bn", help="digits-bn, digits-gn, digits-ln, or a name of torchvision.models (or -gn)")
    add("--methods", default="tent,poem,auto")
    add("--streams", type=int, default=64)
    add("--images", type=int, default=1, help="of each stream in a batch; default: 1")
    add("--side", type=int, help="of the images; default: the network's")
    add("--seconds", type=float, default=2.0, help="of each measurement; default: 2")
    add("--rounds", type=int, default=6, help="over which answers are compared; default: 6")
    add("--threshold", type=float, default=1.0, help="of entropies, as a share of ln C; 0: the method's; default: 1")
    add("--lr", type=float, help="while answers are compared; default: the method's")
    add("--guard", action="store_true", help="measure guarded streams too")
    add("--tf32", action="store_true", help="let convolutions use TF32 while speed is measured")
    add("--pin", action="store_true", help="images come from pinned memory, not from the device")
    add("--threads", type=int)
    add("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
