"""Importance is the same however source data comes, and needs some; what it follows is in bench/test_keys.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from inside import importance
from nets import make_net
from torch.utils.data import DataLoader, TensorDataset

import poem
from poem.engine import source_data


def images(seed: int) -> torch.Tensor:
    return torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_loaders_lists_and_tensors_agree() -> None:
    data, net = images(0), make_net("gn")
    loader = DataLoader(TensorDataset(data, torch.zeros(24)), batch_size=8)
    adapters = [
        poem.adapt(net, "eata", source_data=source, batch_size=8)
        for source in (data, loader, list(data.split(8)), [(each, None) for each in data.split(8)])
    ]
    values = [importance(adapter) for adapter in adapters]
    assert all(torch.equal(value, values[0]) for value in values)
    assert float(values[0].sum()) > 0


def test_no_more_images_are_used_than_importance_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch is cut short; what comes after it is not read."""
    monkeypatch.setattr(source_data, "SAMPLES", 10)
    read = []

    def batches() -> Iterator[torch.Tensor]:
        for batch in images(0).split(4):
            read.append(len(batch))
            yield batch

    net = make_net("gn")
    found = poem.adapt(net, "eata", source_data=batches())
    assert found.preparation == {"forwards": 10, "backwards": 10}
    assert sum(read) <= 16
    source_data.forget()
    cut = poem.adapt(net, "eata", source_data=list(images(0)[:10].split(4)))
    assert torch.equal(importance(found), importance(cut))


def test_empty_source_data_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        poem.adapt(make_net("bn"), "eata", source_data=[])
