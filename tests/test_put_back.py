"""What is set for a while is put back as it was, not as it usually is."""

from __future__ import annotations

import logging

import torch
from nets import make_net

import poem
from poem._util.log_level import errors_only


def test_frozen_inside_frozen_stays_frozen() -> None:
    adapter = poem.adapt(make_net("bn"), "tent", lr=0.5)
    x = torch.rand(4, 3, 16, 16)
    with adapter.frozen():
        first = adapter(x)
        with adapter.frozen():
            adapter(x)
        assert torch.equal(adapter(x), first)
    assert adapter.totals.batches == 0
    adapter(x)
    assert adapter.totals.updates == 1


def test_the_log_is_as_loud_as_before() -> None:
    log = logging.getLogger("poem")
    before = log.level
    try:
        log.setLevel(logging.DEBUG)
        with errors_only():
            assert log.level == logging.ERROR
            with errors_only(False):
                assert log.level == logging.ERROR
        assert log.level == logging.DEBUG
    finally:
        log.setLevel(before)
