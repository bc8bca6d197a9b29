"""Time our corruptions, and those of the package imagecorruptions where it is installed.

    python benchmarks/corruptions.py --json speed.json   # ours alone where imagecorruptions is not installed
    REFENV/bin/python benchmarks/corruptions.py          # both: see reference_corruptions.py for that environment

Milliseconds per image of 224 x 224, the best of several turns; the two are measured in turn, so that other load slows
both. Both get uint8 arrays, ours a batch (N, 224, 224, 3), the package one image (224, 224, 3) at a time. Torch runs on
`--threads` threads (default 1), the package on as many as OpenCV uses. `--clock cpu` measures processor time instead of
wall time. `--json FILE` writes the table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from reference_corruptions import import_imagecorruptions, scene  # noqa: E402

from poem.streams import CORRUPTIONS, EXTRA, corrupt, frost_source  # noqa: E402


def timed(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the milliseconds of one call."""
    start = clock()
    call()
    return (clock() - start) * 1e3


def main() -> None:
    """Print a table; the ratio is theirs to ours, so larger is better."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=CORRUPTIONS + EXTRA)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--severities", type=int, nargs="+", default=[1, 3, 5])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    try:
        import_imagecorruptions()
        from imagecorruptions import corrupt as public

        from_package = True
    except ImportError:
        from_package = False
    pixels = [scene(224, index) for index in range(4)]
    images = np.stack([pixels[at % 4] for at in range(args.batch)])
    print(f"torch {torch.__version__}, {args.threads} thread(s), batch {args.batch}, {args.clock} clock, ", end="")
    print(f"frost {frost_source()}, imagecorruptions {'yes' if from_package else 'not installed'}")
    print(f"{'corruption':<20}{'severity':>9}{'ours ms':>10}{'theirs ms':>11}{'ratio':>8}")
    rows = []
    for name in args.names:
        for severity in args.severities:
            ours, theirs = [], []
            corrupt(images, name, severity)  # warm-up: tables and textures are made once
            for turn in range(args.turns):
                ours.append(timed(lambda: corrupt(images, name, severity), clock) / args.batch)  # noqa: B023
                if from_package and not (name == "glass_blur" and turn):
                    # As many images per turn as ours, but fewer for the slow ones.
                    share = {"glass_blur": 1, "zoom_blur": 4}.get(name, args.batch)

                    def call() -> None:
                        for at in range(share):  # noqa: B023
                            public(pixels[at % 4], severity=severity, corruption_name=name)  # noqa: B023

                    theirs.append(timed(call, clock) / share)
            line = f"{name:<20}{severity:>9}{min(ours):>10.2f}"
            print(line + (f"{min(theirs):>11.2f}{min(theirs) / min(ours):>8.1f}" if theirs else ""), flush=True)
            best = round(min(theirs), 3) if theirs else None
            rows.append({"corruption": name, "severity": severity, "ours_ms": round(min(ours), 3), "theirs_ms": best})
    if args.json:
        about = {
            "command": " ".join(["python", "benchmarks/corruptions.py", *sys.argv[1:]]),
            "measured": f"milliseconds per image of 224 x 224, best of {args.turns} turns, {args.clock} clock",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": args.threads,
            "batch": args.batch,
            "frost": frost_source(),
            "imagecorruptions": from_package,
        }
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
