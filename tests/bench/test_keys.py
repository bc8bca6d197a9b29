"""What is kept is found again only where everything that it depends on is the same.

Each cache is tested field by field: with one of them changed it must give what it would give with nothing kept. A key
that loses a field fails its row.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from inside import importance
from nets import ConvNet, make_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import poem
from poem import zoo
from poem._util.caching import Fingerprint, LRUCache, cache_key
from poem.bench import load_cell
from poem.bench.cell import Cell
from poem.bench.load_cell import Machine, weights_sha256
from poem.bench.measure import measure
from poem.bench.store import Store
from poem.engine import source_data
from poem.parts import EntropyBelow, FisherAnchor, FromBatch, Memory, NormAffine, Outputs, Part, Source, Statistics
from poem.recipes import methods
from poem.streams import datasets
from poem.streams.datasets import Tensors
from poem.streams.shift import CLEAN, Shift
from poem.zoo import nets

# Importance, EATA's Fisher --------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """A network with two answers, and a number of its own that no tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.temperature = make_net("bn"), 1.0
        self.second = nn.Linear(10, 10)
        with torch.no_grad():
            self.second.weight.copy_(torch.linspace(-2, 2, 100).view(10, 10))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = self.trunk(x) / self.temperature
        return {"logits": first, "second": self.second(first)}


def images(count: int = 16, seed: int = 0) -> Tensor:
    return torch.rand(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


class Pictures(Dataset[Tensor]):
    """Images that somebody may exchange while a loader is over them."""

    def __init__(self) -> None:
        self.held = images()

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, at: int) -> Tensor:
        return self.held[at]


@dataclass
class Case:
    """What importance is measured with."""

    net: nn.Module = field(default_factory=TwoHeads)
    data: Any = field(default_factory=images)
    settings: dict[str, Any] = field(default_factory=lambda: {"mean": (0.1,) * 3, "std": (0.5,) * 3, "batch_size": 8})
    autocast: bool = False

    def measured(self) -> Tensor:
        """The importance that an adapter gets."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            adapter = poem.adapt(self.net, "eata", source_data=self.data, **self.settings)
        adapter.unload()
        return importance(adapter)


def by_loader(case: Case) -> None:
    case.data = DataLoader(TensorDataset(images()), batch_size=8)


def by_dataset(case: Case) -> None:
    case.data = DataLoader(Pictures(), batch_size=8)


def nothing(case: Case) -> None:
    """As it is."""


def set_to(**settings: Any) -> Callable[[Case], None]:
    return lambda case: case.settings.update(settings)


def moved(name: str) -> Callable[[Case], None]:
    """A tensor of the network is written to through `.data`, which leaves its version as it was."""
    return lambda case: case.net.state_dict()[name].data.mul_(1.5)


def other_forward(case: Case) -> None:
    case.net.temperature = 3.0  # type: ignore[assignment]


def hooked(case: Case) -> None:
    case.net.trunk.register_forward_hook(lambda module, given, answer: 2 * answer)  # type: ignore[union-attr]


def written(case: Case) -> None:
    case.data.data.mul_(0.5)


def written_late(case: Case) -> None:
    case.data.data[-1].mul_(0.5)


def written_below(case: Case) -> None:
    case.data.dataset.tensors[0].data.mul_(0.5)


def exchanged(case: Case) -> None:
    case.data.dataset.held = images(seed=1)


def turned(case: Case) -> None:
    case.data.data.copy_(case.data.roll(3, 0))


def fewer(case: Case) -> None:
    case.data = case.data[:12]


def under_autocast(case: Case) -> None:
    case.autocast = True


HEADS = {"head": 0}
FLIPS: dict[str, tuple[Callable[[Case], None], Callable[[Case], None]]] = {
    "weights": (nothing, moved("trunk.fc.weight")),
    "buffers": (set_to(statistics=Source()), moved("trunk.norm1.running_mean")),
    "forward": (nothing, other_forward),
    "hooks": (nothing, hooked),
    "mean": (nothing, set_to(mean=(0.3,) * 3)),
    "std": (nothing, set_to(std=(0.9,) * 3)),
    "classes": (nothing, set_to(classes=[0, 1, 2])),
    "precision": (nothing, set_to(precision="bf16")),
    "autocast": (nothing, under_autocast),
    "logits": (set_to(logits=lambda out: out["logits"]), set_to(logits=lambda out: out["second"])),
    "what logits closes over": (
        set_to(logits=lambda out: list(out.values())[HEADS["head"]]),
        lambda case: HEADS.update(head=1),
    ),
    "statistics": (nothing, set_to(statistics=Source())),
    "parameters": (nothing, set_to(parameters=NormAffine(top="excluded"))),
    "batch size": (nothing, set_to(batch_size=4)),
    "values of a tensor": (nothing, written),
    "values of a later batch": (nothing, written_late),
    "order of a tensor": (nothing, turned),
    "number of images": (nothing, fewer),
    "values under a loader": (by_loader, written_below),
    "content of a data set": (by_dataset, exchanged),
}  # fmt: skip
"""What importance depends on: what to prepare, and the change."""


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A count of the times that importance was measured; nothing kept from other tests, nothing left for them."""
    calls: list[int] = []
    measure = FisherAnchor.prepare

    def counted(anchor: FisherAnchor, batches: Iterable[Outputs]) -> Memory:
        calls.append(1)
        return measure(anchor, batches)

    monkeypatch.setattr(FisherAnchor, "prepare", counted)
    HEADS["head"] = 0
    source_data.forget()
    yield calls
    source_data.forget()


@pytest.mark.parametrize("name", FLIPS)
def test_importance_follows_everything_that_it_depends_on(name: str, measures: list[int]) -> None:
    prepare, flip = FLIPS[name]
    case = Case()
    prepare(case)
    first = case.measured()
    assert torch.equal(case.measured(), first)
    assert len(measures) == 1, "the same is measured once"
    flip(case)
    found = case.measured()
    assert len(measures) == 2, f"{name} changed, and the former importance was taken"
    source_data.forget()
    assert torch.equal(found, case.measured())
    assert found.shape != first.shape or not torch.equal(found, first), "the change matters"


@pytest.mark.parametrize(
    ("name", "flip"),
    [
        ("threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
        ("tf32 in products", lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True)),
        ("tf32 in convolutions", lambda: setattr(torch.backends.cudnn, "allow_tf32", False)),
    ],
)
def test_importance_follows_switches_of_torch(name: str, flip: Callable[[], None], measures: list[int]) -> None:
    """They show in the last bits alone, on some machines; a result must not depend on what ran before it."""
    case = Case()
    case.measured()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = torch.get_num_threads(), matmul.allow_tf32, cudnn.allow_tf32
    try:
        flip()
        case.measured()
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32, cudnn.allow_tf32 = before[1:]
    assert len(measures) == 2, name


def with_other_buffers() -> nn.Module:
    net = make_net("bn")
    dict(net.named_buffers())["norm1.running_mean"].add_(1)
    return net


SETTINGS = (
    "part", "weights", "parameters", "settings", "logits", "statistics", "device", "threads", "tf32", "acceleration",
)  # fmt: skip


def stand_in(**changed: Any) -> SimpleNamespace:
    """A network as far as a key looks at it."""
    given: dict[str, Any] = {"model": make_net("bn"), "names": ("a",), "device": "cpu", "settings": (None, 1.0),
                             "logits": len, "acceleration": None, **changed}  # fmt: skip
    theta = SimpleNamespace(names=given["names"], source=lambda: torch.empty(0, device=given["device"]))
    return SimpleNamespace(model=given["model"], theta=theta, settings=given["settings"], given_logits=given["logits"],
                           acceleration=SimpleNamespace(key=given["acceleration"]))  # fmt: skip


@dataclass(frozen=True, repr=False)
class OtherAnchor(FisherAnchor):
    """Another part with the same settings."""


def key(part: Part | None = None, statistics: Statistics | None = None, **changed: Any) -> dict[str, Any]:
    """The fields of a key."""
    network: Any = stand_in(**changed)
    anchor = FisherAnchor(1.0) if part is None else part
    return dict(source_data.key_of(anchor, network, statistics or FromBatch()))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("weights", {"model": make_net("bn", seed=1)}),
        ("weights", {"model": with_other_buffers()}),
        ("parameters", {"names": ("b",)}),
        ("settings", {"settings": (None, 2.0)}),
        ("logits", {"logits": max}),
        ("device", {"device": "meta"}),
        ("acceleration", {"acceleration": (False, True)}),
    ],
)
def test_each_field_of_the_key_follows_its_own(name: str, changed: dict[str, Any]) -> None:
    """Answers on the first batch guard most of these a second time; the key alone must tell them too."""
    before, after = (key(**each) for each in ({}, changed))
    assert tuple(before) == SETTINGS
    assert {field for field in before if before[field] != after[field]} == {name}
    for other, name in (
        (key(statistics=Source()), "statistics"),
        (key(part=FisherAnchor(2.0)), "part"),
        (key(part=OtherAnchor(1.0)), "part"),
    ):
        assert {field for field in before if before[field] != other[field]} == {name}


def test_a_shuffled_loader_is_measured_in_the_order_that_came(measures: list[int]) -> None:
    case = Case(data=DataLoader(TensorDataset(images()), 8, shuffle=True, generator=torch.Generator().manual_seed(0)))
    first, second = case.measured(), case.measured()
    assert len(measures) == 2
    assert not torch.equal(first, second), "other batches have other mean gradients"


def test_equal_data_in_another_object_is_not_measured_again(measures: list[int]) -> None:
    case = Case()
    first = case.measured()
    case.data = DataLoader(TensorDataset(images(), torch.zeros(16)), batch_size=8)
    assert torch.equal(case.measured(), first)
    case.data = list(images().split(8))
    assert torch.equal(case.measured(), first)
    assert len(measures) == 1
    case.data = iter(images().split(8))
    assert torch.equal(case.measured(), first), "what can be read once is read once"
    assert len(measures) == 2


def test_what_an_adapter_holds_is_its_own(measures: list[int]) -> None:
    case = Case()
    first = case.measured()
    kept = first.clone()
    first.zero_()
    assert torch.equal(case.measured(), kept)


def test_importance_goes_with_its_model(measures: list[int]) -> None:
    case = Case()
    case.measured()
    assert len(source_data._CACHES) == 1
    copied = Case(net=copy.deepcopy(case.net), data=case.data)
    copied.measured()
    assert len(measures) == 2, "another model may compute something else with the same tensors"
    del case, copied
    gc.collect()
    assert not source_data._CACHES


# Models, images and source images of cells ----------------------------------------------------------------------------


def blurred(count: int, side: int, seed: int = 0) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (count, 3, side, side), generator=rng, dtype=torch.uint8)
    return Tensors(pixels, [at % 10 for at in range(count)], name="toy")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Two bases and two data sets, as small as they can be; nothing kept before and after."""
    for name, classes in (("toy", 10), ("toy2", 12)):
        monkeypatch.setitem(nets.NETS, name, partial(ConvNet, classes, groups=4))
        base = zoo.Base(name=name, kind="own", arch=name, tag=name, file=f"{name}.safetensors", mean=(0.0,) * 3,
                        std=(1.0,) * 3, resize=16, crop=16, classes=10)  # fmt: skip
        monkeypatch.setitem(zoo.catalog._BASES, name, base)

    def toys(root: str | None = None, *, extra: int = 0) -> Tensors:
        return blurred(40, 20, seed=extra + len(root or ""))

    monkeypatch.setitem(datasets.DATASETS, "toy", toys)
    monkeypatch.setitem(datasets.DATASETS, "toy2", lambda root=None: blurred(40, 16, seed=3))
    monkeypatch.setattr(load_cell, "_training", lambda base, root: blurred(60, 16, seed=len(base.name + (root or ""))))
    monkeypatch.delenv("POEM_DATA", raising=False)
    load_cell.clear_caches()
    yield tmp_path
    load_cell.clear_caches()


def asked(**fields: Any) -> Cell:
    values = {"base": "toy", "data": "toy", "method": "eata", "corruptions": ("gaussian_noise",), "n": 12,
              "batch_size": 4, "weights": "random", "source_images": 16, **fields}  # fmt: skip
    return Cell(**values)


def the_model(cell: Cell, machine: Machine) -> Any:
    return load_cell.load_model(cell, machine)


def the_images(cell: Cell, machine: Machine) -> Any:
    data = load_cell.CellData(cell, zoo.base(cell.base), machine)
    return data.corrupted(Shift(cell.corruptions[0], cell.severity))


def the_clean(cell: Cell, machine: Machine) -> Any:
    return load_cell.CellData(cell, zoo.base(cell.base), machine).all_stored(CLEAN)


def the_source(cell: Cell, machine: Machine) -> Any:
    return load_cell.source_images(cell, zoo.base(cell.base), machine)


def content(kept: Any) -> list[Tensor]:
    """All values of a kept thing, to compare."""
    if isinstance(kept, load_cell.LoadedModel):
        return list(kept.model.parameters())
    if isinstance(kept, datasets.Batches):
        return [batch for batch, _ in kept]
    return [kept[at] for at in range(len(kept))]


KEPT: list[tuple[Callable[[Cell, Machine], Any], str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (the_model, "base", {"base": "toy2"}, {}, {}),
    (the_model, "seed", {"seed": 1}, {}, {}),
    (the_images, "data", {"data": "toy2"}, {}, {}),
    (the_images, "dataset", {"dataset": {"extra": 1}}, {}, {}),
    (the_images, "root", {}, {"root": "elsewhere"}, {}),
    (the_images, "n", {"n": 11}, {}, {}),
    (the_images, "seed", {"seed": 1}, {}, {}),
    (the_images, "corruption", {"corruptions": ("shot_noise",)}, {}, {}),
    (the_images, "severity", {"severity": 4}, {}, {}),
    (the_images, "crop", {}, {}, {"crop": 12}),
    (the_images, "resize", {}, {}, {"resize": 18}),
    (the_images, "interpolation", {}, {}, {"interpolation": "bicubic"}),
    (the_clean, "data", {"data": "toy2"}, {}, {}),
    (the_clean, "dataset", {"dataset": {"extra": 1}}, {}, {}),
    (the_clean, "root", {}, {"root": "elsewhere"}, {}),
    (the_clean, "crop", {}, {}, {"crop": 12}),
    (the_clean, "resize", {}, {}, {"resize": 18}),
    (the_clean, "interpolation", {}, {}, {"interpolation": "bicubic"}),
    (the_source, "base", {"base": "toy2"}, {}, {}),
    (the_source, "root", {}, {"root": "elsewhere"}, {}),
    (the_source, "source_images", {"source_images": 8}, {}, {}),
    (the_source, "batch_size", {"batch_size": 8}, {}, {}),
    (the_source, "crop", {}, {}, {"crop": 12}),
]  # fmt: skip
"""How to get a kept thing, the field, and its change: of the cell, of the machine, of the base."""


@pytest.mark.parametrize(("get", "name", "cell", "machine", "base"), KEPT,
                         ids=[f"{row[0].__name__}-{row[1]}" for row in KEPT])  # fmt: skip
def test_what_cells_share_follows_everything_that_it_depends_on(
    get: Callable[[Cell, Machine], Any], name: str, cell: dict[str, Any], machine: dict[str, Any], base: dict[str, Any],
    world: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first = get(asked(), Machine())
    before = [each.clone() for each in content(first)]
    assert get(asked(), Machine()) is first, "kept"
    if base:
        monkeypatch.setitem(zoo.catalog._BASES, "toy", replace(zoo.catalog._BASES["toy"], **base))
    found = content(get(asked(**cell), Machine(**machine)))
    load_cell.clear_caches()
    fresh = content(get(asked(**cell), Machine(**machine)))
    assert len(found) == len(fresh)
    assert all(map(torch.equal, found, fresh)), f"{name} changed, and what was kept is of the former"
    same = len(found) == len(before) and all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(found, before, strict=True)
    )
    assert not same, "the change matters"


@pytest.mark.parametrize(
    ("name", "cell", "machine"), [("threads", {"threads": 2}, {}), ("device", {}, {"device": "meta"})]
)
def test_what_shows_in_the_last_bits_alone_is_made_anew(
    name: str, cell: dict[str, Any], machine: dict[str, Any], world: Path
) -> None:
    get = {"threads": the_images, "device": the_model}[name]
    assert get(asked(**cell), Machine(**machine)) is not get(asked(), Machine())


@pytest.mark.parametrize("get", [the_model, the_images, the_clean, the_source])
def test_nothing_is_kept_once_it_was_forgotten(get: Callable[[Cell, Machine], Any], world: Path) -> None:
    first = get(asked(), Machine())
    assert get(asked(), Machine()) is first
    load_cell.clear_caches()
    assert get(asked(), Machine()) is not first


def test_source_images_are_drawn_once_from_all(world: Path) -> None:
    """Not the first ones, which may all be of one class; the same ones whatever the cell's seed."""
    found = torch.cat([batch for batch, _ in the_source(asked(), Machine())])
    every = blurred(60, 16, seed=len("toy"))
    pool = torch.stack([every[at] for at in range(60)]).float() / 255
    places = [
        int(torch.stack([torch.equal(image, each) * torch.ones(()) for each in pool]).argmax()) for image in found
    ]
    assert torch.equal(pool[places], found)
    assert len(set(places)) == 16
    assert places != list(range(16))
    assert max(places) >= 16
    assert the_source(asked(seed=5, corruptions=("fog",), n=3), Machine()) is the_source(asked(), Machine())


def test_a_file_of_weights_that_was_replaced_is_loaded_anew(world: Path) -> None:
    cell, machine, file = asked(weights=None), Machine(weights=str(world)), world / "toy.safetensors"
    store_weights(file, 0)
    drawn = load_cell.load_model(asked(), machine)
    first = load_cell.load_model(cell, machine)
    assert (drawn.random, first.random, first is drawn) == (True, False, False)
    assert load_cell.load_model(cell, machine) is first
    store_weights(file, 1)
    second = load_cell.load_model(cell, machine)
    assert second.sha256 != first.sha256
    assert not torch.equal(second.model.fc.weight, first.model.fc.weight)  # type: ignore[arg-type, union-attr]


# Keys of results ------------------------------------------------------------------------------------------------------


def store_weights(file: Path, seed: int) -> None:
    from safetensors.torch import save_file

    save_file(make_net("gn", seed=seed).state_dict(), file)


def test_a_cell_is_finished_with_its_recipe_and_its_weights_alone(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, machine, store = world / "toy.safetensors", Machine(weights=str(world)), Store(world / "out")
    weights = partial(weights_sha256, machine=machine)

    def fresh() -> Cell:
        return asked(method="tent", weights=None)

    results = []
    for seed in (0, 1):
        store_weights(file, seed)
        assert store.finished(fresh(), weights) is None, "no result with these weights"
        results.append(measure(fresh(), machine))
        store.save(results[-1])
        assert store.finished(fresh(), weights) == results[-1]
    assert results[0].cell_key == results[1].cell_key == fresh().key
    assert results[0].key != results[1].key
    store_weights(file, 0)
    assert store.finished(fresh(), weights) == results[0], "the former weights have their former result"
    file.unlink()
    assert store.finished(fresh(), weights) in results, "any weights count where none are at hand"
    store_weights(file, 0)
    monkeypatch.setitem(methods.METHODS, "tent", lambda: poem.Recipe(select=EntropyBelow(0.3)))
    assert store.finished(fresh(), weights) is None
    assert store.finished(fresh()) is None
    assert fresh().key != results[0].cell_key
    assert len(list(store.results())) == 2, "the former results stay"


def test_random_weights_are_told_apart_by_their_tensors(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, weights = Store(world / "out"), partial(weights_sha256, machine=Machine())
    result = measure(asked(method="tent"))
    store.save(result)
    assert result.base["sha256"] == "random"
    assert result.base["tensors_sha256"] == weights(asked()) != weights(asked(seed=1))
    assert store.finished(asked(method="tent"), weights) == result
    monkeypatch.setitem(nets.NETS, "toy", partial(ConvNet, 10, groups=2))
    monkeypatch.setattr(nets, "build", lambda name, seed=0: make_net("gn", seed=seed + 7))
    load_cell.clear_caches()
    assert store.finished(asked(method="tent"), weights) is None, "the network is initialised otherwise"


def test_weights_are_hashed_once_and_only_where_there_is_a_result(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, machine, store = world / "toy.safetensors", Machine(weights=str(world)), Store(world / "out")
    store_weights(file, 0)
    read: list[Path] = []
    plain = Path.open

    def noted(self: Path, *args: Any, **settings: Any) -> Any:
        read.append(self)
        return plain(self, *args, **settings)

    monkeypatch.setattr(Path, "open", noted)
    assert store.finished(asked(weights=None), partial(weights_sha256, machine=machine)) is None
    assert file not in read, "there is no result to compare with"
    digests = {weights_sha256(asked(weights=None, seed=seed), machine) for seed in range(3)}
    assert len(digests) == 1
    assert read.count(file) == 1


# The tools ------------------------------------------------------------------------------------------------------------


def test_a_key_tells_values_apart() -> None:
    one = torch.ones(2, 3)
    values: list[Any] = [
        None, 0, 1, 1.0, True, "1", (1,), (1, 2), (2, 1), ((1,), 2), {"a": 1}, {"a": 2}, one, one.flatten(), one.int(),
        2 * one, torch.float32, torch.device("cpu"), Shift("fog", 5), Shift("fog", 4), len, max,
    ]  # fmt: skip
    keys = [cache_key(value=value) for value in values]
    assert len(set(keys)) == len(values)
    again = [cache_key(value=copy.deepcopy(value)) for value in values]
    assert keys == again
    assert cache_key(a=1, b=2) != cache_key(a=2, b=1)
    assert cache_key(a={"x": 1, "y": 2}) == cache_key(a={"y": 2, "x": 1})


def test_what_cannot_be_compared_is_no_part_of_a_key() -> None:
    with pytest.raises(TypeError, match=r"expected what a key can be made of in thing=, got object"):
        cache_key(thing=object())


def test_functions_are_told_apart_without_being_kept_alive() -> None:
    def made() -> Callable[[], int]:
        return lambda: 1

    first = made()
    key = cache_key(logits=first)
    assert key == cache_key(logits=first)
    assert key != cache_key(logits=made())
    del first
    gc.collect()
    assert key != cache_key(logits=made()), "not even in the place of the former in memory"
    one, other = Head(0), Head(1)
    assert cache_key(logits=one.pick) == cache_key(logits=one.pick) != cache_key(logits=other.pick)


class Head:
    """Picks a head."""

    def __init__(self, at: int) -> None:
        self.at = at

    def pick(self, out: list[Tensor]) -> Tensor:
        """The one at its place."""
        return out[self.at]


def test_a_fingerprint_knows_shapes_kinds_and_borders() -> None:
    x = torch.arange(6.0)

    def of(*parts: Tensor) -> str:
        print_ = Fingerprint()
        for part in parts:
            print_.update(part)
        return print_.hexdigest()

    found = [of(x), of(x[:3], x[3:]), of(x.view(2, 3)), of(x.view(torch.int32)), of(x.flip(0)), of(x, x[:0]), of()]
    assert len(set(found)) == len(found)
    assert of(x[::2]) == of(x[::2].contiguous())
    assert of(x.bfloat16()) == of(x.bfloat16().clone())


def test_the_values_used_last_are_kept_while_there_is_room() -> None:
    kept: LRUCache[int, int] = LRUCache(10, float)
    assert [kept.get_or_create(key, lambda key=key: key) for key in (4, 5, 4)] == [4, 5, 4]  # type: ignore[misc]
    assert kept.get_or_create(3, lambda: 3) == 3
    assert sorted(kept.keys()) == [3, 4], "the one that was used longest ago had to go"
    assert kept.get(5) is None
    assert kept.get_or_create(11, lambda: 11) == 11
    assert sorted(kept.keys()) == [3, 4], "heavier than the whole limit"
    kept.clear()
    assert len(kept) == 0
