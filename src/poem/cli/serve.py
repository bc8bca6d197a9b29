"""Examples:
poem serve digits-bn
poem serve effnet-lite0 --port 9000 --state /var/lib/poem --wait-ms 20
poem serve resnet50-gn deyo+poem --device cuda --deadline-ms 200
poem serve digits-bn --host 0.0.0.0 --token-file token.txt
poem serve digits-bn source                     the model as it came, behind the same front
poem serve resnet50-gn --engine ray --address auto --replicas 8 --state /shared/poem

Answers streams over HTTP, each with a guarded adapter of its own, over one model: what one stream sends changes no
other's answers. Without METHOD it is auto.

curl --data-binary @photo.jpg -H "Content-Type: image/jpeg" http://127.0.0.1:8000/v1/streams/door/predict
curl http://127.0.0.1:8000/v1/streams/door/status

POST /v1/streams/ID/predict takes a JPEG or PNG file, several as multipart, an npy array or JSON; /docs describes all
routes, / shows the streams while they run, /metrics is for Prometheus. From Python: poem.Client. poem load measures.

--state is a folder for snapshots and audits: a stop with SIGTERM or Ctrl-C answers what waits, for --drain-s, and
saves every stream; kill -9 loses what a stream has learnt since its last snapshot. The same command goes on. One
service per folder. The log, on standard error, has a line at the start and one at the end.

--engine ray answers with replicas on a Ray cluster; a stream is placed on one of them by its id, and goes on elsewhere
from its last snapshot when a node dies. --state is a folder that every node reaches under the same path.

It listens on the loopback address. Any other needs tokens (--token-file, one per line, or $POEM_TOKEN), or --open.
There is no TLS: put a proxy before it.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument, rgb_argument

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from poem.serve.engine import StreamEngine
    from poem.serve.learner import Served
    from poem.serve.metrics import Metrics
    from poem.serve.ray_engine import RayEngine
    from poem.serve.settings import ServeSettings

MEBIBYTE = 1 << 20
log = logging.getLogger("poem.serve")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add = parser.add_argument
    add("base", metavar="BASE", help="a base (`poem list bases`), a hub id, or package.module:name")
    add("method", metavar="METHOD", nargs="?", help="a name of `poem list`; default: auto")
    add("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine alone")
    add("--port", type=int, default=8000, help="default: 8000; 0 for any that is free")
    add("--state", type=path_argument, default=Path("poem-state"), metavar="FOLDER",
        help="snapshots and audits; default: poem-state")  # fmt: skip
    add("--token-file", type=path_argument, metavar="FILE", help="bearer tokens, one per line; default: $POEM_TOKEN")
    add("--open", action="store_true", help="let anybody call who can reach the address")
    add("--batch-size", type=int, default=32, help="images of a micro-batch and of a request, at most; default: 32")
    add("--wait-ms", type=float, default=0.0, help="a request waits so long for others of its stream; default: 0")
    add("--stack", action=argparse.BooleanOptionalAction, default=True,
        help="compute streams that wait together as one batch, where method and model allow; default: yes")  # fmt: skip
    add("--stack-images", type=int, default=64, metavar="N", help="images of such a batch, at most; default: 64")
    add("--queue", type=int, default=64, help="requests that wait in a stream before one gets 429; default: 64")
    add("--deadline-ms", type=float, help="then the source answers, unless a request has its own; default: none")
    add("--snapshot-every", type=int, default=32, metavar="N", help="batches between two snapshots; default: 32")
    add("--max-streams", type=int, default=1024, help="default: 1024")
    add("--live", type=int, default=256, metavar="N", help="streams in memory, the others on disk; default: 256")
    add("--idle-s", type=float, default=300.0, help="then a stream goes to disk; default: 300")
    add("--max-body", type=int, default=32, metavar="MIB", help="of a request; default: 32")
    add("--max-queued", type=int, default=1024, metavar="MIB",
        help="of all requests that wait; one more gets 429; default: 1024")  # fmt: skip
    add("--max-megapixels", type=float, default=25.0, help="of an image; default: 25")
    add("--drain-s", type=float, default=60.0, help="for the answers that wait when it is stopped; default: 60")
    add("--source-data", type=path_argument, metavar="FOLDER",
        help="images like those of training: for the shift alarm, and for methods that need them")  # fmt: skip
    add("--source-images", type=int, default=512, metavar="N", help="of that folder, at most; default: 512")
    add("--no-guard", action="store_true", help="adapt without a guard, and without audits")
    add("--budget", type=float, metavar="SHARE", help="at most this share of answers differs from the model's own")
    add("--no-view", action="store_true", help="do not look at shifted images: cheaper, and the guard sees less")
    add("--lr", type=float, help="learning rate; default: the method's rule")
    add(
        "--preset",
        help="constants: imagenet, cifar (or cifar10), cifar100; default: imagenet, for auto by the number of classes",
    )
    add("--weights", help="a file or folder with the base's weights")
    add("--mean", type=rgb_argument, help="of a model of your own, as 0.485,0.456,0.406")
    add("--std", type=rgb_argument, help="of a model of your own, as --mean")
    add("--resize", type=int, help="short side; default: the base's, or as --crop")
    add("--crop", type=int, help="centre crop; default: the base's, or none")
    add("--device", default="cpu")
    add("--engine", choices=("local", "ray"), default="local", help="this process, or a Ray cluster; default: local")
    add("--replicas", type=int, default=2, metavar="N", help="of --engine ray; default: 2")
    add("--address", help="of the Ray cluster, or auto; default: start one on this machine")
    add("--name", default="poem", help="of the application on the cluster; default: poem")
    add("--header-s", type=float, default=10.0, help="seconds for a request's headers; default: 10")
    add("--body-s", type=float, default=30.0, help="seconds for a request's body; default: 30")
    add("--threads", type=int, help="of torch on a CPU; default: torch's own choice")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops it; returns 1 where not everything could be answered and saved in time."""
    from poem.serve.notes import NotesOnce

    level, once = log.level, NotesOnce()
    log.setLevel(logging.INFO)  # the logger `poem` shows warnings alone: a guard's events would be many lines
    logging.getLogger("poem").addFilter(once)
    try:
        return _serve(args)
    finally:
        logging.getLogger("poem").removeFilter(once)
        log.setLevel(level)


def _serve(args: argparse.Namespace) -> int:
    tokens = _tokens(args)
    settings = _settings(args)
    checks.check_devices(args.device)
    _require_extra()
    import signal

    import torch
    import uvicorn

    from poem._util.malloc import use_one_arena
    from poem.serve.access import LOOPBACK, Access
    from poem.serve.front import build_app
    from poem.serve.headers import timed_headers
    from poem.serve.metrics import Metrics

    os.umask(0o077)
    use_one_arena()  # before the engine's thread starts: of its own arena, freed pages at the top would not be returned
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    listener = _listener(args.host, args.port)
    metrics = Metrics()
    engine = _engine(args, settings, metrics)
    hosts = LOOPBACK if args.host in LOOPBACK else ()
    app = build_app(engine, metrics, Access(tokens, hosts), args.drain_s)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, limit_concurrency=2048, timeout_keep_alive=30,
        timeout_graceful_shutdown=math.ceil(args.drain_s) + 2, http=timed_headers(args.header_s), ws="none",
    )  # fmt: skip

    class Server(uvicorn.Server):
        """The time to drain begins with the signal: uvicorn waits for its connections before it tells of the end."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            engine.drain(args.drain_s)
            super().handle_exit(sig, frame)

    server = Server(config)

    def stop(*_: Any) -> None:  # before uvicorn has its own handler, and after: it raises the signal again
        engine.drain(args.drain_s)
        server.should_exit = True

    signal.signal(signal.SIGTERM, stop)
    port = listener.getsockname()[1]
    url = f"http://{_in_address(args.host)}:{port}"
    try:
        log.info("%s", _started(args, url, engine))
        print(f"serving on {url}", flush=True)
        server.run(sockets=[listener])
    finally:
        done = engine.close(args.drain_s)  # once more, for what it says: the application has closed it where it ran
    if not done:
        print(f"not everything was answered within {args.drain_s:g} s and saved; the log says what", file=sys.stderr)
    return 0 if done else 1


def _started(args: argparse.Namespace, url: str, engine: StreamEngine | RayEngine) -> str:
    """The line of the log at the start; streams that cannot be counted, as of replicas that start, do not end it."""
    guard = "without a guard" if args.no_guard or args.method == "source" else "guarded"
    replicas = f", {args.replicas} replicas on Ray" if args.engine == "ray" else ""
    try:
        count = len(engine.streams())
        found = f"{count} stream{'' if count == 1 else 's'} found"
    except Exception as error:
        log.warning("the streams could not be counted: %s", str(error) or type(error).__name__)
        found = "streams"
    method = args.method or "auto"
    return f"started {url} with {args.base}, {method}, {guard}, on {args.device}{replicas}; {found} in {args.state}"


def _in_address(host: str) -> str:
    """A host as an address has it: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def _engine(args: argparse.Namespace, settings: ServeSettings, metrics: Metrics) -> StreamEngine | RayEngine:
    """What answers: this process, or replicas on a cluster, each of which opens the model."""
    if args.engine == "local":
        from poem.serve.engine import StreamEngine

        return StreamEngine(_served(args), settings, args.state, metrics)
    import functools

    from poem.serve.ray_engine import Placement, RayEngine

    prepare = _served(args).prepare  # also raises here for what would fail in every replica
    placement = Placement(
        replicas=args.replicas, address=args.address, name=args.name, threads=args.threads or 1, cpus=args.threads or 1,
        gpus=float(args.device.startswith("cuda")), drain_s=args.drain_s,
    )  # fmt: skip
    return RayEngine(functools.partial(_served, args), prepare, settings, args.state, placement, metrics)


def _require_extra() -> None:
    """Raise if a package of the extra `serve` is missing."""
    from importlib.util import find_spec

    needed = {"fastapi": "FastAPI", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client",
              "python_multipart": "python-multipart", "PIL": "Pillow"}  # fmt: skip
    missing = [title for name, title in needed.items() if find_spec(name) is None]
    if missing:
        raise ImportError(f"poem serve needs {', '.join(missing)}: pip install 'poem-tta[serve]'")


def _tokens(args: argparse.Namespace) -> list[str]:
    """The tokens that are known; an address that others reach needs some."""
    from poem._util.files import read_text
    from poem.serve.access import LOOPBACK

    if args.token_file is not None:
        found = read_text(args.token_file).split()
        if not found:
            raise ValueError(f"expected a token per line in {args.token_file}, got none")
    else:
        found = os.environ.get("POEM_TOKEN", "").split()
    short = [each for each in found if len(each) < 16]
    if short:
        raise ValueError(f"expected tokens of at least 16 characters, got one of {len(short[0])}")
    if not found and not args.open and args.host not in LOOPBACK:
        raise ValueError(
            f"expected --token-file with --host {args.host}, which others can reach, got none; --open lets anybody call"
        )
    return found


def _settings(args: argparse.Namespace) -> ServeSettings:
    """The settings of the options; each error names its option."""
    from poem.serve.settings import ServeSettings

    checks.check_range(args, 1, None, "batch_size", "queue", "snapshot_every", "max_streams", "live", "max_body",
                       "max_queued", "replicas", "source_images")  # fmt: skip
    checks.check_range(args, 2, 4096, "stack_images")
    checks.check_range(args, 0, 65535, "port")
    checks.check_range(args, 1, 1024, "threads")
    checks.check_finite(args, "wait_ms", "deadline_ms", "idle_s", "lr", "budget", "max_megapixels", "drain_s",
                        "header_s", "body_s")  # fmt: skip
    checks.check_std(args.std)
    if args.address is not None and args.engine != "ray":
        raise ValueError("expected --engine ray with --address")
    if args.budget is not None and (args.no_guard or args.method == "source"):
        raise ValueError("expected a guard with --budget; leave out --no-guard, and name a method that adapts")
    return ServeSettings(
        batch_size=args.batch_size, wait_ms=args.wait_ms, queue=args.queue, deadline_ms=args.deadline_ms,
        snapshot_every=args.snapshot_every, max_streams=args.max_streams, live=args.live, idle_s=args.idle_s,
        stack=args.stack, stack_images=args.stack_images, max_body=args.max_body * MEBIBYTE,
        max_queued_bytes=args.max_queued * MEBIBYTE,
        max_pixels=max(1, int(args.max_megapixels * 1e6)), body_s=args.body_s,
    )  # fmt: skip


def _served(args: argparse.Namespace) -> Served:
    """Open the model."""
    from poem.cli.predict import open_model
    from poem.parts import FisherAnchor, Need
    from poem.recipes.methods import recipe
    from poem.serve.learner import Served

    # Before a model is loaded: an unknown method, or one that lacks its source images, is refused at once.
    chosen = recipe(args.method or "auto", args.preset or "imagenet")
    waiting = chosen.first_with(Need.SOURCE_DATA)
    if args.source_data is None and waiting is not None and not isinstance(waiting, FisherAnchor):
        raise ValueError(
            f"{args.method} needs source images; add --source-data FOLDER, with images like those of training"
        )
    model, found, _ = open_model(
        args.base, args.weights, device=args.device, mean=args.mean, std=args.std, resize=args.resize, crop=args.crop
    )
    guard: dict[str, Any] = {"budget": args.budget, "view": "none" if args.no_view else "shift"}
    adapted: dict[str, Any] = {"mean": found["mean"], "std": found["std"], "lr": args.lr, "preset": args.preset}
    if args.source_data is not None:
        from poem.serve.source_folder import source_images

        adapted["source_data"] = source_images(args.source_data, found["prepare"], args.source_images)
    return Served(
        model=model, method=args.method, guard=False if args.no_guard else guard, settings=adapted,
        prepare=found["prepare"], names=found["names"], base=args.base,
    )  # fmt: skip


def _listener(host: str, port: int) -> socket.socket:
    """A socket that listens, made before the model is loaded: an address in use is known at once."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(1024)
    except OSError as error:
        made.close()
        raise OSError(f"expected an address to listen on, got {host}:{port}: {error.strerror or error}") from error
    return made
