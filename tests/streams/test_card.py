"""The protocol card."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from poem.streams.card import Card
from poem.streams.datasets import Stream, Tensors
from poem.streams.orders import continual, gradual, imbalanced, one_by_one, single


def clean(n: int = 12) -> Tensors:
    images = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Tensors(images, np.arange(n) % 3, name="toy")


def test_a_card_goes_to_json_and_back() -> None:
    card = Card(data="toy", n=5, total=10, corruptions=("fog", "snow"), severity=(5,), base="net.tag")
    assert Card.from_json(card.to_json()) == card
    assert Card.from_dict(card.to_dict()) == card
    assert json.loads(card.to_json())["corruptions"] == ["fog", "snow"]


def test_a_card_prints_as_an_aligned_block() -> None:
    lines = str(Card(data="toy", n=5, total=10, source_access="2000 images")).splitlines()
    where = {line.index("  ") for line in lines if line.startswith("source access")}
    assert where == {len("source access")}
    assert "source access  2000 images" in lines
    assert "data           toy" in lines
    assert all(line[13:15] == "  " for line in lines)


def test_a_stream_makes_its_card() -> None:
    card = Stream(data=clean(), order=continual(["fog", "frost"], severity=3, seed=4), batch_size=5).card(
        base="resnet50.tv_in1k", normalisation="ImageNet mean and std, inside the model", source_access="none"
    )
    assert (card.data, card.n, card.total, card.batch_size, card.seed) == ("toy", 12, 24, 5, 4)
    assert (card.corruptions, card.severity, card.base) == (("fog", "frost"), (3,), "resnet50.tv_in1k")
    assert card.order == "continual; 2 segments, reset at the start"
    assert "made on the fly by poem.corrupt (seed 4, profile cifar)" in card.provenance
    assert "frost textures: " in card.provenance
    assert "given in memory" in card.provenance


def test_the_card_counts_what_the_stream_yields() -> None:
    for order in (single(["fog"]), gradual(["contrast"]), imbalanced(["contrast"], length=7), one_by_one(["contrast"])):
        stream = Stream(data=clean(6), order=order)
        assert stream.card().total == sum(len(piece.labels) for piece in stream)
    assert Stream(data=clean(), order=one_by_one(["fog"])).card().batch_size == 1
    assert "reset at each domain" in Stream(data=clean(), order=single()).card().order
    assert "LabelShift(imbalance=500000" in Stream(data=clean(), order=imbalanced()).card().order


def test_the_card_of_clean_data_names_no_corruption() -> None:
    card = Stream(data=clean(), order=single(["clean"])).card()
    assert (card.corruptions, card.severity, card.provenance) == (("clean",), (0,), "given in memory")


def test_many_corruptions_are_counted_in_print() -> None:
    assert "jpeg_compression (15)" in str(Stream(data=clean(), order=continual()).card())


def test_bad_cards_are_refused() -> None:
    with pytest.raises(ValueError, match="no field 'sevrity'; did you mean 'severity'"):
        Card.from_dict({"data": "x", "n": 1, "total": 1, "sevrity": [5]})
    with pytest.raises(ValueError, match="lacks"):
        Card.from_dict({"data": "x"})
    with pytest.raises(ValueError, match="expected a JSON object"):
        Card.from_json("[1]")
    with pytest.raises(ValueError, match="prescribes batch size 1, got 8"):
        Stream(data=clean(), order=one_by_one(["fog"]), batch_size=8)
