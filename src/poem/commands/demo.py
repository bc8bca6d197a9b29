"""Real digits, three small networks, four corruptions, seven methods: a table.

Example: poem demo --count 1024
"""

from __future__ import annotations

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--count", type=int, default=512, help="digits per stream, of 1500 that training never saw")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--severity", type=int, default=5, choices=range(1, 6))


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from poem.demo import SHIFTS, run, summary

    print(
        f"{args.count} digits per stream, batches of {args.batch_size}, severity {args.severity}: {', '.join(SHIFTS)}"
    )
    print("Each adapter starts afresh at each shift; constants of the CIFAR preset; one seed: a demo, not evidence.\n")
    print(summary(run(args.count, args.batch_size, args.severity)))
    return 0
