"""`poem serve --source-data`: images of the training distribution for shift alarms and for methods that need them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from served import image_file, pictures
from torch import Tensor

from poem.cli.serve import _served, add_options
from poem.guarded import replies
from poem.guarded.asked import log_probs_of
from poem.serve.engine import StreamEngine
from poem.serve.learner import Learner, Served
from poem.serve.settings import ServeSettings
from poem.serve.source_folder import source_images
from poem.streams.loading.prepare import Prepare


def opened(*words: str) -> Served:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return _served(parser.parse_args(["digits-bn", *words]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    for name in ("a", "b"):
        (made / name).mkdir(parents=True)
        for at in range(5):
            (made / name / f"{at}.png").write_bytes(image_file("PNG", seed=at + 10 * (name == "b")))
    return made


def test_the_alarm_compares_with_the_folder_and_looks_at_it_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()

    def counted(logits: Tensor) -> Tensor:
        asked.append(len(logits))
        return log_probs_of(logits)

    monkeypatch.setattr(replies, "log_probs_of", counted)
    served = opened("--source-data", str(folder), "--no-view")
    engine = StreamEngine(served, ServeSettings(batch_size=4), tmp_path / "states")
    try:
        assert asked[0] == 10
        del asked[:]
        for name in ("one", "two"):
            engine.submit(name, pictures(4, 0)).result(60)
        assert 10 not in asked, "entropies of the source images are known"
    finally:
        assert engine.close(60)
    learner = Learner(served, 4)
    assert learner.guard is not None
    assert learner.guard.state.shift.given
    assert len(learner.guard.state.shift.ranks.values) == 10
    state = learner.state_dict()
    again = Learner(served, 4)
    again.load_state_dict(state)
    assert again.facts() == learner.facts() != Learner(opened("--no-view"), 4).facts()


@pytest.mark.parametrize("method", ["eata", "petta", "protected"])
def test_methods_that_need_source_images_run(folder: Path, method: str) -> None:
    learner = Learner(opened(method, "--source-data", str(folder), "--no-view"), 4)
    assert len(learner.answer(pictures(4, 0))) == 4
    learner.close()


def test_images_are_spread_over_the_folder_and_prepared(folder: Path) -> None:
    prepare = Prepare(resize=32, crop=32)
    found = source_images(folder, prepare, 4)
    assert len(found) == 4
    (batch,) = found
    assert batch.shape == (4, 3, 32, 32)
    names = ("a/0", "a/2", "b/0", "b/2")
    for image, name in zip(batch, names, strict=True):
        assert torch.equal(image, prepare((folder / f"{name}.png").read_bytes(), name).float() / 255)
    (folder / "b" / "4.png").write_bytes(image_file("PNG", 50, 50))
    with pytest.raises(ValueError, match="source images of one size"):
        source_images(folder, Prepare(), 10)
    (folder / "a" / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="no whole image"):
        source_images(folder, prepare, 10)
    with pytest.raises(FileNotFoundError):
        source_images(folder / "none", prepare, 10)
