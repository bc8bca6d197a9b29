"""Batch statistics: whose they are, also where a forward pass covers only some samples."""

from __future__ import annotations

import copy
import math

import torch
from by_hand import Bright, adapted, assert_same, entropy, net, stream, with_batch_statistics
from inside import network
from learners import batch, learner
from torch import Tensor, nn

import poem
from poem.parts import (
    EntropyBelow,
    FromBatch,
    Occlusion,
    PLPDAbove,
)


def test_batch_statistics_need_more_than_switching_off_the_tracking() -> None:
    """A layer with running statistics uses them in eval mode, tracked or not; the adapter must not."""
    (batch, *_) = stream()
    model = net("bn")
    untracked = copy.deepcopy(model)
    for module in untracked.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
    with torch.no_grad():
        source, from_batch = model(batch), with_batch_statistics(model)(batch)
        assert torch.equal(untracked.eval()(batch), source)
    assert (source - from_batch).abs().max() > 0.1
    before = copy.deepcopy(model.state_dict())
    for method in ("bn", "tent"):
        torch.testing.assert_close(poem.adapt(model, method)(batch), from_batch, rtol=1e-9, atol=1e-9)
    assert_same(dict(model.state_dict()), before)
    assert not model.training
    torch.testing.assert_close(poem.adapt(untracked, "tent")(batch), from_batch, rtol=1e-9, atol=1e-9)


def test_a_pass_over_some_samples_has_the_statistics_of_those_alone() -> None:
    batch = stream()[0] - 0.45
    select = Bright()
    adapter = adapted("bn", "tent", select=select)
    adapter(batch)
    mask = adapter.last.selected
    assert 2 <= int(mask.sum()) < len(batch)
    look, everyone = select.seen[0]
    destroyed = Occlusion()(look)
    reference = with_batch_statistics(net("bn"))
    with network(adapter).borrowed("cpu"):
        asked, whole = look.forward(destroyed, among=mask), look.forward(destroyed, among=everyone)
    with torch.no_grad():
        torch.testing.assert_close(asked[mask], reference(destroyed[mask]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(whole, reference(destroyed), rtol=1e-9, atol=1e-9)
    assert (asked - whole)[mask].abs().max() > 1e-3


def test_deyo_destroys_only_the_sure_and_so_sees_other_statistics() -> None:
    (batch, *_) = stream()
    reference = with_batch_statistics(net("bn"))
    with torch.no_grad():
        probs = reference(batch).softmax(1)
        sure = entropy(reference(batch)) < 0.5 * math.log(10)
        adapter = adapted("bn", "deyo", lr=0.0, select=EntropyBelow(0.5) & PLPDAbove(0.0, Occlusion()))
        adapter(batch)
        covered = batch.clone()
        covered[:, :, 4:12, 4:12] = batch.mean((2, 3), keepdim=True)
        drops = []
        for kept in (sure, torch.ones_like(sure)):
            drop = torch.zeros(len(batch), dtype=torch.float64)
            labels = probs[kept].argmax(1, keepdim=True)
            found = probs[kept].gather(1, labels) - reference(covered[kept]).softmax(1).gather(1, labels)
            drop[kept] = found[:, 0]
            drops.append(drop)
    assert 2 <= int(sure.sum()) < len(batch)
    assert (drops[0] - drops[1])[sure].abs().max() > 1e-3
    assert torch.equal(adapter.last.selected, sure & (drops[0] > 0))


class OnePixel(nn.Module):
    """Batch norm on maps, then on a single pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x))).mean((2, 3), keepdim=True)
        logits: Tensor = self.head(self.norm2(self.conv2(x)).flatten(1))
        return logits


def one_pixel() -> OnePixel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = OnePixel().eval()
        nn.init.uniform_(net.norm2.running_mean, -0.3, 0.3)  # type: ignore[arg-type]
        nn.init.uniform_(net.norm2.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return net


def test_one_image_on_a_single_pixel_falls_back_to_source_statistics() -> None:
    net, image = one_pixel(), batch(1)
    expected = copy.deepcopy(net)
    expected.norm1.train()
    adapter = learner(net=net)
    torch.testing.assert_close(adapter(image), expected(image).detach())
    assert adapter.totals.updates == 1
    assert "falls back to" in " ".join((FromBatch.__doc__ or "").split())


def test_a_masked_pass_that_keeps_one_image_equals_the_pass_over_it() -> None:
    images, kept = batch(4), torch.tensor([False, True, False, False])
    inner = network(learner(net=one_pixel()))
    with torch.no_grad(), inner.borrowed("cpu"):
        (masked,), _ = inner.heads(images, None, None, FromBatch(), {}, kept)
        (alone,), _ = inner.heads(images[kept], None, None, FromBatch(), {})
    torch.testing.assert_close(masked[kept], alone)
