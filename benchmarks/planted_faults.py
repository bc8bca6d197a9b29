"""Plant one fault at a time in a copy of the library, and see which test of behaviour notices.

    python benchmarks/planted_faults.py            # all of them
    python benchmarks/planted_faults.py 3 7        # some

A fault in what a method computes is shown to the references and the contract alone, not to the unit tests: what neither
notices is a gap in them. A fault in what surrounds it (kept values, keys, orders, undo, means) names the tests that are
there for it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """What is wrong, and the text that makes it so."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = ("recipes/test_reference.py", "test_contract.py")


KEYS, LABELS, ORDERS = ("bench/test_keys.py",), ("test_labels.py",), ("streams/test_orders.py",)
FAULTS = [
    Fault(
        "strict inequality turned round",
        "parts/selection.py",
        ".detach() < fraction * math.log(outputs.classes)",
        ".detach() > fraction * math.log(outputs.classes)",
    ),
    Fault(
        "weights not detached",
        "engine/loop.py",
        'weights = recipe.weigh(outputs, mask, state.memory_of("weigh")).detach()',
        "weights = (0.4 * __import__('math').log(outputs.classes) - outputs.entropy).exp()"
        " if 'ByEntropy' in repr(recipe.weigh) else recipe.weigh(outputs, mask, state.memory_of('weigh'))",
    ),
    Fault(
        "mean over the batch instead of the selection",
        "parts/base.py",
        "self.mask.sum().clamp(min=max(1, least * size)))",
        "len(self.mask))",
    ),
    Fault(
        "branch gradient into the shallow group",
        "engine/loop.py",
        'gradients |= _gradients(loss, {"theta": theta, **trained, **({"rows": rows["theta"]} if rows else {})})',
        'own = _gradient(recipe.branch.teach(unweighted), theta, keep=True) if "branch" in gradients else 0\n'
        "        "
        'gradients |= _gradients(loss, {"theta": theta, **trained, **({"rows": rows["theta"]} if rows else {})})\n'
        '        gradients["theta"] = gradients["theta"] + own',
    ),
    Fault(
        "loss average kept over a reset",
        "engine/state.py",
        "for mine, fresh in ((self.moving, source), (self.teacher, teacher), (self.memory, memory)):",
        "for mine, fresh in ((self.moving, source), (self.teacher, teacher)):",
    ),
    Fault(
        "SAM not restored",
        "engine/loop.py",
        "moved = state.constrained(key, state.moving[key] + change)",
        'start = update.outputs.theta if key == "theta" else state.moving[key]\n'
        "            moved = state.constrained(key, start.detach() + change)",
    ),
    Fault(
        "PLPD with one permutation for the whole batch",
        "parts/destruction.py",
        "torch.rand(count, grid * grid, generator=rng).argsort(dim=1)",
        "torch.rand(count, grid * grid, generator=rng).argsort(dim=1)[:1].expand(count, -1)",
    ),
    Fault(
        "Fisher of per-sample squares",
        "parts/objective.py",
        "(gradient,) = torch.autograd.grad(loss, outputs.theta)",
        "gradient = sum(torch.autograd.grad(each, outputs.theta, retain_graph=True)[0].square()"
        " for each in outputs.log_probs.gather(1, label)[:, 0]).div(len(label)).sqrt()",
    ),
    Fault(
        "stop on the set's size instead of the set",
        "engine/loop.py",
        "flags.append((now != progress.selections[-2]).any())",
        "flags.append(now.sum() != progress.selections[-2].sum())",
    ),
    Fault(
        "answer before the update instead of after",
        "engine/loop.py",
        "answer = progress.plain or passes.get(which, progress.first)",
        "answer = progress.first",
    ),
    Fault(
        "top layers adapted",
        "parts/parameters.py",
        'left_out = set(anatomy.top) if self.top == "excluded" else set()',
        "left_out: set[str] = set()",
    ),
    Fault(
        "redundancy memory written during exploration",
        "engine/loop.py",
        "        self.costs.rounds += 1\n",
        "        self.costs.rounds += 1\n"
        "        seen = Outcome(outputs, outputs, [update], [mask], None, outputs)\n"
        "        for place, part in self.recipe.places:\n"
        "            if place.startswith('select') and type(part).remember is not Part.remember:\n"
        "                new = part.remember(seen, inside(state.memory, place))\n"
        "                update_where(state.memory, {f'{place}.{k}': v for k, v in new.items()}, update.applied)\n",
    ),
    # What surrounds a method
    Fault(
        "importance of one head taken for another",
        "engine/source_data.py",
        "        logits=network.given_logits,\n",
        "        logits=None,\n",
        KEYS,
    ),
    Fault(
        "importance kept though settings differ",
        "engine/source_data.py",
        "        settings=network.settings,\n",
        "        settings=None,\n",
        KEYS,
    ),
    Fault(
        "importance kept though the images differ",
        "engine/source_data.py",
        "            self._hash.update(came, *([] if given is None else given.tensors[1:]))\n",
        "",
        KEYS,
    ),
    Fault(
        "importance kept though the code differs",
        "engine/source_data.py",
        "                self._hash.update(*answers)\n",
        "                pass\n",
        KEYS,
    ),
    Fault(
        "kept importance handed out itself",
        "engine/source_data.py",
        "name: tensor.clone() for name",
        "name: tensor for name",
        KEYS,
    ),
    Fault(
        "corrupted images kept across seeds",
        "bench/load_cell.py",
        "n=len(clean), seed=cell.seed, threads=cell.threads",
        "n=len(clean), seed=None, threads=cell.threads",
        KEYS,
    ),
    Fault(
        "source images kept across batch sizes",
        "bench/load_cell.py",
        "images=cell.source_images, batch_size=cell.batch_size",
        "images=cell.source_images, batch_size=None",
        KEYS,
    ),
    Fault(
        "replaced weights not loaded",
        "bench/load_cell.py",
        "weights=weights, file=state, seed",
        "weights=weights, file=None, seed",
        KEYS,
    ),
    Fault(
        "a fingerprint without shapes",
        "_util/caching.py",
        'self._digest.update(f"{plain.dtype} {tuple(plain.shape)};".encode())',
        "pass",
        KEYS,
    ),
    Fault(
        "what was used last is let go first",
        "_util/caching.py",
        "self._values.popitem(last=False)",
        "self._values.popitem(last=True)",
        KEYS,
    ),
    Fault(
        "ties between learning rates to the first that comes",
        "bench/analysis/choose_lr.py",
        "key=lambda rate: (-means[rate], rate)",
        "key=lambda rate: -means[rate]",
        ("bench/test_claims.py",),
    ),
    Fault(
        "labels steer the adapter",
        "bench/run_stream.py",
        "labels = label_indices(labels, _count(images, labels))\n",
        "labels = label_indices(labels, _count(images, labels))\n"
        "                    images = images * (1 - 1e-3 * float(labels.reshape(-1)[0]))\n",
        LABELS,
    ),
    Fault(
        "labels steer a corruption",
        "streams/loading/load_batch.py",
        "names = [ids[row] for row in rows.tolist()]",
        "names = [int(self.sources[number].labels[ids[row]]) for row in rows.tolist()]",
        LABELS,
    ),
    Fault(
        "methods compared on other batches",
        "bench/run_stream.py",
        "            self._compare(name, seen[-1], len(seen))\n",
        "",
        ("bench/test_benchmark.py",),
    ),
    Fault(
        "a row's learning rate loses to the scale's",
        "bench/cell.py",
        "        stated = _with_one_rate(block)\n",
        "        stated = block\n",
        ("bench/test_suites.py",),
    ),
    Fault(
        "every visit of a domain in the same order",
        "streams/orders/scenarios.py",
        "rng = generator(self.seed, self.name, key, visited[key])",
        "rng = generator(self.seed, self.name, key, 0)",
        ORDERS,
    ),
    Fault(
        "a reset before every batch of a domain",
        "streams/orders/scenarios.py",
        "self.reset and at == 0, self.which[here]",
        "self.reset, self.which[here]",
        ORDERS,
    ),
    Fault(
        "a reset lost with a batch that cannot be read",
        "streams/loading/batches.py",
        "            reset = reset or piece.reset\n",
        "            reset = piece.reset\n",
        ("streams/test_stream.py",),
    ),
    Fault(
        "totals lost at a reset",
        "bench/run_stream.py",
        "                    self._add_totals()\n                    self.adapter.reset()\n",
        "                    self.adapter.reset()\n",
        ("bench/test_benchmark.py",),
    ),
    Fault(
        "threads not put back",
        "bench/measure.py",
        "        torch.set_num_threads(before)\n",
        "        pass\n",
        ("bench/test_measure.py",),
    ),
    Fault(
        "a mixed batch scored by the first of its domains",
        "bench/collect.py",
        "rows = slice(None) if len(segments[0].shifts) == 1 else which == at",
        "rows = slice(None) if len(segments[0].shifts) == 1 else (which >= at) & (at == 0)",
        ("bench/test_measure.py",),
    ),
    Fault(
        "batches of two domains counted as one",
        "bench/collect.py",
        "return shifts[0] == shifts[1] and (one.entry",
        "return (one.entry",
        ("bench/test_measure.py",),
    ),
    Fault(
        "a seed that lacks a cell counts",
        "bench/analysis/aggregate.py",
        "for seed, each in found.items() if len(each) == len(by_seed[seed])}",
        "for seed, each in found.items() if each}",
        ("bench/test_aggregate.py",),
    ),
    Fault(
        "deviation of a population instead of a sample",
        "bench/analysis/aggregate.py",
        "statistics.stdev(found)",
        "statistics.pstdev(found)",
        ("bench/test_aggregate.py",),
    ),
    Fault(
        "groups pooled without their sizes",
        "bench/analysis/aggregate.py",
        'sum(share[key] * share["n"] for share in there) / sum(share["n"] for share in there)',
        "sum(share[key] for share in there) / len(there)",
        ("report/test_pages.py",),
    ),
    Fault(
        "a key that does not know the weights",
        "bench/cell.py",
        'f"{cell_key}-{weights[:WEIGHTS_DIGITS]}"',
        'f"{cell_key}-{0:08d}"',
        KEYS,
    ),
    Fault(
        "a key that does not know the recipe",
        "bench/cell.py",
        '{**cell.to_dict(), "recipe": dict(recipe)}',
        "cell.to_dict()",
        ("bench/test_measure.py",),
    ),
    Fault(
        "one base taken for another",
        "bench/load_cell.py",
        "key = cache_key(base=base, weights=weights,",
        "key = cache_key(base=None, weights=weights,",
        KEYS,
    ),
    Fault(
        "importance kept though running statistics differ",
        "engine/source_data.py",
        "fingerprint(*model.parameters(), *model.buffers())",
        "fingerprint(*model.parameters())",
        KEYS,
    ),
    Fault(
        "forgotten, but for the source images",
        "bench/load_cell.py",
        "= (_MODELS, _OPENED, _SOURCES, _CORRUPTED)",
        "= (_MODELS, _OPENED, _CORRUPTED)",
        KEYS,
    ),
    Fault(
        "the first source images instead of drawn ones",
        "bench/load_cell.py",
        'order = generator(0, "source images", "clean").permutation(len(data))[: cell.source_images]',
        "order = range(min(cell.source_images, len(data)))",
        KEYS,
    ),
    Fault(
        "more source images than stated",
        "engine/source_data.py",
        "            left -= len(images)\n",
        "            left -= 1\n",
        ("engine/test_source_data.py",),
    ),
    Fault(
        "labels choose the images of a limit",
        "bench/load_cell.py",
        'generator(n, "limit", str(n))',
        'generator(int(data.labels.sum()), "limit", str(n))',
        LABELS,
    ),
    Fault(
        "frozen ends with the innermost block",
        "adapter.py",
        "            _FROZEN.reset(token)\n",
        "            _FROZEN.set(())\n",
        ("test_adapter.py",),
    ),
    Fault(
        "a cached output outlives a write to its input",
        "accelerate/prefix_cache.py",
        "        return self._written == _versions([self.output, *self._inputs])\n",
        "        return True\n",
        ("accelerate/test_prefix_cache.py",),
    ),
    Fault(
        "outputs cached by the layer alone",
        "accelerate/prefix_cache.py",
        "        if all(one.data_ptr() == other.data_ptr() for one, other in pairs):\n",
        "        if pairs:\n",
        ("accelerate/test_prefix_cache.py",),
    ),
    Fault(
        "the twin keeps the weights that it was made with",
        "engine/twin.py",
        "        return not (same and self.translated.current) or memory_places(self._parameters()) != self._where\n",
        "        return not (same and self.translated.current)\n",
        ("engine/test_twin.py",),
    ),
    Fault(
        "the twin's layers run with the user's parameters",
        "engine/twin.py",
        "            return self._twins.get(value, value)\n",
        "            return value\n",
        ("engine/test_twin.py",),
    ),
    Fault(
        "a half patched twin is taken for whole",
        "engine/network.py",
        "            self._dirty = True  # until the block ends well: an interrupt may leave the twin half patched\n",
        "            self._dirty = False\n",
        ("engine/test_twin.py",),
    ),
    Fault(
        "the model is handed the caller's images",
        "engine/network.py",
        "            return x.clone() if x.data_ptr() == images.data_ptr() else x\n",
        "            return x\n",
        ("test_hostile.py",),
    ),
    Fault(
        "an interrupted call keeps what it had done",
        "adapter.py",
        "            self._state.restore(self._between.state)\n",
        "            pass\n",
        ("test_hostile.py",),
    ),
    Fault(
        "a state read in the middle of a batch",
        "adapter.py",
        "        with self._lock:\n            self._settle()\n            return self._state.as_dict(self.name)\n",
        "        return self._state.as_dict(self.name)\n",
        ("test_hostile.py",),
    ),
    Fault(
        "frozen for all threads",
        "adapter.py",
        "        token = _FROZEN.set((*_FROZEN.get(), id(self)))\n",
        "        token = _FROZEN.set(()); globals()['_FROZEN'] = ContextVar('f', default=(id(self),))\n",
        ("test_hostile.py",),
    ),
    Fault(
        "reset keeps what was tried on a batch",
        "engine/state.py",
        "        self._network.forget_checks()\n",
        "        pass\n",
        ("engine/test_state.py",),
    ),
    Fault(
        "entropies over batches that were missed",
        "bench/collect.py",
        "self._entropy / max(self._adapted_images, 1)",
        "self._entropy / max(self.n, 1)",
        ("bench/test_measure.py",),
    ),
    Fault(
        "an adapter's notes lost",
        "bench/collect.py",
        "            self.notes.update(dict.fromkeys(answered.entry.notes))\n",
        "",
        ("bench/test_measure.py",),
    ),
    Fault(
        "a batch idle where one image was",
        "engine/accounting.py",
        "self.none_selected = all(part.none_selected for part in parts)",
        "self.none_selected = any(part.none_selected for part in parts)",
        ("engine/test_accounting.py",),
    ),
    Fault(
        "the first loss instead of the last",
        "engine/accounting.py",
        "for part in reversed(parts) if part.loss_value",
        "for part in parts if part.loss_value",
        ("engine/test_accounting.py",),
    ),
    Fault(
        "a limit that lengthens",
        "bench/suites/expand.py",
        '"source_images": min(limit, stated.get("source_images", 2000))',
        '"source_images": limit',
        ("bench/test_suites.py",),
    ),
    Fault(
        "failures of an earlier pass counted again",
        "streams/stream.py",
        "        self.failures = []\n        labels = self._first_domain().labels",
        "        labels = self._first_domain().labels",
        ("streams/test_stream.py",),
    ),
    Fault(
        "a stream's own seed not used",
        "streams/stream.py",
        "        seed = self.order.seed if self.seed is None else self.seed\n        loader",
        "        seed = self.order.seed\n        loader",
        ("streams/test_stream.py",),
    ),
    Fault(
        "a share that a group lacks taken for zero",
        "bench/analysis/aggregate.py",
        "there = [share for share in held if key in share]",
        "there = [{key: 0.0, **share} for share in held]",
        ("bench/test_aggregate.py",),
    ),
    Fault(
        "a cell in two columns counted twice",
        "bench/analysis/aggregate.py",
        "keys = dict.fromkeys(self._keys[id(placed)] for placed in there)",
        "keys = [self._keys[id(placed)] for placed in there]",
        ("bench/test_aggregate.py",),
    ),
    Fault(
        "NaN counted as an answer",
        "bench/metrics.py",
        "return torch.where(finite(logits), logits.argmax(1), -1)",
        "return logits.argmax(1)",
        ("engine/test_nonfinite.py",),
    ),
    Fault(
        "two filters read one memory",
        "parts/selection.py",
        'kept & self.second(outputs, kept, inside(memory, "second"))',
        'kept & self.second(outputs, kept, inside(memory, "first") or inside(memory, "second"))',
        ("engine/test_own_parts.py",),
    ),
    Fault(
        "memory follows an update that was not applied",
        "parts/base.py",
        "result |= {key: torch.where(applied, value.detach(), held[key]) for key, value in new.items()}",
        "result |= {key: value.detach() for key, value in new.items()}",
        ("engine/test_own_parts.py",),
    ),
    Fault(
        "a reset forgets what was prepared on source data",
        "engine/state.py",
        "        self.rng.manual_seed(self._seed)\n",
        "        self.rng.manual_seed(self._seed)\n        self.prepared = {}\n",
        ("engine/test_own_parts.py", "recipes/test_reference.py", "test_contract.py"),
    ),
    Fault(
        "a part's tensors step at the recipe's rate",
        "engine/loop.py",
        "rate = self.lr * state.lr_factors.get(key, 1.0)",
        "rate = self.lr",
    ),
    Fault(
        "the backward rows of a further pass uncounted",
        "engine/loop.py",
        "self._count_backward(len(images) if rows is None else rows, len(images))",
        "pass",
        ("bench/test_estimate.py", "engine/test_accounting.py"),
    ),
    Fault(
        "costs of the last piece of a batch alone",
        "engine/accounting.py",
        "self.costs.add(part.costs)",
        "self.costs = part.costs",
        ("bench/test_estimate.py", "engine/test_accounting.py"),
    ),
    Fault(
        "random draws of a captured batch are not made again",
        "accelerate/capture.py",
        "                self._batch.redraw(*stage.draws)\n",
        "",
        ("accelerate/test_capture.py",),
    ),
    Fault(
        "a captured batch reads the state of the last one",
        "accelerate/capture.py",
        "            self._copy_state(now)\n",
        "",
        ("accelerate/test_capture.py",),
    ),
    Fault(
        "one logit left as one class",
        "engine/network.py",
        "return two_columns(logits)\n",
        "return logits\n",
        ("test_one_logit.py",),
    ),
    Fault(
        "one logit taken for class 0",
        "engine/network.py",
        "F.pad(logits, (1, 0))",
        "F.pad(logits, (0, 1))",
        ("test_one_logit.py",),
    ),
    Fault(
        "the source answers with the batch's statistics",
        "adapter.py",
        "network.heads(images, None, None, Source(), {}, doubled=False)",
        "network.heads(images, None, None, self.recipe.statistics, {}, doubled=False)",
        ("test_source.py",),
    ),
    Fault(
        "a check that learns",
        "paired_check.py",
        "    with adapter.frozen():\n",
        "    if True:\n",
        ("test_check.py",),
    ),
    Fault(
        "an interval without the exact test",
        "paired_check.py",
        "if sign_test(b, c) >= LEVEL else (low, high)",
        "if sign_test(b, c) > 1 else (low, high)",
        ("test_check.py",),
    ),
]


def caught(fault: Fault) -> str:
    """The first failing test, or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src" / "poem"
        shutil.copytree(ROOT / "src" / "poem", copy)
        shutil.copytree(ROOT / "tests", Path(folder) / "tests")
        shutil.copytree(ROOT / "benchmarks" / "suites", Path(folder) / "benchmarks" / "suites")
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = copy / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            raise SystemExit(f"{fault.name}: its text stands {text.count(fault.right)} times in {fault.file}")
        path.write_text(text.replace(fault.right, fault.wrong))
        tests = [f"tests/{name}" for name in fault.tests]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        return next((line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), "")


def main() -> int:
    """Plant, run, print a line each; the exit code counts what went unnoticed."""
    chosen = [int(word) for word in sys.argv[1:]] or range(1, len(FAULTS) + 1)
    missed = 0
    for number in chosen:
        fault = FAULTS[number - 1]
        found = caught(fault)
        missed += not found
        print(f"{number:2}  {fault.name:<48} {found or 'NOT NOTICED'}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
