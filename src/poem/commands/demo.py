"""Real digits, three small networks, four corruptions, seven methods: a table.

Example: poem demo --count 1024
"""

from __future__ import annotations

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--count", type=int, default=384, help="digits per stream, of 1500 that training never saw")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--severity", type=int, default=4, choices=range(1, 6))


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import logging

    from poem.demo import SHIFTS, run, summary

    logging.getLogger("poem").setLevel(logging.ERROR)  # some rows teach nobody on some shifts; the table shows it

    print(
        f"{args.count} digits per stream, batches of {args.batch_size}, severity {args.severity}: {', '.join(SHIFTS)}"
    )
    print("Adapters start afresh at each shift; constants of the CIFAR preset, lr 0.005; one seed: no evidence.\n")
    print(summary(run(args.count, args.batch_size, args.severity)))
    return 0
