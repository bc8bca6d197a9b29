"""Copies of a batch begin at the first batch norm, where that changes nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import toys
from torch import Tensor, nn

import poem
from poem.parts import Blended, Nothing, Readout

RECIPE = poem.Recipe(parameters=Nothing(), statistics=Blended(), readout=Readout("first"))


class Stem(nn.Module):
    """A convolution before the first batch norm, and what a subclass does with both."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 10)
        self.rows: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        self.rows.append(len(y))
        logits: Tensor = self.head(self.joined(y).mean((2, 3)))
        return logits

    def joined(self, y: Tensor) -> Tensor:
        return F.relu(self.norm(y))


class Skip(Stem):
    def joined(self, y: Tensor) -> Tensor:
        return F.relu(self.norm(y)) + y


class Counts(Stem):
    """Knows its batch from before the norm, so that copies would become places of an image."""

    def joined(self, y: Tensor) -> Tensor:
        return F.relu(self.norm(y).reshape(len(y), 8, -1, 1))


def answers(net: nn.Module, batches: list[Tensor], *, late: bool) -> list[Tensor]:
    adapter = poem.adapt(net, RECIPE)
    if not late:
        adapter._network._late_copies = False
    return [adapter(batch) for batch in batches]


@pytest.mark.parametrize(("kind", "late"), [(Stem, True), (Skip, False), (Counts, False)])
def test_copies_begin_late_only_where_that_is_right(kind: type[Stem], late: bool) -> None:
    torch.manual_seed(0)
    net = kind().eval()
    batches = list(toys.images(24, seed=1).split(8))
    expected = answers(net, batches, late=False)
    adapter = poem.adapt(net, RECIPE)
    found = [adapter(batch) for batch in batches]
    assert adapter._network._late_copies is late
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)
    twin = adapter._network.twin.root
    assert twin.rows[-1] == (8 if late else 40)  # type: ignore[index]


def test_single_images_come_in_copies_until_a_batch_was_tried() -> None:
    torch.manual_seed(0)
    net = Skip().eval()
    adapter, batches = poem.adapt(net, RECIPE), list(toys.images(4, seed=1).split(1))
    found = [adapter(batch) for batch in batches]
    assert adapter._network._late_copies is None
    for one, two in zip(found, answers(net, batches, late=False), strict=True):
        torch.testing.assert_close(one, two)


def test_a_network_without_batch_norm_has_no_copies() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )
    adapter = poem.adapt(net.eval(), RECIPE)
    adapter(toys.images(8, seed=1))
    assert adapter._network._late_copies is None


def test_copies_keep_the_layout_and_a_batch_that_is_not_finite_proves_nothing() -> None:
    torch.manual_seed(0)
    layouts: list[bool] = []

    class Layout(Stem):
        def joined(self, y: Tensor) -> Tensor:
            z: Tensor = self.norm(y)
            layouts.append(z.is_contiguous(memory_format=torch.channels_last))
            return F.relu(z)

    adapter = poem.adapt(Layout().eval().to(memory_format=torch.channels_last), RECIPE)
    batch = toys.images(8, seed=1).contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="finite"):
        adapter(batch * torch.inf)
    assert adapter._network._late_copies is None
    adapter(batch)
    assert adapter._network._late_copies is True
    layouts.clear()
    adapter(batch)
    assert layouts == [True]


class First(nn.Module):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return z


class Sum(nn.Module):
    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return z + y


class Joined(Stem):
    def __init__(self) -> None:
        super().__init__()
        self.join: nn.Module = First()

    def joined(self, y: Tensor) -> Tensor:
        found: Tensor = self.join(F.relu(self.norm(y)), y)
        return found


def test_a_model_that_was_changed_is_tried_again() -> None:
    torch.manual_seed(0)
    net = Joined().eval()
    adapter = poem.adapt(net, RECIPE)
    adapter(toys.images(8, seed=1))
    assert adapter._network._late_copies is True
    net.join = Sum()
    assert bool(adapter(toys.images(8, seed=2)).isfinite().all())
    assert adapter._network._late_copies is False


def test_one_image_that_overflows_leaves_the_source_of_a_guard_alone() -> None:
    """Its copy has a share of 0 of the batch's statistics, and 0 times infinity is not 0."""
    torch.manual_seed(0)
    net = Stem().eval()
    batch = toys.images(8, seed=1)
    batch[0] *= 1e25  # finite, but not its square
    adapter = poem.adapt(net, RECIPE)
    adapter(batch)
    found, expected = adapter.last.source_logits, adapter.source(batch)
    assert found is not None
    torch.testing.assert_close(found[1:], expected[1:], atol=1e-4, rtol=1e-4)
