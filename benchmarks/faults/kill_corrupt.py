"""Kill `poem corrupt` after random numbers of files, resume it each time, and compare with a run that nobody disturbed.

    python benchmarks/faults/kill_corrupt.py FOLDER_OF_CLASS_FOLDERS [--kills 10] [--corruptions gaussian_noise fog]

Prints how much stood after each kill, and whether the trees end byte-identical; `--json FILE` keeps that.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def tree(root: Path) -> dict[str, str]:
    """Every file below a folder, by its contents."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def count(root: Path) -> int:
    """Files below a folder, while others make and remove folders."""
    return sum(len(names) for _, _, names in os.walk(root))


def command(source: Path, target: Path, args: argparse.Namespace) -> list[str]:
    """The command as a user would type it."""
    names = ["--corruptions", *args.corruptions, "--severities", "5", "--workers", "2"]
    return [sys.executable, "-m", "poem", "corrupt", str(source), str(target), *names]


def main() -> int:
    """Run, kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--corruptions", nargs="+", default=["gaussian_noise", "fog"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        began = time.perf_counter()
        subprocess.run(command(args.source, whole, args), check=True, **quiet)  # type: ignore[call-overload]
        usual = time.perf_counter() - began
        print(f"undisturbed: {len(tree(whole))} files in {usual:.0f} s", flush=True)
        standing: list[int] = []
        while (done := len(standing)) < args.kills:
            process = subprocess.Popen(command(args.source, killed, args), start_new_session=True, **quiet)  # type: ignore[call-overload]
            goal = count(killed) + chance.randint(1, 2 * count(whole) // args.kills)
            while process.poll() is None and count(killed) < goal:  # by files, not seconds: starting up writes nothing
                time.sleep(0.01)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                standing.append(count(killed))
                print(f"kill {done + 1}: {standing[-1]} files stand", flush=True)
            else:
                print("finished before the kill; starting over", flush=True)
                subprocess.run(["rm", "-rf", str(killed)], check=True)
        subprocess.run(command(args.source, killed, args), check=True, **quiet)  # type: ignore[call-overload]
        same = tree(whole) == tree(killed)
        print("byte-identical" if same else "DIFFERENT")
        if args.json:
            words = ["SOURCE" if word == str(args.source) else word for word in sys.argv[1:]]
            held = {
                "command": " ".join(["python", "benchmarks/faults/kill_corrupt.py", *words]),
                "source_images": count(args.source),
                "files": len(tree(whole)),
                "undisturbed_s": round(usual, 1),
                "kills": len(standing),
                "files_after_each_kill": standing,
                "byte_identical": same,
            }
            args.json.write_text(json.dumps(held, indent=1) + "\n")
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
