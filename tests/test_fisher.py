"""Source data is measured once per weights and data object, and what is measured follows the data."""

from __future__ import annotations

import gc

import pytest
import torch
from nets import make_net
from torch.utils.data import DataLoader, TensorDataset

import poem
from poem import fisher


def images(seed: int) -> torch.Tensor:
    return torch.rand(24, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def test_the_same_tensor_is_measured_once_and_forgotten_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    data, calls = images(0), []
    measure = fisher._measure
    monkeypatch.setattr(fisher, "_measure", lambda *args: calls.append(1) or measure(*args))  # type: ignore[func-returns-value]
    net = make_net("bn")
    first = poem.adapt(net, "eata", source_data=data)
    second = poem.adapt(net, "eata", source_data=data)
    assert len(calls) == 1
    assert first.preparation == second.preparation == {"forwards": 24, "backwards": 24}
    poem.adapt(net, "eata", source_data=images(1))
    poem.adapt(make_net("bn", seed=1), "eata", source_data=data)
    assert len(calls) == 3, "other data and other weights are measured anew"
    data.mul_(0.5)
    poem.adapt(net, "eata", source_data=data)
    assert len(calls) == 4, "data changed in place is other data"
    known = id(data)
    assert known in fisher._KNOWN
    del data
    gc.collect()
    assert known not in fisher._KNOWN


def test_loaders_lists_and_tensors_agree() -> None:
    data, net = images(0), make_net("gn")
    loader = DataLoader(TensorDataset(data, torch.zeros(24)), batch_size=8)
    adapters = [
        poem.adapt(net, "eata", source_data=source, batch_size=8)
        for source in (data, loader, list(data.split(8)), [(each, None) for each in data.split(8)])
    ]
    values = [adapter._state.fisher for adapter in adapters]
    assert all(value is not None and torch.equal(value, values[0]) for value in values if values[0] is not None)
    assert values[0] is not None
    assert float(values[0].sum()) > 0


def test_empty_source_data_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        poem.adapt(make_net("bn"), "eata", source_data=[])
