"""The engine on many machines: replicas on a Ray cluster, each stream on one of them, placed by its id.

Ray Serve's `ConsistentHashRouter` chooses the replica by the stream's id, its session; there are no fallback replicas,
since another would be another writer. Each replica is a `StreamEngine` of its own over a folder that all share. When a
node dies or the ring moves, the stream goes on elsewhere from its last snapshot, and whoever had it before can no
longer write (`poem.serve.leases`). The HTTP front runs where the command runs; several may use one application.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from poem._util.outside import search_path
from poem.serve.engine import SAVE_S, own_log
from poem.serve.learner import Served
from poem.serve.meter import Meter
from poem.serve.problems import Problem, internal
from poem.serve.ray_replica import Replica, described
from poem.serve.settings import ServeSettings, check_stream_id
from poem.streams.loading.prepare import Prepare

log = logging.getLogger("poem")
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
DEPLOYMENT = "Replica"
MOST_ONGOING, MOST_QUEUED = 4096, 4096
"""Requests of one replica, and of one front that wait for a replica; a stream's own queue is far shorter."""
ANSWER_S = 5.0
"""Seconds in which a replica that has ended says so."""
PATIENCE_S = 60.0
"""Seconds for which a request waits for a replica that starts or a stream that moves."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How many replicas there are, and what each gets of a node."""

    replicas: int = 2
    cpus: float = 1.0
    gpus: float = 0.0
    threads: int = 1
    """Of torch on a CPU."""
    address: str | None = None
    """Of the cluster, as `ray start --head` prints it, or "auto"; None to start one on this machine."""
    name: str = "poem"
    """Of the application on the cluster; a second front of that name uses the replicas that the first has started."""
    drain_s: float = 60.0
    """Seconds in which a replica that is stopped answers what waits and saves its streams."""


class RayEngine:
    """What the front calls, in place of a `StreamEngine`: each call goes to the stream's replica.

    Args:
        make: A function that opens the model; called in each replica.
        prepare: How image files become the model's input: the front reads them.
        settings: Sizes, limits and times.
        folder: For snapshots and audits; every node must reach it under this path.
        placement: Replicas and cluster.
        meter: Is told what happens in all replicas.

    Raises:
        ImportError: The extra `ray` is not installed.
        ConnectionError: There is no such cluster.
        ValueError: The replicas could not be started.
    """

    def __init__(
        self, make: Callable[[], Served], prepare: Prepare, settings: ServeSettings, folder: Path,
        placement: Placement, meter: Meter | None = None,
    ) -> None:  # fmt: skip
        self.prepare, self.settings, self.meter = prepare, settings, meter or Meter()
        self._closing, self._done, self._placement = False, False, placement
        self._until: float | None = None
        self._ray, self._serve = _modules()
        self._exceptions = import_module("ray.exceptions")
        self._started = _connect(self._ray, placement)
        self._deployed, self._handle = self._deploy(make, Path(folder).absolute(), placement)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="poem-ray", daemon=True).start()

    def submit(
        self, stream: str, images: Tensor, *, deadline_ms: float | None = None, key: str | None = None,
        payload: str = "", waited_s: float = 0.0,
    ) -> Future[dict[str, Any]]:  # fmt: skip
        """As `StreamEngine.submit`. A replica that dies meanwhile is 503 without a key; with one it is asked again."""
        check_stream_id(stream)
        self._check_open()
        again = key is not None
        return self._asked(stream, "submit", (images.numpy(), deadline_ms, key, payload, waited_s), again)

    def check_room(self, stream: str) -> None:
        """Nothing is known here of the replicas' queues; a service that ends raises."""
        self._check_open()

    def command(self, stream: str, command: str, value: Any = None) -> Future[Any]:
        """As `StreamEngine.command`."""
        check_stream_id(stream)
        self._check_open()
        return self._asked(stream, "command", (command, value), command == "export")

    def status(self, stream: str) -> dict[str, Any]:
        """As `StreamEngine.status`."""
        check_stream_id(stream)
        found: dict[str, Any] = self._asked(stream, "status", (), True).result()
        return found

    def streams(self) -> list[dict[str, Any]]:
        """The status of every stream: those of the replicas, then those that are on disk alone."""
        used = [each for found in self._all("overview") for each in found["streams"]]
        names = {each["stream"] for each in used}
        future = asyncio.run_coroutine_threadsafe(self._call("", "stored", ()), self._loop)
        return [*used, *(each for each in future.result(PATIENCE_S) if each["stream"] not in names)]

    def summary(self) -> dict[str, Any]:
        """What is known of the service, over all replicas."""
        found = [each["summary"] for each in self._all("overview")]
        if not found:
            raise Problem(503, "no-replica", "no replica answers; wait for one to start", retry_after=5)
        added = {name: sum(each[name] for each in found) for name in ("streams", "live", "waiting")}
        return {**found[0], **added, "engine": "ray", "replicas": len(found), "ready": self.ready}

    def refresh(self) -> None:
        """Tell the meter what the replicas' meters were told since the last time; streams are those of who answers."""
        gauges: dict[str, tuple[int, int, int]] = {}
        for replica, told in self._all("told"):
            for name, values in told:
                if name == "streams":
                    gauges[replica] = values
                else:
                    getattr(self.meter, name)(*values)
        self.meter.streams(*(sum(each[at] for each in gauges.values()) for at in range(3)))

    def replicas(self) -> list[dict[str, Any]]:
        """What each replica has: its process, its summary, its streams."""
        return self._all("overview")

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self._closing

    def close(self, timeout_s: float = 60.0) -> bool:
        """Let every replica answer what waits and save its streams, and end what was started here.

        Returns:
            Whether every replica said that it has done so; False where none answers. A second call says the same.
        """
        if not self._closing:
            self._closing = True
            self.drain(timeout_s)
            self._done = self._end()
        return self._done

    def drain(self, timeout_s: float) -> None:
        """As `StreamEngine.drain`: when replicas are to have answered; they are told so by `close`."""
        if self._until is None:
            self._until = time.monotonic() + timeout_s

    def _end(self) -> bool:
        """End what was started here; says whether every replica has saved its streams."""
        done = True
        if self._deployed:
            left = max(0.0, (self._until or 0.0) - time.monotonic())
            try:
                said = self._every("close", left + SAVE_S + ANSWER_S, left)
                done = bool(said) and all(each is True for each in said)
            finally:
                self._serve.delete(self._placement.name)
                if self._started:
                    self._serve.shutdown()
        if self._started:
            self._ray.shutdown()
        if not self._deployed:
            own_log.info("stopped: this front; the replicas go on")
        elif done:
            own_log.info("stopped: every replica has saved its streams")
        else:
            own_log.warning("stopped: not every replica said that its streams are saved")
        return done

    def _check_open(self) -> None:
        if self._closing:
            raise Problem(503, "draining", "the service is ending and takes no more requests", retry_after=5)

    def _asked(self, stream: str, method: str, values: tuple[Any, ...], again: bool) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(self._ask(stream, method, values, again), self._loop)

    async def _ask(self, stream: str, method: str, values: tuple[Any, ...], again: bool) -> Any:
        """What a stream's replica says; asked again where the stream moves, or where that may be done twice."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                said = await self._call(stream, method, (stream, *values))
            except Problem as problem:
                if not again or problem.code != "replica-lost" or time.monotonic() > until or self._closing:
                    raise
            else:
                if "value" in said:
                    return said["value"]
                refusal = Problem(**said["problem"])
                if refusal.code not in ("moved", "draining") or time.monotonic() > until or self._closing:
                    raise refusal  # "moved" and "draining" say that nothing was done
            await asyncio.sleep(0.1)

    async def _call(self, stream: str, method: str, values: tuple[Any, ...]) -> Any:
        """One call of the stream's replica; Ray's errors as problems."""
        handle = self._handle.options(session_id=stream) if stream else self._handle
        try:
            response = getattr(handle, method).remote(*values)
            return await asyncio.wait_for(response, PATIENCE_S + (self.settings.deadline_ms or 0) / 1000)
        except asyncio.TimeoutError as error:
            raise Problem(
                503, "no-replica", f"no replica answered within {PATIENCE_S:g} s; see `ray status`", retry_after=5
            ) from error
        except self._serve.exceptions.BackPressureError as error:
            raise Problem(
                429, "queue-full", "expected fewer requests waiting for replicas; send them more slowly", retry_after=1
            ) from error
        except self._exceptions.RayTaskError as error:
            log.error("a replica failed: %s", error)
            raise internal(learnt=True) from error
        except (self._exceptions.RayError, self._serve.exceptions.RayServeException) as error:
            raise Problem(
                503, "replica-lost",
                "the stream's replica ended before it answered; with an Idempotency-Key, send it again: it is answered "
                "as recorded where it was learnt from",
                retry_after=1,
            ) from error  # fmt: skip

    def _all(self, method: str, timeout_s: float = 10.0) -> list[Any]:
        """What every replica says that answers."""
        return [each for each in self._every(method, timeout_s) if not isinstance(each, BaseException)]

    def _every(self, method: str, timeout_s: float, *values: Any) -> list[Any]:
        """What every replica says, an error for one that does not answer; empty where nothing is known in time."""
        try:
            found = list(self._handle.broadcast(method, *values).results(timeout_s=timeout_s, return_exceptions=True))
        except (self._exceptions.RayError, self._serve.exceptions.RayServeException, TimeoutError) as error:
            log.warning("not every replica answers: %s", error)
            return []
        for each in found:
            if isinstance(each, BaseException):
                log.warning("a replica does not answer: %s", each)
        return found

    def _deploy(self, make: Callable[[], Served], folder: Path, placement: Placement) -> tuple[bool, Any]:
        """Start the replicas, or use those that another front has started; says which, and their handle."""
        cloudpickle = import_module("ray.cloudpickle")
        config = import_module("ray.serve.config")
        self._serve.start(proxy_location="Disabled")
        if placement.name in self._serve.status().applications:
            handle = self._serve.get_app_handle(placement.name)
            theirs = handle.overview.remote().result(timeout_s=PATIENCE_S)
            mine = {"folder": str(folder), "settings": repr(self.settings)}
            mine |= described(make())
            differ = [name for name, value in mine.items() if theirs.get(name) != value]
            if differ:
                raise ValueError(
                    f"expected an application {placement.name!r} of this folder, model and settings on the cluster, "
                    f"got one with another {', '.join(differ)}, in {theirs['folder']}; name another with --name, or "
                    "stop that one"
                )
            return False, handle
        deployment = self._serve.deployment(
            Replica, name=DEPLOYMENT, num_replicas=placement.replicas,
            ray_actor_options={"num_cpus": placement.cpus, "num_gpus": placement.gpus},
            max_ongoing_requests=MOST_ONGOING, max_queued_requests=MOST_QUEUED,
            backpressure_config=config.BackpressureConfig(status_code=429, retry_after_s=1),
            request_router_config=config.RequestRouterConfig(
                request_router_class=ROUTER, request_router_kwargs={"num_fallback_replicas": 0}
            ),
            health_check_period_s=2, health_check_timeout_s=30, graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=placement.drain_s + SAVE_S, max_constructor_retry_count=3,
            logging_config={"enable_access_log": False, "log_level": "WARNING"},
        )  # fmt: skip
        free, wanted = self._ray.available_resources().get("CPU", 0.0), placement.replicas * placement.cpus
        if free < wanted:
            log.warning(
                "%g replicas need %g CPUs and %g are free: waiting for more nodes", placement.replicas, wanted, free
            )
        bound = deployment.bind(
            cloudpickle.dumps(make), search_path(), self.settings, str(folder), placement.threads, placement.drain_s
        )
        try:
            handle = self._serve.run(bound, name=placement.name, route_prefix=None)
        except RuntimeError as error:
            said = self._serve.status().applications.get(placement.name)
            why = "" if said is None else "; ".join(each.message for each in said.deployments.values())
            self._serve.delete(self._placement.name)
            if self._started:
                self._serve.shutdown()
                self._ray.shutdown()
            raise ValueError(f"the replicas could not be started: {why or error}") from error
        return True, handle


def _modules() -> tuple[Any, Any]:
    """Ray and Ray Serve."""
    try:
        ray, serve = import_module("ray"), import_module("ray.serve")
        import_module("ray.serve.exceptions")
        import_module(ROUTER.rpartition(".")[0])
    except ImportError as error:
        raise ImportError(
            f"--engine ray needs Ray Serve 2.60 ({error}); type: pip install 'poem-tta[ray,serve]'"
        ) from error
    return ray, serve


def _connect(ray: Any, placement: Placement) -> bool:
    """Connect to the cluster, or start one on this machine; says whether this call did either."""
    if ray.is_initialized():
        return False
    for name, value in {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}.items():
        os.environ.setdefault(name, value)  # count where the cluster is started here
    settings: dict[str, Any] = {"address": placement.address, "log_to_driver": False, "logging_level": logging.ERROR}
    if placement.address is None:
        needed = max(os.cpu_count() or 1, int(placement.replicas * placement.cpus + 1))
        settings.update(address="local", num_cpus=needed, include_dashboard=False)
    with _signals_kept():
        try:
            ray.init(**settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConnectionError(f"no Ray cluster at {placement.address!r}: {first}; see `ray status`") from error
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return True


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM, which `ray.init` replaces."""
    import signal

    before: Mapping[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
