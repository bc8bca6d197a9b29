"""Kernels that fail on a device, as on a GPU that Triton does not know, are tried once; torch's own run instead.

Without a GPU the kernels run in Triton's interpreter (see conftest.py).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from interpreted import triton_or_skip
from nets import make_net
from toys import stream

import poem
from poem.accelerate import batch_norm, blended, sample_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNKNOWN = "Internal Triton PTX codegen error"
"""The first line of what Triton raises at a kernel's first launch, where ptxas does not know the GPU."""


@dataclass
class Launches:
    """Kernels' launches that were asked for; each of them failed."""

    asked: int = 0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Every kernel fails as it is launched, with nothing tried before; counted."""
    triton_or_skip(monkeypatch)
    from triton.runtime.errors import PTXASError

    seen = Launches()

    def fail(*_: Any, **__: Any) -> NoReturn:
        seen.asked += 1
        raise PTXASError(
            f"{UNKNOWN}\n`ptxas` stderr:\nptxas fatal: Value 'sm_999' is not defined for option 'gpu-name'"
        )

    for module in (batch_norm, sample_norms, blended):
        monkeypatch.setattr(module, "DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(module.TRITON, "_works", {})
        monkeypatch.setattr(module.TRITON, "_why", {})
    assert batch_norm.kernels() is not None
    monkeypatch.setattr(type(batch_norm.kernels()._small), "run", fail)
    return seen


@pytest.mark.parametrize(
    ("module", "what", "kind", "method", "precision"),
    [
        (batch_norm, "batch norm", "bn", "tent", "bf16"),
        (batch_norm, "batch norm", "bn", "poem", "bf16"),
        (sample_norms, "group and layer norm", "gn", "tent", "bf16"),
        (sample_norms, "group and layer norm", "ln", "tent", "bf16"),
        (blended, "statistics of the stream", "bn", "auto", "fp32"),
        (blended, "statistics of the stream", "bn", "auto", "bf16"),
    ],
)
def test_on_a_gpu_that_triton_does_not_know_torchs_kernels_run_and_a_note_says_so(
    module: ModuleType,
    what: str,
    kind: str,
    method: str,
    precision: Any,
    launches: Launches,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = make_net(kind, sharpness=10.0).to(DEVICE).to(memory_format=torch.channels_last)
    one, other, without = (poem.adapt(net, method, precision=precision, fast=False) for _ in range(3))
    batches = [each.contiguous(memory_format=torch.channels_last) for each in stream(DEVICE, 3, size=4)]
    with caplog.at_level(logging.WARNING, logger="poem"):
        found = [(one(batch), one.last.notes) for batch in batches]
        assert launches.asked == 1, "tried once"
        other(batches[0])
    assert launches.asked == 1, "in the process, not for each adapter"
    assert [len(notes) for _, notes in found] == [1, 0, 0]
    assert what in found[0][1][0]
    assert UNKNOWN in found[0][1][0]
    assert other.last.notes == found[0][1], "each adapter notes it"
    assert len([record for record in caplog.records if UNKNOWN in record.getMessage()]) == 1
    with monkeypatch.context() as patch:
        for each in (batch_norm, sample_norms, blended):
            patch.setattr(each, "DEVICES", ())
        for batch, (answer, _) in zip(batches, found, strict=True):
            assert torch.equal(answer, without(batch))
            assert without.last.notes == []
    assert one.totals == without.totals


def test_kernels_that_a_network_has_no_layers_for_are_not_noted(launches: Launches) -> None:
    for kind in ("gn", "bn"):
        adapter = poem.adapt(make_net(kind, sharpness=10.0).to(DEVICE), "tent", precision="bf16", fast=False)
        adapter(stream(DEVICE, 1)[0])
        assert len(adapter.last.notes) == 1
    plain = poem.adapt(make_net("bn", sharpness=10.0).to(DEVICE), "tent", fast=False)
    plain(stream(DEVICE, 1)[0])
    assert plain.last.notes == [], "in full precision batch norm is torch's anyway"
