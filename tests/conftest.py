"""Settings of the whole suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
import torch

# Tiny nets: threads cost more than they bring, and workers share two cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before it is first imported


@pytest.fixture(autouse=True, scope="session")
def _fast() -> Iterator[None]:
    """With POEM_TEST_FAST=1 every adapter records its loop; on a CPU with the tape that stands in for CUDA graphs."""
    if not os.environ.get("POEM_TEST_FAST"):
        yield
        return
    import tape

    import poem
    import poem.engine.loop

    poem.accelerate.selected_rows.BACKWARD_RATIO = (
        torch.inf
    )  # a recording keeps batches whole; the plain loop beside it does here
    plain, poem.adapt = poem.adapt, partial(poem.adapt, fast=True)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    else:
        with tape.installed():
            yield
    poem.adapt = plain


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The size of the contract, and how much of it this run checked."""
    kept = broken = 0
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        if report.nodeid.partition("test_contract.py::test_")[2][:2].isdigit():
            kept, broken = kept + report.passed, broken + report.failed
    if kept or broken:
        from test_contract import METHODS, NETS, POINTS

        size = f"{len(METHODS)} methods x {len(NETS)} nets x {POINTS} points = {len(METHODS) * len(NETS) * POINTS}"
        terminalreporter.write_line(f"contract: {size}; in this run {kept} kept, {broken} broken")
