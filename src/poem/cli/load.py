"""Examples:
poem load http://127.0.0.1:8000 --rate 50 --streams 64 --requests 6400
poem load http://127.0.0.1:8000 --images photos/ --rate 10 --json load.json

Requests arrive at random times, --rate of them per second on average, whether or not earlier ones are answered (open
loop), and go to the streams load-0, load-1 and so on in turn. Prints percentiles of latency from the moment at which a
request was to be sent, the throughput, requests that met a full queue (429) and errors; exit status 1 with errors.

Without --images it sends noise of the model's size. The streams stay: the service adapts to what is sent, so use names
of their own (--prefix), and do not load a service that others use.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument

if TYPE_CHECKING:
    from poem.serve.client import Client

KEPT = 256
"""Bodies that are made before the load begins; they are sent in turn."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add = parser.add_argument
    add("url", metavar="URL", help="of the service, such as http://127.0.0.1:8000")
    add("--rate", type=float, default=10.0, help="requests per second; default: 10")
    add("--requests", type=int, default=200, help="how many in all; default: 200")
    add("--streams", type=int, default=1, help="default: 1")
    add("--per-request", type=int, default=1, metavar="N", help="images of a request; default: 1")
    add("--images", type=path_argument, metavar="FOLDER", help="JPEG and PNG files to send; default: noise")
    add("--deadline-ms", type=float, help="of each request; default: the service's")
    add("--prefix", default="load", help="of the streams' names; default: load")
    add("--token-file", type=path_argument, metavar="FILE", help="its first token is sent; default: $POEM_TOKEN")
    add("--seed", type=int, default=0, help="of the times and of the noise; default: 0")
    add("--json", type=path_argument, metavar="FILE", help="write the numbers to a file too")


def run(args: argparse.Namespace) -> int:
    """Load the service and print what came of it; returns 1 if there were errors."""
    import json

    from poem._util.files import check_file_writable, read_text, write_atomic
    from poem.serve.client import Client
    from poem.serve.load import run_load

    checks.check_range(args, 1, None, "requests", "streams", "per_request")
    checks.check_finite(args, "rate", "deadline_ms")
    if not args.rate:
        raise ValueError("expected --rate above 0, got 0")
    if args.json is not None:
        check_file_writable(args.json)
    tokens = (read_text(args.token_file) if args.token_file else os.environ.get("POEM_TOKEN", "")).split()
    token = tokens[0] if tokens else None
    bodies = _bodies(args, Client(args.url, token=token, retries=1))
    found = run_load(
        args.url, bodies, rate=args.rate, requests=args.requests, streams=args.streams, per_request=args.per_request,
        token=token, deadline_ms=args.deadline_ms, seed=args.seed, prefix=args.prefix,
    )  # fmt: skip
    print(found)
    if args.json is not None:
        write_atomic(args.json, json.dumps(found.as_dict(), indent=1))
    return 1 if found.errors else 0


def _bodies(args: argparse.Namespace, client: Client) -> list[Any]:
    """What is sent: files, or noise of the model's size."""
    import numpy as np

    service = client.service()
    if args.images is None:
        rng, shape = np.random.default_rng(args.seed), service.get("input") or [3, 224, 224]
        count = max(1, KEPT // args.per_request)
        return [rng.integers(0, 256, (args.per_request, *shape), dtype=np.uint8) for _ in range(count)]
    paths = sorted(each for each in args.images.rglob("*") if each.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not paths:
        raise FileNotFoundError(f"expected JPEG or PNG files under {args.images}, got none")
    files = [each.read_bytes() for each in paths[: KEPT * args.per_request]]
    groups = [files[at : at + args.per_request] for at in range(0, len(files), args.per_request)]
    whole = [each for each in groups if len(each) == args.per_request]
    if not whole:
        raise ValueError(f"expected at least --per-request {args.per_request} files, got {len(files)}")
    return [each[0] if args.per_request == 1 else each for each in whole]
