"""Plant one fault at a time in a copy of the library, and see which test of behaviour notices.

    python benchmarks/planted_faults.py            # all of them
    python benchmarks/planted_faults.py 3 7        # some

Only the references and the contract are asked, not the unit tests: a fault that neither notices is a gap in them.
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


FAULTS = [
    Fault(
        "strict inequality turned round",
        "parts/selection.py",
        "look.entropy.detach() < fraction * math.log(look.classes)",
        "look.entropy.detach() > fraction * math.log(look.classes)",
    ),
    Fault(
        "weights not detached",
        "loop.py",
        "weights = recipe.weigh(look, mask, self.state.memory).detach()",
        "weights = (0.4 * __import__('math').log(look.classes) - look.entropy).exp()"
        " if 'ByEntropy' in repr(recipe.weigh) else recipe.weigh(look, mask, self.state.memory)",
    ),
    Fault(
        "mean over the batch instead of the selection",
        "parts/base.py",
        "self.mask.sum().clamp(min=1))",
        "len(self.mask))",
    ),
    Fault(
        "branch gradient into the shallow group",
        "loop.py",
        'gradients["branch"] = _gradient(branch.teach(equal), look.zeta)',
        'taught = branch.teach(equal); gradients["branch"] = _gradient(taught, look.zeta, keep=True); '
        'gradients["theta"] = gradients["theta"] + _gradient(taught, theta)',
    ),
    Fault(
        "loss average kept over a reset",
        "state.py",
        "for mine, fresh in ((self.moving, source), (self.teacher, teacher), (self.memory, memory)):",
        "for mine, fresh in ((self.moving, source), (self.teacher, teacher)):",
    ),
    Fault(
        "SAM not restored",
        "loop.py",
        "put(state.moving, {key: state.moving[key] + change}, taught.made)",
        'put(state.moving, {key: (taught.look.theta if key == "theta" else state.moving[key]) + change}, taught.made)',
    ),
    Fault(
        "PLPD with one permutation for the whole batch",
        "parts/selection.py",
        "torch.rand(count, grid * grid, generator=rng).argsort(dim=1)",
        "torch.rand(count, grid * grid, generator=rng).argsort(dim=1)[:1].expand(count, -1)",
    ),
    Fault(
        "Fisher of per-sample squares",
        "fisher.py",
        "total += gradient.square()",
        "total += sum(torch.autograd.grad(-network.heads(batch, theta, None, statistics, {})[0][0]"
        ".log_softmax(1).gather(1, label)[i, 0], theta)[0].square() for i in range(len(batch))) / len(batch)",
    ),
    Fault(
        "stop on the set's size instead of the set",
        "loop.py",
        "flags.append((sets[-1] != sets[-2]).any())",
        "flags.append(sets[-1].sum() != sets[-2].sum())",
    ),
    Fault(
        "answer before the update instead of after",
        "loop.py",
        "answer = plain or answers.get(which, first)",
        "answer = first",
    ),
    Fault(
        "top layers adapted",
        "parts/parameters.py",
        'left_out = set(anatomy.top) if self.top == "excluded" else set()',
        "left_out: set[str] = set()",
    ),
    Fault(
        "redundancy memory written during exploration",
        "loop.py",
        "self.entry.costs.rounds += 1",
        "self.entry.costs.rounds += 1\n"
        "        put(state.memory, self.recipe.select.remember(taught.look, taught.mask, state.memory), taught.made)",
    ),
]


def caught(fault: Fault) -> str:
    """The first failing test, or an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src" / "poem"
        shutil.copytree(ROOT / "src" / "poem", copy)
        shutil.copytree(ROOT / "tests", Path(folder) / "tests")
        shutil.copy(ROOT / "pyproject.toml", folder)
        path = copy / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            raise SystemExit(f"{fault.name}: its text stands {text.count(fault.right)} times in {fault.file}")
        path.write_text(text.replace(fault.right, fault.wrong))
        tests = ["tests/test_reference.py", "tests/test_contract.py"]
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
