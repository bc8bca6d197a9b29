"""What a service survives: killed, a node of its cluster killed, a full disk, clients that send half and wait.

    python benchmarks/faults/serve_faults.py kill|ray-node|ray-hosts|full-disk|half-requests [--json FILE]

Each prints its figures, writes them to results/faults/serve_NAME.json, and returns 1 where a fact does not hold: no
stream loses more than it has learnt since its last snapshot, keys of before that are answered as recorded, and every
answer equals a replay of its stream's audit, which goes on from that snapshot.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kill_ray_node as nodes
import torch

from poem import zoo
from poem._util.state_file import load_state
from poem.guarded.audit import read_audit, tensor_hash
from poem.serve.client import Client, Prediction, ServiceError
from poem.serve.learner import Learner, Served
from poem.serve.replay import replay_answers
from poem.serve.store import Store, folder_name
from poem.streams.loading.prepare import Prepare

SIZE, EVERY = 4, 5
OPTIONS = ["--batch-size", str(SIZE), "--snapshot-every", str(EVERY), "--threads", "1", "--no-view"]


def pictures(count: int, seed: int) -> torch.Tensor:
    """Images (count, 3, 32, 32) from 0 to 1."""
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 8, 8, generator=rng).repeat_interleave(4, 2).repeat_interleave(4, 3)


def served() -> Served:
    """What the processes serve."""
    model, base = zoo.load("digits-bn")
    settings = {"mean": base.mean, "std": base.std, "lr": None, "preset": None}
    prepare = Prepare(resize=base.resize, crop=base.crop)
    return Served(model=model, guard={"view": "none", "budget": None}, settings=settings, prepare=prepare)


@contextmanager
def service(
    folder: Path, *options: str, env: dict[str, str] | None = None, before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process on a free port; killed at the end if it still runs."""
    command = [sys.executable, "-m", "poem", "serve", "digits-bn", "--port", "0", "--state", str(folder)]
    running = subprocess.Popen(
        [*before, *command, *OPTIONS, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**(env or os.environ), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert running.stdout is not None
    seen = ""
    try:
        while not (found := re.search(r"http://[\d.]+:\d+", seen)):
            line = running.stdout.readline()
            if not line:
                raise SystemExit(f"the service ended: {seen}")
            seen += line
        threading.Thread(target=running.stdout.read, daemon=True).start()
        yield running, found[0]
    finally:
        if running.poll() is None:
            running.kill()
        running.wait(30)


@dataclass
class Load:
    """Streams that send one request after the other; what was sent and answered."""

    streams: int
    requests: int
    images: dict[str, torch.Tensor] = field(default_factory=dict)
    """By their hash."""
    replies: list[Prediction] = field(default_factory=list)
    keys: dict[str, Prediction] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, url: Callable[[], str], first: int = 0, retries: int = 60) -> list[threading.Thread]:
        """One thread per stream; a request that is not answered is sent again with its key."""
        threads = [
            threading.Thread(target=self._feed, args=(url, at, first, retries), daemon=True)
            for at in range(self.streams)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _feed(self, url: Callable[[], str], at: int, first: int, retries: int) -> None:
        for number in range(first, first + self.requests):
            images = pictures(1 + number % SIZE, 1000 * at + number)
            key = f"{at} {number}"
            with self.lock:
                self.images[tensor_hash(images)] = images
            for attempt in range(retries):
                try:
                    reply = Client(url(), retries=0).predict(f"s{at}", images, key=key)
                except ServiceError as error:
                    if error.status not in (0, 429, 503) or attempt == retries - 1:
                        self.errors.append(str(error))
                        return
                    time.sleep(0.25)
                else:
                    with self.lock:
                        self.replies.append(reply)
                        self.keys[key] = reply
                    break

    def replayed(self, folder: Path) -> dict[str, Any]:
        """Answers by request id, of every audit in a folder."""
        found: dict[str, Any] = {}
        for audit in sorted(folder.glob("streams/*/*.jsonl")):
            lines = read_audit(audit)[1]
            batches = {line["batch"]: line["images"] for line in lines if line["kind"] == "batch"}
            known = {
                line["requests"][0]["request"]: self.images[batches[line["batch"]]]
                for line in lines if line["kind"] == "requests" and batches[line["batch"]] in self.images
            }  # fmt: skip
            for line in lines:  # a batch number that was computed twice: its own images
                if line["kind"] == "batch":
                    last = line["images"]
                elif line["kind"] == "requests":
                    known[line["requests"][0]["request"]] = self.images[last]
            found |= replay_answers(audit, served(), SIZE, known)
        return found


def kill(folder: Path) -> dict[str, Any]:
    """Kill -9 in the middle of a load, restart, go on."""
    load, url = Load(streams=8, requests=30), ""
    with service(folder) as (running, address):
        url = address
        threads = load.start(lambda: url, retries=1)
        while len(load.replies) < 100 and any(each.is_alive() for each in threads):
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
        running.wait(30)
        for thread in threads:
            thread.join(60)
    cut, load.errors = len(load.errors), []
    first = list(load.replies)
    store = Store(folder, served().facts(SIZE))
    kept = {name: load_of(store, name) for name in store.known()}
    store.close()
    lost = {
        name: max(each.batch for each in first if each.stream == name) + 1 - batches for name, batches in kept.items()
    }
    with service(folder) as (running, address):
        client = Client(address, retries=0)
        statuses = {each["stream"]: each["batches"] for each in client.streams()}
        repeated, same = 0, 0
        for key, reply in list(load.keys.items()):
            if reply.batch < kept[reply.stream]:
                at, number = (int(each) for each in key.split())
                again = client.predict(reply.stream, pictures(1 + number % SIZE, 1000 * at + number), key=key)
                repeated, same = repeated + 1, same + (again.replayed and again.answers == reply.answers)
        for thread in load.start(lambda: address, first=100):
            thread.join(120)
        running.send_signal(signal.SIGTERM)
        stopped = running.wait(60)
    again = load.replayed(folder)
    checked = [each for each in load.replies if each.request in again]
    undone = len(load.replies) - len(checked)
    facts = {
        "no_more_than_the_last_snapshot_is_lost": max(lost.values()) <= EVERY and undone <= 8 * EVERY,
        "states_go_on_from_their_snapshots": statuses == kept,
        "keys_before_the_snapshot_are_answered_as_recorded": repeated == same > 0,
        "answers_equal_a_replay_from_the_snapshot": all(again[each.request] == each.answers for each in checked),
        "every_answer_after_the_restart_is_in_it": len(load.replies) - len(first) == 8 * 30
        and all(each.request in again for each in load.replies[len(first) :]),
        "no_errors_after_the_restart": not load.errors and stopped == 0,
    }  # fmt: skip
    return {
        "answered_before_the_kill": len(first), "cut_off": cut, "most_batches_lost_of_a_stream": max(lost.values()),
        "answers_undone": undone, "keys_repeated": repeated, "answers_checked": len(checked), "facts": facts,
    }  # fmt: skip


def load_of(store: Store, name: str) -> int:
    """Batches that a stream's snapshot has."""
    return int(store.load(name)[0]["guard"]["batches"])


def ray_hosts(folder: Path) -> dict[str, Any]:
    """Nodes on two hosts, of which one loses its cable: its replica lives on, and may not write what others took over.

    The hosts are network namespaces of this machine, each with an address of its own, joined by a bridge; they share a
    folder, as machines share one by NFS. Needs root and iproute2.
    """
    streams, requests = 6, 40
    load, home, state = Load(streams, requests), folder / "ray", folder / "state"
    (home / "driver").mkdir(parents=True)
    env = nodes.environment(home / "driver") | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    address, started = f"{HOSTS[0]}:6380", list[subprocess.Popen[bytes]]()
    with hosts() as inside:
        try:
            first = "--head", "--port=6380", "--include-dashboard=false", f"--temp-dir={home / 't'}"
            started.append(nodes.node(home / "a", *first, ip=HOSTS[0], before=inside(0)))
            time.sleep(10)
            started.append(nodes.node(home / "b", f"--address={address}", ip=HOSTS[1], before=inside(1)))
            time.sleep(8)
            command = ["--engine", "ray", "--address", address, "--replicas", "2", "--host", HOSTS[0], "--open"]
            with service(state, *command, env=env, before=inside(0)) as (running, url):
                threads = load.start(lambda: url)
                wait_for(load, streams * requests // 3, threads)
                owners, at, cut_s = writers(state), len(load.replies), time.monotonic()
                run("ip", "link", "set", LINKS[1], "down")
                while len({each.stream for each in load.replies[at:]}) < streams and any(
                    each.is_alive() for each in threads
                ):
                    time.sleep(0.05)
                paused, alive = time.monotonic() - cut_s, started[1].poll() is None
                for thread in threads:
                    thread.join(300)
                after = writers(state)
                run("ip", "link", "set", LINKS[1], "up")
                time.sleep(10)  # what the other host would still write
                running.send_signal(signal.SIGTERM)
                stopped = running.wait(120)
        finally:
            for each in reversed(started):
                if each.poll() is None:
                    nodes.kill(each)
    again, lost = load.replayed(state), lost_batches(state)
    facts = {
        "every_request_was_answered": len(load.replies) == streams * requests and not load.errors,
        "no_more_than_the_last_snapshot_is_lost": max(lost.values()) <= EVERY,
        "every_answer_equals_a_replay": all(again.get(each.request) == each.answers for each in load.replies),
        "streams_were_on_both_hosts": len(set(owners.values())) == 2,
        "the_host_without_a_cable_lived_on": alive,
        "its_streams_went_on_elsewhere": len(set(after.values())) == 1,
        "stopped_in_order": stopped == 0,
    }  # fmt: skip
    return {
        "ray": version("ray"), "hosts": len(HOSTS), "streams": streams, "answered_before_the_cut": at,
        "s_until_every_stream_was_answered_after_the_cut": round(paused, 1),
        "streams_moved": sum(after[name] != owner for name, owner in owners.items()),
        "most_batches_lost_of_a_stream": max(lost.values()), "answers_checked": len(load.replies),
        "errors": load.errors[:3], "facts": facts,
    }  # fmt: skip


HOSTS, LINKS, BRIDGE = ("10.77.0.1", "10.77.0.2"), ("poem-cable-0", "poem-cable-1"), "poem-bridge"
"""Addresses that nothing outside the namespaces can reach, and the bridge's ends of their cables."""


def run(*words: str) -> None:
    """A command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def hosts() -> Iterator[Callable[[int], list[str]]]:
    """Two network namespaces on a bridge; the words that run a command inside one of them. This process is in neither.

    The bridge has an address too, so that this process reaches them.
    """
    names = [f"poem-host-{at}" for at in range(len(HOSTS))]
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    try:
        run("ip", "addr", "add", "10.77.0.254/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for name, link, ip in zip(names, LINKS, HOSTS, strict=True):
            run("ip", "netns", "add", name)
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", link, "master", BRIDGE, "up")
            run("ip", "-n", name, "addr", "add", f"{ip}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield lambda at: ["ip", "netns", "exec", names[at]]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        for link in (*LINKS, BRIDGE):
            subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)


def ray_node(folder: Path) -> dict[str, Any]:
    """Kill one of two nodes in the middle of a load; later another one joins, and the ring moves again."""
    streams, requests = 12, 40
    load, home = Load(streams, requests), folder / "ray"
    home.mkdir()
    env = nodes.environment(home / "driver") | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    (home / "driver").mkdir()
    port = nodes.free_port()
    address = f"{nodes.LOOPBACK}:{port}"
    head = nodes.node(home / "a", "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={home / 't'}")
    others: list[subprocess.Popen[bytes]] = []
    try:
        time.sleep(8)
        others.append(nodes.node(home / "b", f"--address={address}"))
        time.sleep(5)
        state = folder / "state"
        with service(state, "--engine", "ray", "--address", address, "--replicas", "2", env=env) as (running, url):
            client = Client(url)
            began = time.monotonic()
            threads = load.start(lambda: url)
            wait_for(load, streams * requests // 3, threads)
            owners = writers(state)
            killed, at = nodes.kill(others[0]), len(load.replies)
            killed_s = time.monotonic()
            while len({each.stream for each in load.replies[at:]}) < streams and any(
                each.is_alive() for each in threads
            ):
                time.sleep(0.02)
            paused = time.monotonic() - killed_s
            after = writers(state)
            wait_for(load, 2 * streams * requests // 3, threads)
            others.append(nodes.node(home / "c", f"--address={address}"))
            for thread in threads:
                thread.join(300)
            seconds = time.monotonic() - began
            with_third = Load(streams, 25)
            until = time.monotonic() + 60
            while len(writers_alive(client)) < 2 and time.monotonic() < until:
                time.sleep(0.5)
            for thread in with_third.start(lambda: url, first=500):
                thread.join(300)
            last = writers(state)
            replicas = len(writers_alive(client))
            key, first = next(iter(load.keys.items()))
            number, seed = (int(each) for each in key.split())
            repeated = client.predict(first.stream, pictures(1 + seed % SIZE, 1000 * number + seed), key=key)
            running.send_signal(signal.SIGTERM)
            stopped = running.wait(120)
    finally:
        for each in (*others, head):
            if each.poll() is None:
                nodes.kill(each)
    load.images |= with_third.images
    replies = load.replies + with_third.replies
    again = load.replayed(state)
    lost = lost_batches(state)
    facts = {
        "every_request_was_answered": len(replies) == streams * (requests + 25) and not load.errors + with_third.errors,
        "no_more_than_the_last_snapshot_is_lost": max(lost.values()) <= EVERY,
        "every_answer_equals_a_replay": all(again.get(each.request) == each.answers for each in replies),
        "streams_were_on_both_nodes": len(set(owners.values())) == 2,
        "all_streams_went_on_on_the_node_that_lives": len(set(after.values()) & set(owners.values())) == 1,
        "the_ring_moved_again_with_a_new_node": replicas == 2 and len(set(last.values())) == 2,
        "a_key_is_answered_as_recorded": repeated.replayed and repeated.answers == first.answers,
        "stopped_in_order": stopped == 0,
    }  # fmt: skip
    return {
        "ray": version("ray"), "streams": streams, "replicas": 2, "processes_killed": len(killed),
        "answered_before_the_kill": at, "s_until_every_stream_was_answered_after_the_kill": round(paused, 1),
        "streams_moved_by_the_kill": sum(after[name] != owner for name, owner in owners.items()),
        "streams_moved_by_the_new_node": sum(last[name] != owner for name, owner in after.items()),
        "most_batches_lost_of_a_stream": max(lost.values()), "answers_checked": len(replies),
        "seconds": round(seconds, 1), "facts": facts,
    }  # fmt: skip


def wait_for(load: Load, count: int, threads: list[threading.Thread]) -> None:
    """Until so many requests are answered."""
    until = time.monotonic() + 240
    while len(load.replies) < count and any(each.is_alive() for each in threads) and time.monotonic() < until:
        time.sleep(0.02)


def writers(state: Path) -> dict[str, str]:
    """Who writes each stream's folder."""
    found = {}
    for place in state.glob("streams/*"):
        claims = sorted(place.glob("owner-*"))
        if claims:
            found[place.name] = json.loads(claims[-1].read_text())["writer"]
    return found


def writers_alive(client: Client) -> list[int]:
    """As many entries as there are replicas."""
    try:
        return list(range(client.service()["replicas"]))
    except ServiceError:
        return []


def lost_batches(state: Path) -> dict[str, int]:
    """Batches that each audit has beyond the state with which its stream's next audit begins."""
    lost = {"": 0}
    for audit in state.glob("streams/*/*.jsonl"):
        follows = audit.with_name(f"{int(audit.stem) + 1:04d}.safetensors")
        numbers = [line["batch"] for line in read_audit(audit)[1] if line["kind"] == "batch"]
        if follows.exists() and numbers:
            lost[f"{audit.parent.name}/{audit.stem}"] = max(numbers) + 1 - int(load_state(follows)["guard"]["batches"])
    return lost


def full_disk(folder: Path) -> dict[str, Any]:
    """A file system of 4 MiB under the folder of states, full in the middle of a load, then with room again."""
    place = folder / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], check=True)
    try:
        return _full_disk(place / "state", place / "ballast")
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _full_disk(state: Path, ballast: Path) -> dict[str, Any]:
    learner = Learner(served(), SIZE)
    batches = [pictures(SIZE, seed) for seed in range(40)]
    with service(state) as (running, url):
        client = Client(url, retries=0)
        replies = [client.predict("door", batch, key=f"k{at}") for at, batch in enumerate(batches[:12])]
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                said = error.strerror
        full = [client.predict("door", batch, key=f"k{12 + at}") for at, batch in enumerate(batches[12:30])]
        status = client.status("door")
        try:
            client.predict("yard", batches[0])
            fresh = "answered"
        except ServiceError as error:
            fresh = f"{error.status} {error.code}"
        saved = saved_batches(state)
        ballast.unlink()
        more = [client.predict("door", batch, key=f"k{30 + at}") for at, batch in enumerate(batches[30:])]
        yard = client.predict("yard", batches[0])
        until = time.monotonic() + 20
        while client.status("door")["unsaved_batches"] >= EVERY and time.monotonic() < until:
            time.sleep(0.05)
        later, events = saved_batches(state), client.status("door")["events"]
        healthy = client.ready()
        running.send_signal(signal.SIGKILL)
        running.wait(30)
    with service(state) as (running, url):
        client = Client(url, retries=0)
        revived = client.status("door")["batches"]
        again = client.predict("door", batches[20], key="k20")
        after = [client.predict("door", pictures(SIZE, 100 + at)) for at in range(3)]
        running.send_signal(signal.SIGTERM)
        stopped = running.wait(60)
    expected = [learner.answer(batch) for batch in batches]
    found = [each.answers for each in (*replies, *full, *more)]
    every = [*zip((*replies, *full, *more), batches, strict=True)]
    every += [(reply, pictures(SIZE, 100 + at)) for at, reply in enumerate(after)]
    images = {reply.request: batch for reply, batch in every} | {yard.request: batches[0]}
    audits = list((state / "streams" / folder_name("door")).glob("*.jsonl"))
    replayed: dict[str, Any] = {}
    for audit in state.glob("streams/*/*.jsonl"):
        replayed |= replay_answers(audit, served(), SIZE, images)
    checked = [reply for reply, _ in every if reply.request in replayed]
    facts = {
        "the_disk_was_full": said == "No space left on device" and status["snapshot_failures"] > 0,
        "the_last_snapshot_is_whole": 12 - EVERY <= saved <= 12,
        "answers_equal_those_of_an_adapter": found == expected,
        "the_next_snapshot_after_there_is_room_has_everything": 40 - EVERY <= later <= 40,
        "a_kill_then_loses_that_little": revived == later,
        "keys_answered_while_it_was_full_are_answered_as_recorded": again.replayed and again.answers == full[8].answers,
        "answers_equal_a_replay": all(replayed[each.request] == each.answers for each in (*checked, yard)),
        "what_was_answered_with_room_is_in_it": all(each.request in replayed for each in (*replies, *after)),
        "another_audit_begins_after_the_one_that_was_lost": len(audits) == 2,
        "it_went_on": healthy and stopped == 0,
    }  # fmt: skip
    return {
        "file_system": "tmpfs of 4 MiB", "snapshot_failures": status["snapshot_failures"],
        "a_new_stream_meanwhile": fresh, "snapshot_while_full": saved, "snapshot_after": later,
        "answers_checked": len(checked) + 1, "answers_that_no_audit_has": len(every) - len(checked),
        "events": [each["kind"] for each in events], "facts": facts,
    }  # fmt: skip


def saved_batches(state: Path) -> int:
    """Batches of the stream `door` in its snapshot."""
    found = [load_state(path) for path in state.glob("streams/*/state*.safetensors")]
    return max((int(each["guard"]["batches"]) for each in found if each["serve"]["id"] == "door"), default=-1)


def half_requests(folder: Path) -> dict[str, Any]:
    """Clients that send half their headers, or half a body, and wait, while others go on."""
    load = Load(streams=4, requests=15)
    with service(folder, "--header-s", "2", "--body-s", "3") as (running, url):
        port = int(url.rpartition(":")[2])
        head = f"POST /v1/streams/door/predict HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: image/jpeg\r\n"
        kinds = {
            "half_headers": head[:50].encode(), "no_byte": b"",
            "half_body": (head + "Content-Length: 999\r\n\r\n").encode() + b"\xff\xd8\xff",
            "half_chunk": (head + "Transfer-Encoding: chunked\r\n\r\n5\r\nab").encode(),
        }  # fmt: skip
        threads = load.start(lambda: url)
        opened = {name: [connected(port, data) for _ in range(50)] for name, data in kinds.items()}
        drip = connected(port, head[:40].encode())
        dripping = threading.Thread(target=drop, args=(drip,), daemon=True)
        dripping.start()
        found, seconds = {}, {}
        for name, connections in opened.items():
            found[name], seconds[name] = zip(*(answer_of(*each) for each in connections), strict=True)
        said, took = answer_of(*drip)
        for thread in threads:
            thread.join(120)
        client = Client(url)
        streams = {each["stream"] for each in client.streams()}
        running.send_signal(signal.SIGTERM)
        stopped = running.wait(60)
    again = load.replayed(folder)
    facts = {
        "each_is_408_and_closed": all(set(each) == {408} for each in found.values()) and said == 408,
        "in_time": max(max(each) for each in seconds.values()) < 8 and took < 5,
        "no_stream_was_made_of_it": streams == {f"s{at}" for at in range(4)},
        "others_were_answered": len(load.replies) == 60 and not load.errors,
        "their_answers_equal_a_replay": all(again.get(each.request) == each.answers for each in load.replies),
        "stopped_in_order": stopped == 0,
    }  # fmt: skip
    return {
        "connections": sum(map(len, opened.values())) + 1,
        "longest_s": {name: round(max(each), 1) for name, each in seconds.items()} | {"byte_by_byte": round(took, 1)},
        "facts": facts,
    }  # fmt: skip


def connected(port: int, data: bytes) -> tuple[socket.socket, float]:
    """A connection that has sent something, and when."""
    made = socket.create_connection(("127.0.0.1", port))
    if data:
        made.sendall(data)
    return made, time.monotonic()


def drop(connection: tuple[socket.socket, float]) -> None:
    """Send a byte every half second."""
    try:
        for _ in range(60):
            connection[0].sendall(b"x")
            time.sleep(0.5)
    except OSError:
        return


def answer_of(made: socket.socket, began: float) -> tuple[int, float]:
    """The status of the answer, 0 without one, and the seconds until the connection was closed."""
    made.settimeout(30)
    content = b""
    try:
        while part := made.recv(4096):
            content += part
    except OSError:
        pass
    made.close()
    problem = b"application/problem+json" in content
    return int(content.split()[1]) if content.startswith(b"HTTP/1.1 ") and problem else 0, time.monotonic() - began


FAULTS = {
    "kill": kill,
    "ray-node": ray_node,
    "ray-hosts": ray_hosts,
    "full-disk": full_disk,
    "half-requests": half_requests,
}


def main() -> int:
    """One fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serve-", dir="/tmp") as folder:
        figures = FAULTS[args.fault](Path(folder))
    whole = {"command": f"python benchmarks/faults/serve_faults.py {args.fault}", **figures}
    print(json.dumps(whole, indent=1))
    path = args.json or Path(f"results/faults/serve_{args.fault.replace('-', '_')}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if all(figures["facts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
