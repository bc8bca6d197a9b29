"""Train the three CIFAR-10 source networks on one GPU, from a single packed file.

Needs torch, torchvision, numpy and safetensors; poem is found beside this file, installed or not.

    python benchmarks/train_cifar10.py --pack cifar10-jpeg.tar.xz cifar10.npz   # once, anywhere
    python benchmarks/train_cifar10.py cifar10.npz --out weights                # on the GPU

Each network has a limit of seconds: a plan that would take longer gets fewer epochs, and the record says how many. The
records in the package (src/poem/zoo/trained/cifar10.json) are of the binary version, whose images are not compressed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

NETS = ("cifar10-bn", "cifar10-gn", "cifar10-vit")
SECONDS = {"cifar10-bn": 270.0, "cifar10-gn": 270.0, "cifar10-vit": 270.0}
FLOORS = {"cifar10-bn": 92.0, "cifar10-gn": 90.0, "cifar10-vit": 85.0}
"""Percent of test images to reach; a record says whether its network did. The ViT in the package did not (83.96)."""


def main() -> int:
    """Pack, or train, print and write `cifar10.json` after every network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the binary version's folder, a packed .npz, or class folders")
    parser.add_argument("packed", type=Path, nargs="?", help="with --pack: the .npz to write")
    parser.add_argument("--pack", action="store_true", help="write the packed file and stop")
    parser.add_argument("--out", type=Path, default=Path("weights"), help="default: weights")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--epochs", type=int, help="instead of each plan's own")
    parser.add_argument("--limit", type=int, help="number of training images, for a trial")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the seconds that each network may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="train through torch.compile; needs a C compiler")
    args = parser.parse_args()

    import torch

    from poem.zoo.train import PLANS, train
    from poem.zoo.train_data import LabelledImages, cifar10, pack

    if args.pack:
        if args.packed is None:
            parser.error("--pack needs the .npz to write")
        print(f"{args.packed}: {pack(args.data, args.packed) / 1e6:.1f} MB")
        return 0
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cudnn.benchmark = True
    task = cifar10(args.data)
    if args.limit:
        rows = torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0))[: args.limit]
        some = slice(None, None, max(1, len(task.test) // args.limit))
        few = LabelledImages(task.test.images[some], task.test.labels[some])
        task = replace(task, train=LabelledImages(task.train.images[rows], task.train.labels[rows]), test=few)
    print(f"{len(task.train)} train, {len(task.test)} test, read in {time.perf_counter() - start:.1f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    records, low = {}, []
    for name in args.nets:
        plan = replace(PLANS[name], epochs=args.epochs) if args.epochs else PLANS[name]
        began = time.perf_counter()

        def tell(epoch: int, epochs: int, loss: float, name: str = name, began: float = began) -> None:
            if epoch % 5 == 1 or epoch == epochs:
                print(
                    f"  {name} epoch {epoch}/{epochs} loss {loss:.3f} {time.perf_counter() - began:.0f} s", flush=True
                )

        budget = SECONDS[name] * args.scale
        record = train(
            name, task, args.out, seed=args.seed, device=device, budget=budget, compiled=args.compile, plan=plan,
            tell=tell,
        )  # fmt: skip
        reached = record["accuracy"] >= FLOORS[name]
        record |= {"floor": FLOORS[name], "floor_reached": reached}
        records[name] = record
        (args.out / "cifar10.json").write_text(json.dumps(records, indent=1) + "\n")
        print(
            f"{name}: {record['accuracy']:.2f} % of {record['test_images']}, {record['epochs']} epochs, "
            f"{record['seconds']} s, {record['bytes'] / 2**20:.1f} MiB, sha256 {record['sha256']}",
            flush=True,
        )
        if not reached:
            low.append(f"{name} below {FLOORS[name]} %")
    print(f"whole run {time.perf_counter() - start:.0f} s; {', '.join(low) or 'all floors reached'}")
    return 1 if low else 0


if __name__ == "__main__":
    raise SystemExit(main())
