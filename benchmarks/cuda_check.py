"""Compare the answers of every method on CPU and CUDA, and time the eager loop on a ResNet-50.

    python benchmarks/cuda_check.py --out cuda.json

Needs torch and torchvision; poem is found beside this file, installed or not. Answers are in double precision, so that
a difference is a mistake and not rounding. Speed: random weights, batch 64 at 224 pixels, every sample selected (the
worst case).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import torch  # noqa: E402
from nets import make_net  # noqa: E402

import poem  # noqa: E402
from poem.parts import AugMix, EntropyBelow, MeanTeacher, NotRedundant, PLPDAbove, Repeat  # noqa: E402


def settings(method: str) -> dict[str, Any]:
    """Settings with which enough samples are selected, and few views made."""
    more: dict[str, Any] = {"lr": 0.01, "mean": (0, 0, 0), "std": (1, 1, 1)}
    if method.startswith(("eta", "eata", "rdumb")):
        more["select"] = EntropyBelow(0.8) & NotRedundant(0.98)
    if method.startswith("memo"):
        more["views"] = AugMix(views=4)
    if method.startswith("cotta"):
        more["teacher"] = MeanTeacher(copies=2, unsure=0.9)
    if method.startswith(("deyo", "poem-official")):  # destroying shape changes little for random networks
        more["select"] = EntropyBelow(0.8) & PLPDAbove(0.0)
        if method == "poem-official":
            more["select"] &= NotRedundant(0.98)
    return more


def agreement() -> list[dict[str, Any]]:
    """Largest difference of log-probabilities between the devices, per method and net."""
    rows = []
    for kind, sharpness in (("bn", 10.0), ("gn", 6.0), ("ln", 9.0)):
        images = torch.rand(3, 8, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for method in poem.methods():
            answers, taught = [], []
            more = settings(method)
            if method.startswith("eata"):  # each device measures importance on its own
                more["source_data"] = [images[0]]
            try:
                for device in ("cpu", "cuda"):
                    net = make_net(kind, sharpness=sharpness).double().to(device)
                    adapter = poem.adapt(net, method, **more)
                    seen = [adapter(batch.to(device)).log_softmax(1).cpu() for batch in images]
                    answers.append(torch.cat(seen))
                    taught.append(int(adapter.totals.taught))
            except RuntimeError as error:  # such as tensors on two devices; the other methods go on
                rows.append({"net": kind, "method": method, "error": str(error), "far": float("inf")})
                print(f"failed: {rows[-1]}", flush=True)
                continue
            far = float((answers[0] - answers[1]).abs().max())
            rows.append({"net": kind, "method": method, "taught": taught[0], "taught_cuda": taught[1], "far": far})
            if not far <= 1e-6 or taught[0] != taught[1]:
                print(f"differs: {rows[-1]}", flush=True)
    return rows


def speed() -> list[dict[str, Any]]:
    """Images per second of the eager loop, median of repeated calls."""
    import torchvision

    rows = []
    images = torch.rand(64, 3, 224, 224, device="cuda")
    all_shapes = EntropyBelow(2.0) & PLPDAbove(-2.0)
    for precision, conv_tf32 in (("fp32", False), ("fp32", True), ("tf32", True), ("bf16", True)):
        torch.backends.cudnn.allow_tf32 = conv_tf32  # torch's default is True: fp32 leaves it as it is
        model = torchvision.models.resnet50(weights=None).cuda().eval().to(memory_format=torch.channels_last)
        for method, changes in (
            ("source", {}), ("tent", {}), ("sar", {"threshold": 2.0}), ("deyo", {"select": all_shapes}),
            ("poem", {"threshold": 2.0, "rounds": 1}), ("tent*", {}), ("poem", {"threshold": 2.0, "rounds": 2}),
            ("poem", {"threshold": 2.0, "explore": Repeat(2)}),
        ):  # fmt: skip
            adapter = poem.adapt(model, method, precision=precision, lr=1e-6, **changes)
            x = images.to(memory_format=torch.channels_last)
            for _ in range(3):
                adapter(x)
            times = []
            for _ in range(10):
                torch.cuda.synchronize()
                start = time.perf_counter()
                adapter(x)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            median = sorted(times)[len(times) // 2]
            updates = adapter.totals.updates / max(1, adapter.totals.batches)
            told = {key: value if isinstance(value, int | float) else repr(value) for key, value in changes.items()}
            rows.append(
                {
                    "precision": precision, "conv_tf32": conv_tf32, "method": method, **told, "updates": updates,
                    "images_per_s": 64 / median,
                }
            )  # fmt: skip
            adapter.unload()
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    rows = agreement()
    worst = max(rows, key=lambda row: row["far"])
    print(
        f"{len(rows)} runs, CPU against CUDA: largest difference {worst['far']:.2g}, "
        f"{worst['method']} on {worst['net']}",
        flush=True,
    )
    fast = speed()
    for row in fast:
        print(
            f"{row['precision']:>5} conv_tf32={row['conv_tf32']!s:>5} {row['method']:>6} {row['updates']:.1f} updates "
            f"{row['images_per_s']:8.0f} images/s"
        )
    host = {"torch": torch.__version__, "device": torch.cuda.get_device_name(0), "python": platform.python_version()}
    if args.out:
        args.out.write_text(
            json.dumps({"command": " ".join(sys.argv), "host": host, "agreement": rows, "speed": fast}, indent=1)
        )


if __name__ == "__main__":
    main()
