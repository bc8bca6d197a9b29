"""Where a faster way does not apply, the plain path runs with one note and the same answers."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch
from interpreted import triton_or_skip
from nets import make_net
from toys import images, stream

import poem
from poem.accelerate import batch_norm, blended, sample_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNKNOWN = "Internal Triton PTX codegen error"
"""The first line of what Triton raises at a kernel's first launch, where ptxas does not know the GPU."""


@pytest.mark.parametrize(("kind", "method"), [("bn", "auto"), ("gn", "poem"), ("bn", "tent")])
def test_a_float64_model_stays_float64_under_bf16_and_one_note_says_so(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_net(kind, sharpness=10.0).double()
    plain = poem.adapt(model, method, fast=False)
    with caplog.at_level(logging.WARNING, logger="poem"):
        adapter = poem.adapt(model, method, fast=False, precision="bf16")
        for seed in range(3):
            batch = images(8, seed=seed).double()
            # In another memory layout, so that sums are rounded otherwise; bf16 would be off by 1e-3.
            torch.testing.assert_close(adapter(batch), plain(batch), rtol=0, atol=1e-10)
    (note,) = [record.getMessage() for record in caplog.records if "bf16" in record.getMessage()]
    assert "the model is float64" in note
    assert "model.float()" in note, "what to type"
    assert adapter.totals.updates == plain.totals.updates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_bf16_applies_there_is_no_note(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="poem"):
        poem.adapt(make_net("gn").to(dtype), "tent", precision="bf16")(images(4, seed=0))
    assert "bf16" not in caplog.text


@pytest.mark.parametrize(
    ("what", "kind", "method", "precision"),
    [
        ("batch norm", "bn", "tent", "bf16"),
        ("batch norm", "bn", "poem", "bf16"),
        ("group and layer norm", "gn", "tent", "bf16"),
        ("group and layer norm", "ln", "tent", "bf16"),
        ("statistics of the stream", "bn", "auto", "fp32"),
        ("statistics of the stream", "bn", "auto", "bf16"),
    ],
)
def test_on_a_gpu_that_triton_does_not_know_torchs_kernels_run_and_one_note_says_so(
    what: str, kind: str, method: str, precision: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU the kernels are Triton's interpreter's (see conftest.py)."""
    triton_or_skip(monkeypatch)
    from triton.runtime.errors import PTXASError

    asked = []

    def fail(*_: Any, **__: Any) -> NoReturn:
        asked.append(1)
        raise PTXASError(f"{UNKNOWN}\n`ptxas` stderr:\nptxas fatal: Value 'sm_999' is not defined")

    modules: tuple[ModuleType, ...] = (batch_norm, sample_norms, blended)
    for module in modules:
        monkeypatch.setattr(module, "DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(module.TRITON, "_works", {})
    kernels = batch_norm.kernels()
    assert kernels is not None
    monkeypatch.setattr(type(kernels._small), "run", fail)
    net = make_net(kind, sharpness=10.0).to(DEVICE).to(memory_format=torch.channels_last)
    one, other, without = (poem.adapt(net, method, precision=precision, fast=False) for _ in range(3))
    batches = [each.contiguous(memory_format=torch.channels_last) for each in stream(DEVICE, 3, size=4)]
    with caplog.at_level(logging.WARNING, logger="poem"):
        found = [one(batch) for batch in batches]
        other(batches[0])
    assert len(asked) == 1, "tried once in the process, not for each batch or adapter"
    (note,) = [record.getMessage() for record in caplog.records if UNKNOWN in record.getMessage()]
    assert what in note
    assert "as torch computes it" in note
    for module in modules:
        monkeypatch.setattr(module, "DEVICES", ())
    for batch, answer in zip(batches, found, strict=True):
        assert torch.equal(answer, without(batch))
    assert one.totals == without.totals
