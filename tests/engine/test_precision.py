"""A precision that does not apply to a model is said, once."""

from __future__ import annotations

import logging

import pytest
import torch
from nets import make_net
from toys import images

import poem

NOTE = "precision='bf16' was not applied: the model is float64"


@pytest.mark.parametrize(("kind", "method"), [("bn", "auto"), ("gn", "poem"), ("bn", "tent")])
def test_a_float64_model_stays_float64_under_bf16_and_a_note_says_so(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_net(kind, sharpness=10.0).double()
    plain, adapter = (poem.adapt(model, method, fast=False, precision=each) for each in ("fp32", "bf16"))
    with caplog.at_level(logging.WARNING, logger="poem"):
        for seed in range(3):
            batch = images(8, seed=seed).double()
            # In another memory layout, so that sums are rounded otherwise; bf16 would be off by 1e-3.
            torch.testing.assert_close(adapter(batch), plain(batch), rtol=0, atol=1e-10)
            notes = [note for note in adapter.last.notes if NOTE in note]
            assert len(notes) == (seed == 0), "of the first batch"
            assert not any("precision=" in note for note in plain.last.notes)
            if notes:
                assert "model.float()" in notes[0], "what to type"
    assert [NOTE in record.getMessage() for record in caplog.records if "precision=" in record.getMessage()] == [True]
    assert adapter.totals.updates == plain.totals.updates


def test_after_a_reset_the_first_batch_has_the_note_again_and_the_log_has_not(caplog: pytest.LogCaptureFixture) -> None:
    adapter = poem.adapt(make_net("gn").double(), "tent", precision="bf16")
    with caplog.at_level(logging.WARNING, logger="poem"):
        for _ in range(2):
            adapter(images(4, seed=0).double())
            assert NOTE in adapter.last.notes[0]
            adapter.reset()
    assert caplog.text.count(NOTE) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_where_bf16_applies_there_is_no_note(dtype: torch.dtype) -> None:
    adapter = poem.adapt(make_net("gn").to(dtype), "tent", precision="bf16")
    adapter(images(4, seed=0))
    assert adapter.last.notes == []
