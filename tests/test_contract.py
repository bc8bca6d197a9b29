"""The contract: fourteen promises, every method, on a batch-norm, a group-norm and a layer-norm net.

What is particular to a method stands in its row of `ROWS`: the settings under which it learns from two small batches,
and what it promises where the general promise has no meaning for it. The tests read the row and know no method by name.
Every test first shows that something was taught, so that none holds emptily.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import toys
from adapters import adapt, on_device
from compare import assert_same_answers, assert_same_state, differing
from nets import make_net
from oracles import outcomes
from torch import Tensor, nn
from torch.nn.functional import normalize

import poem
from poem.engine.accounting import Totals
from poem.parts import (
    SAM,
    AfterImages,
    AugMix,
    ByEntropy,
    Entropy,
    EntropyBelow,
    FisherAnchor,
    LossAverageBelow,
    MeanTeacher,
    MemoryBank,
    NotRedundant,
    OpinionEntropy,
    PatchNoise,
    PLPDAbove,
    Readout,
    Recentre,
    RegionalEntropy,
    RegionConfidence,
    Robust,
    Select,
    SelfBootstrap,
    SlowTeacher,
    WaryTeacher,
)
from poem.parts.base import Memory, Outputs

pytestmark = pytest.mark.usefixtures("as_asked")
NETS = ("bn", "gn", "ln")
POINTS = 14
UNIT = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


class Each(NamedTuple):
    """A setting with a value per net."""

    bn: Any
    gn: Any
    ln: Any


TOY_LR = Each(0.02, 0.04, 0.02)
GAINS = Each(0.05, 0.0, 0.0)  # on the toy stream batch norm has most to win
NO_LOSS = Each(0.0, 0.0, 0.0)
# Under these a random net is neither sure nor unsure of every image, and each update shows in single precision.
LR = Each(0.05, 0.02, 0.002)
SHARPNESS = Each(10.0, 6.0, 9.0)
# How sharp a net of so many classes must be for the same fraction of ln C to part its images.
SPREAD = {5: Each(10.0, 6.0, 3.75), 10: SHARPNESS, 1000: Each(12.0, 10.0, 7.5)}
OPINION_SPREAD = {5: Each(10.0, 6.0, 5.625), 10: Each(10.0, 6.0, 11.25), 1000: SPREAD[1000]}
PLPD = Each(0.0, 0.0, -0.1)
COSINE = Each(0.95, 0.995, 0.999)


@dataclass(frozen=True)
class Nobody(Select):
    """Selects no sample, for methods without a threshold to lower."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return torch.zeros_like(among)


def same_image(images: Tensor, rng: torch.Generator) -> Tensor:
    """An augmentation that leaves images alone."""
    return images


# What the source model says, under the statistics that a method reads (points 5 and 11) ------------------------------


def source_logits(net: nn.Module, x: Tensor) -> Tensor:
    """The model as it came."""
    with torch.no_grad():
        logits: Tensor = copy.deepcopy(net).eval()(x)
    return logits


def batch_logits(net: nn.Module, x: Tensor) -> Tensor:
    """Batch-norm layers in training mode: each batch its own statistics."""
    twin = copy.deepcopy(net).eval()
    for module in twin.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train()
    with torch.no_grad():
        logits: Tensor = twin(x)
    return logits


def mixed_logits(net: nn.Module, x: Tensor) -> Tensor:
    """Image by image, 16 parts of the source's statistics to one of the image's own."""
    answers = []
    for image in x.split(1):
        twin = copy.deepcopy(net).eval()

        def mix(layer: nn.Module, args: tuple[Tensor]) -> None:
            values = args[0].transpose(0, 1).flatten(1)
            layer.running_mean = (16 * layer.running_mean + values.mean(1)) / 17  # type: ignore[operator]
            layer.running_var = (16 * layer.running_var + values.var(1)) / 17  # type: ignore[operator]

        for module in twin.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_pre_hook(mix)
        with torch.no_grad():
            answers.append(twin(image))
    return torch.cat(answers)


def centred_logits(net: nn.Module, x: Tensor) -> Tensor:
    """NEO where each batch is its own mean: the last layer on features less their mean."""
    twin = copy.deepcopy(net).eval()
    head = [module for module in twin.modules() if isinstance(module, nn.Linear)][-1]
    head.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(0),))
    with torch.no_grad():
        logits: Tensor = twin(x)
    return logits


def prior_corrected(logits: Tensor) -> Tensor:
    """ROID: logits times the batch's smoothed mean prediction."""
    mean = logits.softmax(1).mean(0)
    smooth = max(1 / len(logits), 1 / logits.shape[1]) / mean.max()
    return logits * (mean + smooth) / (1 + smooth * logits.shape[1])


def corrected_logits(net: nn.Module, x: Tensor) -> Tensor:
    """ROID at rest: the source model's logits, corrected by the prior."""
    return prior_corrected(batch_logits(net, x))


def corrected_pair(net: nn.Module, x: Tensor) -> Tensor:
    """ROID with a branch at rest: two heads have no common logits, so log-probabilities around zero are corrected."""
    logits = batch_logits(net, x)
    return prior_corrected(logits - logits.mean(1, keepdim=True))


def stream_logits(net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """auto at rest: statistics and prior follow the stream, the weights are the source's."""
    return [outcome.answer for outcome in outcomes("auto", net, batches, lr=0.0)]


def neighbourly_logits(net: nn.Module, x: Tensor) -> Tensor:
    """LAME: the fixed point of `y = softmax(log p + K y)`, K a Gaussian of the distance between features."""
    twin, seen = copy.deepcopy(net).eval(), list[Tensor]()
    head = [module for module in twin.modules() if isinstance(module, nn.Linear)][-1]
    head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        log_p: Tensor = twin(x).log_softmax(1)
    features = normalize(seen[0], dim=1)
    distance = (features[:, None] - features[None]).norm(dim=2)
    width = distance.sort(1).values[:, min(5, len(x) - 1) - 1].mean()
    kernel = (-(distance**2) / (2 * width**2)).exp()
    answer = log_p.exp()
    for _ in range(200):
        answer = (log_p + kernel @ answer).softmax(1)
    return answer.log()


# What a threshold is compared with (point 10) ------------------------------------------------------------------------


def softmax_entropy(net: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
    """Of the answer before any update."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1)


def opinion_entropy(net: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
    """COME: over the classes and one entry more, of constant logit ln C; both heads begin with the same logits."""
    own = batch_logits(net, x)
    unknown = torch.full_like(own[:, :1], math.log(own.shape[1]))
    return softmax_entropy(net, x, torch.cat([own, unknown], dim=1))


def regional_entropy(net: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
    """ReCAP: over a region of features as wide as source features are, times 0.05; both heads begin alike."""
    source = on_device(toys.images(8, seed=2))
    twin, seen = copy.deepcopy(net).eval(), list[Tensor]()
    head = [module for module in twin.modules() if isinstance(module, nn.Linear)][-1]
    head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    batch_logits(twin, source)
    weight = head.weight.detach().double()
    gap = weight[:, None] - weight
    moments = (0.5 * 0.05 * (gap.square() * seen[0].double().var(0, correction=0)).sum(2)).exp()
    own = batch_logits(net, x).double()
    outer = (own + 5e-4 * weight.square().sum(1)).softmax(1)
    return (outer * ((own.softmax(1) @ moments).log() - own.log_softmax(1))).sum(1)


# The table -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a method needs to learn from two small batches, and what it promises."""

    settings: Mapping[str, Any]  # given to poem.adapt; an `Each` is resolved by net
    rate: float = 1.0  # times LR
    batch: int = 8  # images in each of the two batches
    singles: int = 3  # images for the batches of one
    learns: bool | Each = True
    forgets: bool = False  # updates last as long as the call
    branch: bool | Each = False
    calibrated: bool = False  # batch norm comes with the statistics of darker images, not with random ones
    rest: Callable[[nn.Module, Tensor], Tensor] = batch_logits  # its logits when nothing has moved
    rest_of_stream: Callable[[nn.Module, list[Tensor]], list[Tensor]] | None = None  # where batches before matter
    resting: Mapping[str, Any]  # further settings under which `rest` holds
    nobody: Mapping[str, Any]  # settings under which no sample is selected
    reliable: Select | None = None  # its selection with every filter open but the entropy's; None: it has none
    entropy: Callable[[nn.Module, Tensor, Tensor], Tensor] = softmax_entropy  # what the threshold is compared with
    spread: Mapping[int, Each]  # by number of classes: how sharp a net is parted by it
    nets: tuple[str, ...] = NETS  # that it takes
    brings: tuple[str, ...] = ()  # tensors of its own parts that move beside the network's, from the first batch on
    toy: Mapping[str, Any]  # settings on the toy stream, where filters need not be as loose as on random nets
    toy_images: int = 150
    gains: Each = GAINS  # at least so much above source there
    loses: Mapping[str, float]  # net: by how much it falls below source there, as measured

    def on(self, kind: str) -> dict[str, Any]:
        """The settings for one net."""
        own = {key: getattr(value, kind) if isinstance(value, Each) else value for key, value in self.settings.items()}
        return {"lr": self.rate * getattr(LR, kind), **own}

    def has_branch(self, kind: str) -> bool:
        """Whether it has a branch on one net."""
        return bool(getattr(self.branch, kind)) if isinstance(self.branch, Each) else self.branch

    def at_rest(self, net: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        """What it answers to batch after batch when nothing has moved."""
        if self.rest_of_stream is not None:
            return self.rest_of_stream(net, batches)
        return [self.rest(net, batch) for batch in batches]


NO_THRESHOLD = {"select": Nobody()}
THRESHOLD = {"threshold": 0.0}
PLAIN = Row(settings={}, resting={}, nobody={}, spread=SPREAD, toy={}, loses={})
EVERYONE = replace(PLAIN, nobody=NO_THRESHOLD)
FILTERED = replace(PLAIN, nobody=THRESHOLD, reliable=EntropyBelow(0.4))
NOT_REDUNDANT = Each(*[EntropyBelow(0.4) & NotRedundant(cosine) for cosine in COSINE])
SHAPED = Each(*[EntropyBelow(0.5) & PLPDAbove(drop) for drop in PLPD])
OFFICIAL = Each(
    *[EntropyBelow(0.4) & PLPDAbove(drop) & NotRedundant(cosine) for drop, cosine in zip(PLPD, COSINE, strict=True)]
)
OFFICIAL_V2 = Each(*[EntropyBelow(0.4, first=0.5) & PLPDAbove(drop) for drop in PLPD])
ANCHOR = {"minimise": Entropy() + FisherAnchor(20.0), "source_data": [toys.images(8, seed=2)]}
ETA = replace(
    FILTERED,
    settings={"select": NOT_REDUNDANT},
    reliable=EntropyBelow(0.4) & NotRedundant(2.0),
    toy={"select": EntropyBelow(0.4) & NotRedundant(0.6)},
)
OPINIONS = Each(*[EntropyBelow(fraction, score=OpinionEntropy()) for fraction in (0.4, 0.4, 0.5)])
SOURCE = {"source_data": [toys.images(8, seed=2)]}
REGION = RegionalEntropy(0.05)
VIEWS = AugMix(views=4, width=1, pre="crop")
TOY_ANCHOR = {"minimise": Entropy() + FisherAnchor(1.0), "source_data": toys.Clean()}

SETTINGS: dict[str, Row] = {
    # On batch norm it learns nothing. At rest it answers with the stream's statistics and its prior, which depend on
    # the batches before: the reference says what they make of the source's weights.
    "auto": replace(
        ETA, learns=Each(False, True, True), branch=Each(False, True, True), calibrated=True,
        rest_of_stream=stream_logits, toy={**ETA.toy, "lr": 0.001},  # its step is Adam's
    ),
    "source": replace(PLAIN, learns=False, rest=source_logits, gains=NO_LOSS),
    "eta": ETA,
    "eata": replace(ETA, settings={**ETA.settings, **ANCHOR}, toy={**ETA.toy, **TOY_ANCHOR}),
    # The loss of a sharp random net is far below what SAR takes for a collapse, and a radius of 0.05 is large on it.
    "sar": replace(FILTERED, settings={"recover": LossAverageBelow(-1.0), "step": SAM(0.01)}),
    "deyo": replace(FILTERED, settings={"select": SHAPED}, reliable=EntropyBelow(0.5) & PLPDAbove(-2.0)),
    # Its readout is a forward pass and a correction: at rest it answers the source's logits, corrected.
    "roid": replace(EVERYONE, settings=UNIT, rate=0.1, rest=corrected_logits, toy=UNIT),
    "cmf": replace(EVERYONE, settings=UNIT, rate=0.1, rest=corrected_logits, toy=UNIT),
    # One image at a time, back to the source after each.
    "memo": replace(
        EVERYONE, settings={**UNIT, "views": VIEWS}, rate=0.05, batch=2, singles=2, forgets=True, rest=mixed_logits,
        toy={**UNIT, "views": VIEWS, "lr": 0.00025}, toy_images=12, gains=NO_LOSS,
    ),
    # Its teacher answers, and for an unsure source over augmented copies: at rest, with copies alike, the source.
    "cotta": replace(
        EVERYONE, settings={**UNIT, "teacher": MeanTeacher(momentum=0.9, copies=2, unsure=0.9)},
        resting={"teacher": MeanTeacher(copies=2, unsure=1.1, augment=same_image)}, rate=0.1,
        toy={**UNIT, "teacher": MeanTeacher(momentum=0.99)},
    ),
    "rdumb": ETA,
    # Neighbours agree where classes come in runs; these digits come shuffled.
    "lame": replace(
        PLAIN, learns=False, rest=neighbourly_logits, loses={"bn": -0.553, "gn": -0.047, "ln": -0.227}
    ),
    # It learns from a bank of images; at rest its teacher keeps the source's statistics.
    "rotta": replace(
        EVERYONE, settings={**UNIT, "views": MemoryBank(8, every=4), "teacher": SlowTeacher(0.9)}, singles=5, rate=0.1,
        rest=source_logits, resting={"statistics": Robust(0.0)},
        toy={**UNIT, "views": MemoryBank(every=50), "teacher": SlowTeacher(0.9)}, gains=Each(0.01, 0.0, 0.0),
    ),
    "petta": replace(
        EVERYONE, rate=0.1, rest=source_logits, resting={"statistics": Robust(0.0)},
        settings={
            **UNIT, **SOURCE, "views": MemoryBank(8, every=1, by_age=False), "teacher": WaryTeacher(0.9),
        },
        toy={**UNIT, "source_data": toys.Clean(), "teacher": WaryTeacher(0.9)}, gains=Each(0.01, 0.0, 0.0),
    ),
    "come": replace(EVERYONE, entropy=opinion_entropy),
    "zerosiam": replace(EVERYONE, brings=("minimise.predictor",)),
    # Amounts of noise are kept at one scale: they move only where there are several.
    "spa": replace(
        EVERYONE, settings={"minimise": SelfBootstrap(noise=PatchNoise(4))}, rate=0.1, batch=16,
        brings=("minimise.predictor", "minimise.noise.amount"), toy={"minimise": SelfBootstrap(noise=PatchNoise(4))},
    ),
    # It masks what a vision transformer attends to; its step is Adam's.
    "rem": replace(EVERYONE, nets=("ln",), toy={"lr": 0.001}),
    # The sharp layers of random nets make a region of the recipe's size too wide to be certain in.
    "recap": replace(
        FILTERED, entropy=regional_entropy, spread=SPREAD, reliable=EntropyBelow(0.4, score=REGION),
        settings={
            **SOURCE, "select": EntropyBelow(0.4, score=REGION), "weigh": ByEntropy(0.4, score=REGION, most=3.0),
            "minimise": RegionConfidence(score=REGION),
        },
        toy={"source_data": toys.Clean()},
    ),
    "protected": replace(
        FILTERED, singles=8, settings={**SOURCE, "select": AfterImages(2) & EntropyBelow(0.4)},
        reliable=AfterImages(1) & EntropyBelow(0.4), toy={"source_data": toys.Clean()},
    ),
    # At rest, where a batch's own mean stands for the stream's.
    "neo": replace(
        PLAIN, learns=False, rest=centred_logits, resting={"readout": Readout("first", Recentre(0.0))},
        gains=Each(0.03, 0.0, 0.02),
    ),
    "poem-official": replace(
        FILTERED, branch=True, settings={"select": OFFICIAL, "recover": LossAverageBelow(-1.0, of="first")},
        reliable=EntropyBelow(0.4) & PLPDAbove(-2.0) & NotRedundant(2.0),
        toy={"select": EntropyBelow(0.4) & PLPDAbove(0.2) & NotRedundant(0.6)},
    ),
    "poem-official-v2": replace(
        FILTERED, branch=True, settings={"select": OFFICIAL_V2}, nobody=NO_THRESHOLD,  # it has two thresholds
        reliable=EntropyBelow(0.4) & PLPDAbove(-2.0),
    ),
}  # fmt: skip
SUFFIXES = ("+poem", "+poem-i", "+poem-ii", "*")
BRANCHED = ("+poem", "+poem-ii")
# What a suffix changes beyond the base's row.
DIFFERENT: dict[str, dict[str, Any]] = {
    # Everyone has nothing to explore: Tent is filtered first.
    **{
        f"{host}{suffix}": {"nobody": THRESHOLD, "reliable": EntropyBelow(0.4)}
        for host in ("tent", "rpl", "rem") for suffix in SUFFIXES[:3]
    },
    **{
        f"come{suffix}": {
            "settings": {"select": OPINIONS}, "nobody": THRESHOLD, "reliable": OPINIONS.gn, "spread": OPINION_SPREAD
        }
        for suffix in SUFFIXES[:3]
    },
    **{f"{host}{suffix}": {"rest": corrected_pair} for host in ("roid", "cmf") for suffix in BRANCHED},
}  # fmt: skip


def plain_row(method: str) -> Row:
    """For a method that random nets and digits need no settings for."""
    recipe = poem.recipe(method)
    if not recipe.learns:
        return replace(PLAIN, learns=False)
    return replace(EVERYONE if recipe.select.margin is None else FILTERED, branch=recipe.branch is not None)


def row_of(method: str) -> Row:
    """The row of a host method, with what its suffix changes."""
    suffix = next((ending for ending in SUFFIXES if method.endswith(ending)), "")
    host = method.removesuffix(suffix) if suffix else method
    row = SETTINGS.get(host) or plain_row(host)
    branch = suffix in BRANCHED or row.branch
    return replace(row, branch=branch, **DIFFERENT.get(method, {}))


METHODS = tuple(poem.methods())
CLIPPED = {"clipped_methods:tent": "tent", "clipped_methods:eta_poem": "eta+poem"}  # a part that no method has
ROWS = {method: row_of(method) for method in METHODS} | {name: row_of(like) for name, like in CLIPPED.items()}


class Case(NamedTuple):
    """A method on a net."""

    method: str
    kind: str

    @property
    def row(self) -> Row:
        return ROWS[self.method]

    @property
    def learns(self) -> bool:
        """Whether it learns on this net."""
        learns = self.row.learns
        return bool(getattr(learns, self.kind)) if isinstance(learns, Each) else learns

    def net(self) -> nn.Module:
        """A fresh copy of the made-up net."""
        return self.made_net(10, SHARPNESS)

    def made_net(self, classes: int, sharpness: Each) -> nn.Module:
        """A made-up net of so many classes, so sharp, as the row wants it."""
        net = make_net(self.kind, classes=classes, sharpness=getattr(sharpness, self.kind))
        return on_device(toys.calibrated(net) if self.row.calibrated else net)

    def adapter(self, net: nn.Module | None = None, **changes: Any) -> poem.Adapter:
        """A fresh adapter with the row's settings, on its own copy of the net unless one is given."""
        return adapt(net or self.net(), self.method, **{**self.row.on(self.kind), **changes})

    def batches(self) -> list[Tensor]:
        """Two small batches."""
        return list(on_device(toys.images(2 * self.row.batch, seed=1)).split(self.row.batch))

    def fresh(self) -> Run:
        """The two batches through a fresh adapter, once per session."""
        return run_fresh(self)


class Run(NamedTuple):
    """What an undisturbed run gave."""

    answers: list[Tensor]
    state: dict[str, Any]
    totals: Totals


@cache
def run_fresh(case: Case) -> Run:
    adapter = case.adapter()
    answers = [adapter(batch) for batch in case.batches()]
    assert (adapter.totals.taught > 0) == case.learns, "the row's settings teach nothing"
    return Run(answers, adapter.state_dict(), adapter.totals)


CASES = [Case(method, kind) for method in ROWS for kind in ROWS[method].nets]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}/{case.kind}")


def moved(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The moving tensors of a state, by name."""
    return {k.removeprefix("moved/"): v for k, v in state["tensors"].items() if k.startswith("moved/")}


def source_of(net: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """The values from which the network's tensors of these names start."""
    own = dict(net.named_parameters())
    return {name: own[name.removeprefix("branch.")].detach() for name in names}


def moved_own(case: Case, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The network's moving tensors, without those that parts brought."""
    return {name: tensor for name, tensor in moved(state).items() if name not in case.row.brings}


# The promises --------------------------------------------------------------------------------------------------------


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    assert set(SETTINGS) <= set(METHODS)
    points = [name for name in globals() if name.startswith("test_") and name[5:7].isdigit()]
    assert len(points) == POINTS
    for method, row in ROWS.items():
        for kind in set(NETS) - set(row.nets):
            with pytest.raises(ValueError, match="use a method without tokens"):
                adapt(on_device(make_net(kind)), method)


@each_case
def test_01_it_learned(case: Case) -> None:
    row, run = case.row, case.fresh()
    assert (run.totals.taught > 0) == (run.totals.updates > 0) == case.learns
    still = case.adapter(lr=0.0)
    unmoved = [still(batch) for batch in case.batches()]
    assert any(not torch.equal(a, b) for a, b in zip(run.answers, unmoved, strict=True)) == case.learns
    left = differing(moved_own(case, run.state), source_of(case.net(), list(moved_own(case, run.state))))
    assert bool(left) == (case.learns and not row.forgets)
    brought = [differing({name: moved(run.state)[name]}, {name: still._state.source[name]}) for name in row.brings]
    assert all(brought), "what a part brought did not move"


@each_case
def test_02_only_declared_tensors_moved(case: Case) -> None:
    net, during = case.net(), set[str]()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    own = dict(net.named_parameters())

    def compare(module: nn.Module, _: object) -> None:
        put = {name: tensor for name, tensor in module.named_parameters() if tensor is not own[name]}
        during.update(name for name in put.keys() - during if not torch.equal(put[name], own[name]))

    adapter = case.adapter(net)
    net.register_forward_pre_hook(compare)
    for batch in case.batches():
        adapter(batch)
        assert differing(net.state_dict(), before) == []
    assert bool(during) == case.learns
    assert during <= set(adapter.adapted)
    assert list(moved(adapter.state_dict())) == adapter.adapted
    names = {name.removeprefix("branch.") for name in adapter.adapted}
    assert names - own.keys() == set(case.row.brings)


@each_case
def test_03_reset_is_a_fresh_adapter(case: Case) -> None:
    adapter = case.adapter()
    clean = adapter.state_dict()
    adapter(case.batches()[-1])
    assert (adapter.totals.taught > 0) == case.learns
    adapter.reset()
    assert_same_state(adapter.state_dict(), clean)
    assert adapter.totals.batches == adapter.totals.forwards == adapter.totals.taught == 0
    assert_same_answers([adapter(batch) for batch in case.batches()], case.fresh().answers)
    assert_same_state(adapter.state_dict(), case.fresh().state)


def portrait(net: nn.Module) -> list[Any]:
    """Everything about a model that a borrower could have changed, values aside."""
    modules = [
        (name, id(module), module.training, {k: id(v) for k, v in vars(module).items()}, len(module._forward_hooks),
         len(module._forward_pre_hooks), len(module._backward_hooks), "forward" in vars(module))
        for name, module in net.named_modules()
    ]  # fmt: skip
    parameters = [(n, id(p), p.requires_grad, p.grad, p._version) for n, p in net.named_parameters()]
    return [modules, parameters, [(name, id(buffer), buffer._version) for name, buffer in net.named_buffers()]]


@each_case
def test_04_unload_gives_back_the_very_model(case: Case) -> None:
    net = case.net()
    children = list(net.children())
    children[0].train()
    children[-1].requires_grad_(False)
    net.register_forward_hook(lambda *_: None)
    like, values = portrait(net), {name: tensor.clone() for name, tensor in net.state_dict().items()}
    adapter = case.adapter(net)
    adapter(case.batches()[0])
    assert (adapter.totals.taught > 0) == case.learns
    assert adapter.unload() is net
    assert portrait(net) == like
    assert differing(net.state_dict(), values) == []


@each_case
def test_05_learning_rate_zero_answers_as_the_source(case: Case) -> None:
    net = case.net()
    adapter = case.adapter(net, lr=0.0, **case.row.resting)
    for batch, expected in zip(case.batches(), case.row.at_rest(net, case.batches()), strict=True):
        torch.testing.assert_close(adapter(batch).softmax(1), expected.softmax(1), atol=2e-5, rtol=0)
    assert (adapter.totals.taught > 0) == case.learns


@each_case
def test_06_no_sample_selected_nothing_moves(case: Case) -> None:
    assert (case.fresh().totals.taught > 0) == case.learns
    net = case.net()
    adapter = case.adapter(net, **case.row.nobody)
    for batch in case.batches():
        assert bool(adapter(batch).isfinite().all())
        assert not bool(adapter.last.selected.any())
        assert adapter.last.skipped == ("nothing selected" if case.learns else None)
    assert adapter.totals.updates == adapter.totals.taught == adapter.totals.backwards == 0
    left = moved_own(case, adapter.state_dict())
    assert differing(left, source_of(net, list(left))) == []
    now, start = moved(adapter.state_dict()), adapter._state.source
    assert differing({name: now[name] for name in case.row.brings}, {n: start[n] for n in case.row.brings}) == []


@each_case
def test_07_a_batch_of_one(case: Case) -> None:
    adapter = case.adapter()
    for image in on_device(toys.images(case.row.singles, seed=20)).split(1):
        answer = adapter(image)
        assert answer.shape == (1, 10)
        assert bool(answer.isfinite().all())
        assert bool(adapter.last.skipped) == (case.learns and not adapter.last.updates)  # learns, or says why
    assert (adapter.totals.taught > 0) == (adapter.totals.updates > 0) == case.learns


@each_case
def test_08_the_callers_modes_and_chance_are_respected(case: Case) -> None:
    expected, before = case.fresh(), torch.get_rng_state()
    for mode in (torch.no_grad, torch.inference_mode):
        net = case.net()
        with mode():
            adapter = case.adapter(net)
            answers = [adapter(batch.clone()) for batch in case.batches()]
            assert not torch.is_grad_enabled()
        assert (adapter.totals.taught > 0) == case.learns
        assert not any(answer.requires_grad for answer in answers)
        assert_same_answers(answers, expected.answers)
        assert_same_state(adapter.state_dict(), expected.state)
    assert torch.equal(torch.get_rng_state(), before)


@each_case
def test_09_a_saved_state_goes_on_elsewhere(case: Case, tmp_path: Path) -> None:
    here, there = case.adapter(), case.adapter(seed=5)
    first, second = case.batches()
    here(first)
    here.save(tmp_path / "state")
    there.load(tmp_path / "state")
    assert_same_state(there.state_dict(), here.state_dict())
    assert_same_answers([there(second)], case.fresh().answers[1:])
    assert_same_state(there.state_dict(), case.fresh().state)
    assert (there.totals.taught > 0) == case.learns


@each_case
def test_10_the_threshold_follows_the_number_of_classes(case: Case) -> None:
    for classes, sharpness in case.row.spread.items():
        net = case.made_net(classes, sharpness)
        settings = case.row.on(case.kind)
        if case.row.reliable is None:  # no entropy threshold: it says so, and works at any number of classes
            with pytest.raises(ValueError, match="needs an EntropyBelow"):
                adapt(net, case.method, **settings, threshold=0.4)
            adapter = adapt(net, case.method, **settings)
            assert adapter(case.batches()[0]).shape == (case.row.batch, classes)
        else:
            adapter = adapt(net, case.method, **{**settings, "select": case.row.reliable}, threshold=0.4)
            adapter(on_device(toys.images(16, seed=3)))
            entropy = case.row.entropy(net, on_device(toys.images(16, seed=3)), adapter.last.first_logits)
            below = entropy < 0.4 * math.log(classes)
            assert 0 < int(below.sum()) < 16
            assert torch.equal(adapter.last.selected, below & case.learns)
        assert (adapter.totals.taught > 0) == case.learns


@each_case
def test_11_the_branch_starts_as_the_main_head(case: Case) -> None:
    net, (first, _) = case.net(), case.batches()
    adapter = case.adapter(net, **case.row.resting)
    own = {name for name in adapter.adapted if name.startswith("branch.")}
    assert bool(own) == case.row.has_branch(case.kind)
    assert own.isdisjoint(f"branch.{name}" for name in adapter.adapted)  # what the branch has, the main group has not
    with adapter.frozen():
        (expected,) = case.row.at_rest(net, [first])
        torch.testing.assert_close(adapter(first).softmax(1), expected.softmax(1), atol=2e-5, rtol=0)
    adapter(first)
    assert not any("runs as a second pass" in note for note in adapter.last.notes), "one pass serves both heads"
    # It is there to move away from the main head, and does.
    run = case.fresh()
    assert (run.totals.taught > 0) == case.learns
    left = own & set(differing(moved_own(case, run.state), source_of(net, list(moved_own(case, run.state)))))
    assert bool(left) == (case.row.has_branch(case.kind) and not case.row.forgets)


@cache
def toy_source(kind: str, count: int) -> float:
    """The source model's accuracy on the first images of the toy stream."""
    x, y = map(on_device, toys.shifted(count))
    return toys.accuracy(source_logits(on_device(toys.trained(kind)), x), y)


@each_case
def test_12_the_toy_stream_does_not_fall_below_source(case: Case) -> None:
    x, y = map(on_device, toys.shifted(case.row.toy_images))
    settings = {"lr": case.row.rate * getattr(TOY_LR, case.kind), **case.row.toy}
    adapter = adapt(on_device(toys.trained(case.kind)), case.method, **settings)
    right = toys.accuracy(torch.cat([adapter(batch) for batch in x.split(50)]), y)
    assert (adapter.totals.taught > 0) == case.learns
    gain, expected = right - toy_source(case.kind, case.row.toy_images), case.row.loses.get(case.kind)
    if expected is None:
        assert gain >= getattr(case.row.gains, case.kind)
    else:
        assert gain < 0
        assert gain == pytest.approx(expected, abs=0.02)


@each_case
def test_13_a_broken_image_is_named_and_moves_nothing(case: Case) -> None:
    adapter, (first, second), index = case.adapter(), case.batches(), case.row.batch - 1
    answers = [adapter(first)]
    before, totals = adapter.state_dict(), adapter.totals
    assert (totals.taught > 0) == case.learns
    for bad in (torch.nan, torch.inf):
        broken = second.clone()
        broken[index, 1, 4, 5] = bad
        with pytest.raises(ValueError, match=f"NaN or Inf in sample {index} "):
            adapter(broken)
        assert_same_state(adapter.state_dict(), before)
        assert adapter.totals == totals
    assert_same_answers([*answers, adapter(second)], case.fresh().answers)


@each_case
def test_14_two_adapters_share_a_model(case: Case) -> None:
    net, (first, second) = case.net(), case.batches()
    one, other = case.adapter(net), case.adapter(net)
    # Each is overtaken by the other, in either order, and notices nothing.
    answers = {"one": [one(first)], "other": [other(first), other(second)]}
    answers["one"].append(one(second))
    for adapter, given in ((one, answers["one"]), (other, answers["other"])):
        assert (adapter.totals.taught > 0) == case.learns
        assert_same_answers(given, case.fresh().answers)
        assert_same_state(adapter.state_dict(), case.fresh().state)
