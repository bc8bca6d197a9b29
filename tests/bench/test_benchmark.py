"""`poem.evaluate` takes what users have: names, recipes, loaders, and the library's own streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from nets import make_net
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import poem
from poem.bench.evaluate import Row
from poem.bench.metrics import ECE, NLL, Accuracy
from poem.engine.model_lock import model_lock
from poem.parts import EntropyBelow, Memory, Outputs, Select
from poem.streams.datasets import Stream, Tensors
from poem.streams.orders import Order, continual, single


def stream() -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return [(torch.rand(8, 3, 16, 16, generator=rng), torch.randint(10, (8,), generator=rng)) for _ in range(2)]


def test_names_recipes_and_mappings_make_rows() -> None:
    mine = poem.Recipe(select=EntropyBelow(0.99), lr=0.01)
    net = make_net("bn")
    assert [row.method for row in poem.evaluate(net, stream(), ["source", mine])] == ["source", "recipe 2"]
    table = poem.evaluate(net, stream(), {"before": "tent", "mine": mine})
    assert table["mine"].n == 16
    assert table["before"].backwards == 16
    assert "images/s" in str(table)
    head, rule, first, _ = table.markdown().splitlines()
    assert head.startswith("| method | accuracy % | ECE % |")
    assert rule == "|---|" + "---:|" * 7
    assert first.startswith(f"| before | {table['before'].accuracy:.1f} |")
    assert poem.evaluate(net, stream(), {"a|b": "source"}).markdown().splitlines()[2].startswith("| a\\|b |")
    assert [line.split()[0] for line in str(table).splitlines()] == ["method", "before", "mine"]
    with pytest.raises(KeyError, match="rows: before, mine"):
        table["tent"]


def test_a_stream_of_the_library_keeps_its_resets() -> None:
    """With a reset at each shift, two shifts in a stream answer as each alone; without, the second has learnt more."""
    images = torch.randint(256, (16, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data = Tensors(images, [i % 10 for i in range(16)])
    net, shifts = make_net("bn"), ["brightness", "contrast"]

    def row(order: Order) -> Row:
        return poem.evaluate(net, Stream(data=data, order=order, batch_size=8), "tent", lr=0.5)["tent"]

    both = row(single(shifts, severity=1, seed=0))
    assert both.n == 32
    assert both.backwards == 32, "counts outlive the resets"
    apart = [row(single([shift], severity=1, seed=0)).nll for shift in shifts]
    assert both.nll == pytest.approx(sum(apart) / 2, rel=1e-6)
    assert row(continual(shifts, severity=1, seed=0)).nll != pytest.approx(both.nll, rel=1e-3), "and without it differs"


def test_what_cannot_be_scored_is_said() -> None:
    net = make_net("bn")
    with pytest.raises(TypeError, match=r"expected batches of \(images, labels\), got Tensor"):
        poem.evaluate(net, [torch.rand(4, 3, 16, 16)], "tent")
    with pytest.raises(ValueError, match=r"expected labels 0..9, got 3..12"):
        poem.evaluate(net, [(torch.rand(2, 3, 16, 16), torch.tensor([3, 12]))], "tent")
    with pytest.raises(ValueError, match="iterated once per method"):
        poem.evaluate(net, iter(stream()), ["source", "tent"])


# One stream for all rows ----------------------------------------------------------------------------------------------


def pictures(count: int = 32) -> TensorDataset:
    rng = torch.Generator().manual_seed(1)
    return TensorDataset(torch.rand(count, 3, 16, 16, generator=rng), torch.randint(10, (count,), generator=rng))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Images that come out otherwise each time, as with a random transform."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        return torch.rand(3, 16, 16), torch.tensor(at)


class Growing:
    """A loader that gives a batch more each time, or another label."""

    def __init__(self, *passes: list[tuple[Tensor, Tensor]]) -> None:
        self.passes = list(passes)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.passes.pop(0))


def other_labels() -> list[tuple[Tensor, Tensor]]:
    return [(images, 9 - labels) for images, labels in stream()]


@pytest.mark.parametrize(
    ("loader", "batch"),
    [
        (DataLoader(pictures(), 8, shuffle=True), 1),
        (DataLoader(pictures(), 8, shuffle=True, generator=torch.Generator().manual_seed(0)), 1),
        (DataLoader(Noisy(), 8), 1),
        (Growing(stream(), stream() * 2), 3),
        (Growing(stream() * 2, stream()), 3),
        (Growing(stream(), other_labels()), 1),
    ],
    ids=["shuffled", "shuffled by one generator", "random images", "longer", "shorter", "other labels"],
)
def test_rows_of_different_streams_are_refused(loader: Any, batch: int) -> None:
    """Three rows of one method on a shuffled loader differed by six points: each saw another order."""
    words = rf"expected the same batches for every method, got others for 'b' than for 'a' from batch {batch} on.*"
    with pytest.raises(ValueError, match=words + r"shuffle=False.*list\(loader\)"):
        poem.evaluate(make_net("bn"), loader, {"a": "tent", "b": "tent"}, lr=0.5)


def test_equal_streams_give_equal_rows() -> None:
    net, data = make_net("bn"), pictures()

    class Anew:
        def __iter__(self) -> Iterator[Any]:
            return iter(DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(0)))

    for loader in (
        DataLoader(data, 8),
        list(DataLoader(data, 8, shuffle=True)),
        Anew(),
        DataLoader(data, 8, num_workers=2),
    ):
        first, second = poem.evaluate(net, loader, {"a": "tent", "b": "tent"}, lr=0.5)
        assert (first.accuracy, first.ece, first.nll) == (second.accuracy, second.ece, second.nll)
        assert first.n == 32
    poem.evaluate(net, DataLoader(data, 8, shuffle=True), "tent")  # a single row has nothing to be compared with


# Labels of other shapes -----------------------------------------------------------------------------------------------


def hot(labels: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(labels, 10)


@pytest.mark.parametrize(
    "form",
    [
        lambda labels: labels[:, None], lambda labels: labels.view(-1, 1, 1), lambda labels: labels.int(),
        lambda labels: labels.float(), lambda labels: labels.double()[:, None], hot, lambda labels: hot(labels).float(),
        lambda labels: hot(labels).bool(), lambda labels: labels.numpy(), lambda labels: labels.tolist(),
        lambda labels: tuple(labels), lambda labels: labels.to(torch.uint8),
    ],
)  # fmt: skip
def test_labels_whose_meaning_is_clear_are_accepted(form: Callable[[Tensor], Any]) -> None:
    net = make_net("bn")
    plain = poem.evaluate(net, stream(), "tent")["tent"]
    formed = poem.evaluate(net, [(images, form(labels)) for images, labels in stream()], "tent")["tent"]
    assert replace(formed, seconds=0.0) == replace(plain, seconds=0.0)


def test_one_image_may_have_one_label() -> None:
    image = torch.rand(1, 3, 16, 16)
    for label in (torch.tensor(3), 3, torch.tensor([[3]]), torch.tensor([True]), [3]):
        assert poem.evaluate(make_net("gn"), [(image, label)], "source")["source"].n == 1


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (["cat"] * 8, r"got words such as 'cat'; number them: torch.tensor\(\[names.index\(each\)"),
        (torch.zeros(5, dtype=torch.long), r"expected one label for each of 8 images, got 5"),
        (torch.zeros(9, dtype=torch.long), r"expected one label for each of 8 images, got 9"),
        (torch.full((8,), 0.5), r"expected labels as whole numbers, got 0\.5"),
        (torch.full((8,), torch.nan), r"expected labels as whole numbers, got nan"),
        (torch.full((8, 10), 0.1), r"expected one class per image.*got several or none in torch.float32 \(8, 10\)"),
        (torch.ones(8, 10, dtype=torch.long), r"expected one class per image.*labels.argmax\(1\)"),
        (hot(torch.arange(8) % 4)[:, :4], r"expected 10 columns.*one per logit, got 4"),
        (torch.zeros(8, 2, 3), r"expected labels of shape \(8,\), \(8, 1\) or one-hot \(8, classes\), got \(8, 2, 3\)"),
        (torch.full((8,), 10), r"expected labels 0..9, got 10..10"),
        (torch.full((8,), -1), r"expected labels 0..9, got -1..-1"),
        (None, r"expected batches of \(images, labels\), got labels of NoneType"),
        ({"a": 1}, r"expected batches of \(images, labels\), got labels of dict"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_scored_are_refused_in_one_line(labels: Any, words: str) -> None:
    net = make_net("bn")
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        poem.evaluate(net, [(torch.rand(8, 3, 16, 16), labels)], "tent")
    assert "\n" not in str(caught.value)


def test_what_is_no_image_is_said() -> None:
    with pytest.raises(TypeError, match=r"expected a tensor of images, got ndarray; use torch\.from_numpy"):
        poem.evaluate(make_net("bn"), [(torch.rand(2, 3, 16, 16).numpy(), torch.zeros(2).long())], "tent")


def test_a_failure_gives_the_model_back() -> None:
    net = make_net("bn")
    with pytest.raises(ValueError, match="expected labels"):
        poem.evaluate(net, [(torch.rand(2, 3, 16, 16), torch.full((2,), 99))], "tent")
    assert model_lock(net).adapters == 0


@dataclass(frozen=True, repr=False)
class Forgetful(Select):
    """A selection that forgets those in question."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return outputs.entropy > 0


@dataclass(frozen=True, repr=False)
class Short(Select):
    """A selection of the wrong length."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among[:1]


class Unfinished(Select):
    """A selection without its verb."""


def test_faulty_parts_are_named_at_the_first_batch() -> None:
    images = stream()[0][0]
    adapter = poem.adapt(make_net("bn"), poem.Recipe(select=EntropyBelow(0.0) & Forgetful()))
    adapter(images)
    assert adapter.last.skipped == "nothing selected", "a filter never brings back what another one dropped"
    with pytest.raises(TypeError, match=r"to return a mask of bool \(8,\), got torch.bool \(1,\)"):
        poem.adapt(make_net("bn"), poem.Recipe(select=Short()))(images)
    with pytest.raises(TypeError, match="abstract"):
        Unfinished()  # type: ignore[abstract]


def test_metrics_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0], [0.0, 1.0, 2.0]])
    labels = torch.tensor([0, 1, 1, 1])
    one, two, nll, ece = Accuracy(), Accuracy(top=2), NLL(), ECE(bins=10)
    for metric in (one, two, nll, ece):
        metric.update(logits[:2], labels[:2])
        metric.update(logits[2:], labels[2:])
    assert one.result() == 0.5
    assert two.result() == 0.75
    probs = logits.double().softmax(1)
    assert nll.result() == pytest.approx(float(-probs.log().gather(1, labels[:, None]).mean()))
    sure = float(probs[0].max())  # 0.787, three of them in one bin, two right; the fourth, 0.665, in another, wrong
    expected = (abs(3 * sure - 2) + float(probs[3].max())) / 4
    assert ece.result() == pytest.approx(expected)
    one.reset()
    assert one.result() == 0.0


def test_an_idle_stream_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = poem.adapt(make_net("gn"), "poem")
    for _ in range(12):
        adapter(stream()[0][0])
    assert caplog.text.count("selected no sample") == 1
    assert "threshold=" in caplog.text
    single_images = poem.adapt(make_net("bn"), "tent")
    single_images(torch.rand(1, 3, 16, 16))
    assert "one image at a time through batch norm" in single_images.last.notes[0]


def test_names_that_almost_fit_get_a_remedy() -> None:
    for name, words in (("source+poem", "nothing for"), ("POEM", "Did you mean poem"), ("lame*", "it goes with tent")):
        with pytest.raises(ValueError, match=words):
            poem.recipe(name)
    with pytest.raises(TypeError, match="Did you mean lr"):
        poem.adapt(make_net("bn"), "tent", learning_rate=0.1)
    with pytest.raises(ValueError, match="see tent-filtered"):
        poem.adapt(make_net("bn"), "tent", threshold=0.4)


def test_a_state_of_other_settings_names_the_field() -> None:
    state = poem.adapt(make_net("bn"), "poem", threshold=0.9).state_dict()
    with pytest.raises(ValueError, match=r"select EntropyBelow\(0.4\), got EntropyBelow\(0.9\)"):
        poem.adapt(make_net("bn"), "poem").load_state_dict(state)


class Named(torch.utils.data.TensorDataset):
    """Images with labels, and with names for the classes, as torchvision's folders have them."""

    def __init__(self, labels: list[int], classes: list[str]) -> None:
        super().__init__(torch.rand(len(labels), 3, 16, 16), torch.tensor(labels))
        self.classes = classes


def test_data_with_fewer_classes_than_logits_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    net = make_net("gn")  # ten logits
    three = torch.utils.data.DataLoader(Named([0, 1, 2, 1], ["apple", "lime", "plum"]), 2)
    poem.evaluate(net, three, ["source", "bn"])
    assert caplog.text.count("the data has 3 classes and the model 10 logits") == 1
    assert "pass classes=[...]" in caplog.text
    masked = Tensors(torch.rand(4, 3, 16, 16), [0, 1, 0, 1], classes=("apple", "lime"), mask=(4, 7))
    caplog.clear()
    poem.evaluate(net, Stream(data=masked, order=single(["fog"], severity=1), batch_size=2), "source")
    assert "pass classes=data.mask" in caplog.text
    caplog.clear()
    poem.evaluate(net, [(torch.rand(12, 3, 16, 16), torch.tensor([0, 1, 2] * 4))], "source")
    assert "the data has 3 classes" in caplog.text, "labels alone can tell"


def test_wnids_are_told_how_to_become_indices(caplog: pytest.LogCaptureFixture) -> None:
    named = Named([0, 1], ["n01440764", "n01443537"])
    poem.evaluate(make_net("gn", classes=1000), torch.utils.data.DataLoader(named, 2), "source")
    assert "pass classes=poem.streams.datasets.class_indices(data.classes)" in caplog.text


def test_nothing_is_said_where_classes_are_right(caplog: pytest.LogCaptureFixture) -> None:
    net = make_net("gn")
    three = torch.utils.data.DataLoader(Named([0, 1, 2, 1], ["apple", "lime", "plum"]), 2)
    poem.evaluate(net, three, "source", classes=[3, 4, 5])
    poem.evaluate(net, torch.utils.data.DataLoader(Named([0, 9], ["apple", "lime"]), 2), "source")  # as logits are
    poem.evaluate(net, [(torch.rand(2, 3, 16, 16), torch.tensor([0, 1]))], "source")  # too few to tell
    poem.evaluate(net, stream(), "source")
    assert not caplog.text
