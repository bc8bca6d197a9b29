"""Streams: stored domains, corruption on the fly, seeds, failures that are counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trees import Spoilt, grow, picture, toy, wnids

from poem.streams.corruptions import corrupt
from poem.streams.datasets import (
    Domains,
    Prepare,
    Stream,
    Tensors,
    batches,
)
from poem.streams.orders import CLEAN, InOrder, Shift, continual, forgetting, mixed, one_by_one, single


def test_a_stream_of_stored_domains(tmp_path: Path) -> None:
    for number, name in enumerate(("fog", "snow")):
        for at, wnid in enumerate(wnids(3)):
            folder = tmp_path / name / "5" / wnid
            folder.mkdir(parents=True)
            (folder / "x.JPEG").write_bytes(picture(100 * number + at))
    settings = (("classes", 3), ("per_class", 1))
    stream = Stream(data=Domains("imagenet-c", str(tmp_path), settings), order=continual(["fog", "snow"]), batch_size=2)
    seen = [(str(piece.segment.shift), piece.segment.reset, len(piece.labels)) for piece in stream]
    assert seen == [("fog 5", True, 2), ("fog 5", False, 1), ("snow 5", False, 2), ("snow 5", False, 1)]
    for piece in stream:
        expected = piece.labels + (100 if piece.segment.shift == Shift("snow", 5) else 0)
        assert (piece.images.mean((1, 2, 3)) * 255).round().int().tolist() == expected.tolist()
    assert "on the fly" not in stream.card().provenance

    pooled = Stream(data=Domains("imagenet-c", str(tmp_path), settings), order=mixed(["fog", "snow"]))
    (piece,) = pooled
    levels = (piece.images.mean((1, 2, 3)) * 255).round().int()
    assert levels.tolist() == (piece.labels + 100 * torch.from_numpy(piece.segment.which)).tolist()


def test_the_clean_domain_gets_the_settings_too(tmp_path: Path) -> None:
    grow(tmp_path / "val", wnids(1000), size=(20, 24))
    grow(tmp_path / "fog" / "5", wnids(1000), size=(20, 24))
    prepare = Prepare(resize=18, crop=16)
    domains = Domains("ImageNet-C", str(tmp_path), (("prepare", prepare), ("per_class", 1)))
    assert domains(Shift("fog", 5))[0].shape == (3, 16, 16)
    with pytest.raises(ValueError, match=r"counterpart of imagenet-c is imagenet-val, which takes no per_class; for"):
        domains(CLEAN)
    for name in ("imagenet-c", "imagenet-val"):  # a set without corruptions is its own clean domain
        settings = (("prepare", prepare), *((("partial", True),)))
        assert Domains(name, str(tmp_path), settings)(CLEAN)[0].shape == (3, 16, 16)


def test_a_stream_made_on_the_fly() -> None:
    data = toy()
    stream = Stream(data=data, order=forgetting(["contrast"], seed=9), batch_size=64)
    corrupted, clean = stream
    assert clean.segment.shift == CLEAN
    assert torch.equal(clean.images, data.images[clean.segment.indices].float() / 255)
    made = corrupt(data.images, "contrast", 5, seed=9, ids=list(range(10)))
    assert torch.equal(corrupted.images, made[corrupted.segment.indices].float() / 255)
    (piece,) = Stream(data=data, order=mixed(["contrast", "brightness"], seed=9))
    for row in range(20):
        shift = piece.segment.shifts[piece.segment.which[row]]
        index = int(piece.segment.indices[row])
        alone = corrupt(data.images[index : index + 1], shift.corruption, 5, seed=9, ids=[index])
        assert torch.equal(piece.images[row], alone[0].float() / 255)


def test_a_stream_refuses_domains_that_differ() -> None:
    def domain(shift: Shift) -> Tensors:
        return toy(10 if shift.corruption == "fog" else 9)

    with pytest.raises(ValueError, match="snow 5 has other labels than the first"):
        list(Stream(data=domain, order=continual(["fog", "snow"])))


def test_a_stream_counts_the_failures_of_its_latest_pass() -> None:
    data = Spoilt(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), list(range(8)))
    stream = Stream(data=data, order=single(["fog"], within=InOrder()), batch_size=4, on_error="report")
    counts = []
    for _ in range(2):
        list(stream)
        counts.append(len(stream.failures))
    assert counts == [2, 2]


def test_a_stream_has_its_own_seed_for_corruptions() -> None:
    """The order stays, the noise follows `seed=`."""
    data = Tensors(torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8), list(range(4)))
    order = single(["gaussian_noise"], seed=1, within=InOrder())

    def noise(seed: int | None) -> torch.Tensor:
        return next(iter(Stream(data=data, order=order, batch_size=4, seed=seed))).images

    made = {
        seed: next(iter(batches(data, range(4), 4, corruption=("gaussian_noise", 5), seed=seed)))[0] for seed in (1, 7)
    }
    assert torch.equal(noise(None), made[1])
    assert torch.equal(noise(7), made[7])
    assert not torch.equal(made[1], made[7])


def test_an_unreadable_image_drops_neither_the_reset_nor_other_images() -> None:
    data = Spoilt(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), list(range(8)))
    order = one_by_one(["fog", "contrast"], within=InOrder())
    pieces = list(Stream(data=data, order=order, on_error="report"))
    resets = [
        (piece.segment.shift.corruption, int(piece.segment.indices[0])) for piece in pieces if piece.segment.reset
    ]
    assert resets == [("fog", 1), ("contrast", 1)]
    for piece in Stream(data=data, order=single(["fog"], within=InOrder()), batch_size=4, on_error="report"):
        assert piece.labels.tolist() == piece.segment.indices.tolist()
        assert len(piece.images) == len(piece.segment.which) == 3


def test_processes_of_the_next_domain_start_before_this_one_ends() -> None:
    """An error of the next domain still comes after the last batch of this one."""
    opened: list[str] = []

    def domains(shift: Shift) -> Tensors:
        opened.append(str(shift))
        if shift.corruption == "fog" and len(opened) > 2:
            raise OSError("no fog")
        return toy()

    order = continual(["contrast", "fog"], seed=0)
    plain = iter(Stream(data=domains, order=order, batch_size=2))
    before = [next(plain).images for _ in range(5)]
    assert [each.split()[0] for each in opened] == ["contrast"] * 2
    opened.clear()
    found = iter(Stream(data=domains, order=order, batch_size=2, workers=1))
    for at, images in enumerate(before):
        assert torch.equal(next(found).images, images)
        assert ("fog" in " ".join(opened)) == (at >= 3), "five batches, of which one process has two ahead"
    with pytest.raises(OSError, match="no fog"):
        next(found)
