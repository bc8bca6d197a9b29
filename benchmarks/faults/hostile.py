"""Signals in mid-call, threads that use a model beside adapters, and a list of bad or odd inputs.

    python benchmarks/faults/hostile.py [signals threads inputs] [--signals 500] [--seconds 20] [--json FILE]
    python benchmarks/faults/hostile.py inputs --json before.json          # with an older tree on PYTHONPATH
    python benchmarks/faults/hostile.py inputs --before before.json --markdown FILE

After each signal the user's model must be as it came, and the adapter's state one that a batch left behind. Of eight
threads two use the model plainly, two run adapters of their own, two share one, one reads its state and one predicts
with it frozen: every plain answer must be the unadapted model's, every adapter's that of a lone run, every state read
one between two batches. Each input must give the right answer or one clear error; anything else is listed as silent,
or as a traceback. The exit code is 0 if nothing was changed, torn or silent.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hostile_inputs import INPUTS
from torch import Tensor, nn

import poem
from poem import zoo

METHODS = ("tent", "poem", "deyo+poem", "sar", "eta+poem", "cotta", "rdumb", "lame")
NETS = ("digits-bn", "digits-gn", "digits-ln")


class Struck(Exception):
    """What the signal handler raises."""


def digits(count: int, seed: int) -> Tensor:
    """Random images of the digit networks' shape."""
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def adapted(model: nn.Module, base: Any, method: str) -> poem.Adapter:
    """An adapter that learns from nearly every batch."""
    loose = {"threshold": 2.0} if "poem" in method or method in ("sar", "rdumb") else {}
    return poem.adapt(model, method, mean=base.mean, std=base.std, lr=0.01, **loose)


def fingerprint(model: nn.Module) -> list[Any]:
    """All that a caller could see change: modules, flags, hooks, forwards, attributes, tensors."""
    found: list[Any] = []
    for module in model.modules():
        found += [id(module), module.training, sorted(module.__dict__), id(module.__dict__.get("forward"))]
        found += [len(module._forward_pre_hooks), len(module._forward_hooks)]
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                found += [id(tensor), tensor.requires_grad, tensor.detach().numpy().tobytes()]
    return found


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Two states, to the bit."""
    same = one["tensors"].keys() == other["tensors"].keys() and torch.equal(one["rng"], other["rng"])
    return same and all(torch.equal(tensor, other["tensors"][key]) for key, tensor in one["tensors"].items())


def signals(count: int, seed: int = 0) -> dict[str, Any]:
    """Interrupt calls at random moments; count what they changed."""
    chance, struck, finished, changed, torn, flags = random.Random(seed), 0, 0, 0, 0, 0

    def strike(*_: Any) -> None:
        raise Struck

    before_handler = signal.signal(signal.SIGALRM, strike)
    pairs = [(method, net) for method in METHODS for net in NETS]
    each = math.ceil(count / len(pairs))
    try:
        for method, net in pairs:
            model, base = zoo.load(net)
            model.train()
            adapter, lone = adapted(model, base, method), adapted(copy.deepcopy(model), base, method)
            batch, whole, states = digits(4, 0), fingerprint(model), [lone.state_dict()]
            adapter(batch)
            began = time.perf_counter()
            adapter(batch)
            lasts, here = time.perf_counter() - began, 0
            while here < each:
                try:
                    signal.setitimer(signal.ITIMER_REAL, max(1e-4, chance.random() * 1.1 * lasts))
                    adapter(batch)
                    finished += 1
                except Struck:
                    here += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                changed += fingerprint(model) != whole
                flags += not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
                state = adapter.state_dict()
                while len(states) <= state["calls"]:
                    lone(batch)
                    states.append(lone.state_dict())
                torn += not equal(state, states[state["calls"]])
            struck += here
            print(f"{method} on {net}: {here} signals; so far {changed} models changed, {torn} states torn", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before_handler)
    return {
        "signals": struck, "calls_that_finished": finished, "changed_models": changed, "torn_states": torn,
        "changed_thread_switches": flags,
    }  # fmt: skip


def threads(seconds: float, net: str = "digits-bn", method: str = "poem") -> dict[str, Any]:
    """Eight threads on one model."""
    model, base = zoo.load(net)
    batches = [digits(4, seed) for seed in range(5)]
    with torch.no_grad():
        plain = model(batches[0])
    whole, done = fingerprint(model), threading.Event()
    count: Counter[str] = Counter()
    errors: list[str] = []
    own = [adapted(model, base, method) for _ in range(2)]
    shared = adapted(model, base, method)
    answers: list[list[Tensor]] = [[], []]
    read: list[dict[str, Any]] = []

    def use() -> None:
        with torch.no_grad():
            count["plain"] += 1
            count["plain_wrong"] += not torch.equal(model(batches[0]), plain)

    def alone(number: int) -> None:
        answers[number].append(own[number](batches[len(answers[number]) % len(batches)]))

    def together() -> None:
        shared(batches[0])

    def look() -> None:
        if len(read) < 2000:
            read.append(shared.state_dict())
        time.sleep(0.001)

    def still() -> None:
        with shared.frozen():
            shared(batches[1])

    def repeat(act: Callable[[], None]) -> None:
        try:
            while not done.is_set():
                act()
        except Exception as error:
            errors.append(repr(error))

    acts: list[Callable[[], None]] = [use, use, lambda: alone(0), lambda: alone(1), together, together, look, still]
    running = [threading.Thread(target=repeat, args=(act,)) for act in acts]
    for thread in running:
        thread.start()
    time.sleep(seconds)
    done.set()
    for thread in running:
        thread.join()
    wrong = 0
    for mine in answers:
        lone = adapted(copy.deepcopy(model), base, method)
        wrong += sum(not torch.equal(lone(batches[i % len(batches)]), answer) for i, answer in enumerate(mine))
    lone, states = adapted(copy.deepcopy(model), base, method), []
    for _ in range(max((state["calls"] for state in read), default=0) + 1):
        states.append(lone.state_dict())
        lone(batches[0])
    return {
        "plain_calls": count["plain"], "plain_wrong": count["plain_wrong"],
        "adapter_calls": sum(map(len, answers)) + shared.totals.batches, "adapter_wrong": wrong,
        "states_read": len(read), "boundaries_seen": len({state["calls"] for state in read}),
        "torn_states": sum(not equal(state, states[state["calls"]]) for state in read),
        "changed_models": int(fingerprint(model) != whole), "errors": errors,
    }  # fmt: skip


def inputs() -> dict[str, str]:
    """What came of each input."""
    return {name: each() for name, each in INPUTS.items()}


def markdown(before: dict[str, str] | None, after: dict[str, str]) -> str:
    """The list as a table."""
    lines = ["| input | before | after |", "|---|---|---|"]
    for name, outcome in after.items():
        cells = (name, (before or {}).get(name, "not tried"), outcome)
        lines.append("| " + " | ".join(each.replace("|", "\\|").replace("\n", " ") for each in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Read the command line, run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["signals", "threads", "inputs"])
    parser.add_argument("--signals", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"command": " ".join(sys.argv)}
    if "signals" in args.what:
        found["signals"] = signals(args.signals)
    if "threads" in args.what:
        found["threads"] = {net: threads(args.seconds / len(NETS), net) for net in NETS}
    if "inputs" in args.what:
        found["inputs"] = inputs()
        found["silent"] = [
            name for name, outcome in found["inputs"].items() if not outcome.startswith(("right", "error"))
        ]
    if args.markdown and "inputs" in found:
        before = json.loads(args.before.read_text())["inputs"] if args.before else None
        args.markdown.write_text(markdown(before, found["inputs"]))
    text = json.dumps(found, indent=1)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)
    told = [found.get("signals", {}), *found.get("threads", {}).values()]
    kinds = ("changed_models", "torn_states", "plain_wrong", "adapter_wrong", "changed_thread_switches")
    bad = sum(each.get(kind, 0) for each in told for kind in kinds) + sum(len(each.get("errors", [])) for each in told)
    return int(bool(bad or found.get("silent")))


if __name__ == "__main__":
    sys.exit(main())
