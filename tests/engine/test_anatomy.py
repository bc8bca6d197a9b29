"""Structure is found by shape: the same facts for timm's, torchvision's and hand-written networks, without weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from anatomies import TABLE, Row
from nets import make_net
from torch import Tensor, nn

from poem.engine.anatomy import Anatomy, affine, anatomy, is_norm

torch.set_num_threads(1)


class Chain(nn.Module):
    """Runs its children one after the other, whatever they are called."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x


class LooseLists(nn.Module):
    """Reductions and stages in two plain lists that take turns, as in ConvNeXt's original code."""

    def __init__(self) -> None:
        super().__init__()
        width, depth = (8, 16, 24, 32), (3, 3, 9, 3)
        stem = nn.Sequential(nn.Conv2d(3, width[0], 4, 4), nn.GroupNorm(1, width[0]))
        falls = [nn.Sequential(LastChannels(a), nn.Conv2d(a, b, 2, 2)) for a, b in pairwise(width)]
        self.reductions = nn.ModuleList([stem, *falls])
        self.stages = nn.ModuleList(
            nn.Sequential(*[nn.Sequential(nn.Conv2d(w, w, 3, 1, 1), LastChannels(w)) for _ in range(d)])
            for w, d in zip(width, depth, strict=True)
        )
        self.norm = nn.LayerNorm(width[-1])
        self.head = nn.Linear(width[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        for reduction, stage in zip(self.reductions, self.stages, strict=True):
            x = stage(reduction(x))
        logits: Tensor = self.head(self.norm(x.mean((2, 3))))
        return logits


class LastChannels(nn.LayerNorm):
    """Layer norm over the channels of an image."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class RootMeanSquare(nn.Module):
    """A norm layer that inherits from none of torch's, spelled as in language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * x * scale


def conv(wide_in: int, wide_out: int, stride: int = 1) -> list[nn.Module]:
    """Convolution, batch norm, activation."""
    return [nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False), nn.BatchNorm2d(wide_out), nn.ReLU()]


def four_stages() -> nn.Module:
    """Stages of two convolutions each."""
    pairs = [(8, 8, 1), (8, 16, 2), (16, 32, 2), (32, 32, 2)]
    layers = {f"layer{i}": nn.Sequential(*conv(a, b, s), *conv(b, b)) for i, (a, b, s) in enumerate(pairs, 1)}
    return Chain(
        stem=nn.Conv2d(3, 8, 3), norm=nn.GroupNorm(2, 8), **layers, pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(),
        fc=nn.Linear(32, 10),
    )  # fmt: skip


def equal_blocks() -> nn.Module:
    """Six blocks with norm layers of their own make, behind a wrapper."""
    blocks = nn.Sequential(
        *[nn.Sequential(RootMeanSquare(16), nn.Linear(16, 16), RootMeanSquare(16), nn.Linear(16, 16)) for _ in range(6)]
    )
    return Chain(body=Chain(flat=nn.Flatten(), embed=nn.Linear(192, 16), blocks=blocks, norm=RootMeanSquare(16)),
                 out=nn.Linear(16, 10))  # fmt: skip


def vgg() -> nn.Module:
    """A flat row of convolutions and poolings."""
    plan = (8, 0, 16, 0, 16, 16, 0, 32, 32, 0, 64, 64, 0)
    layers: list[nn.Module] = []
    width = 3
    for step in plan:
        layers += conv(width, step) if step else [nn.MaxPool2d(2)]
        width = step or width
    return Chain(features=nn.Sequential(*layers), flat=nn.Flatten(), classifier=nn.Linear(64, 10))


def mlp() -> nn.Module:
    """A flat row of linear layers with batch norm."""
    hidden = [part for _ in range(2) for part in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), *hidden, nn.Linear(16, 10))


HERE: dict[str, Callable[[], nn.Module]] = {
    "four_stages": four_stages, "equal_blocks": equal_blocks, "vgg": vgg, "mlp": mlp, "loose_lists": LooseLists,
}  # fmt: skip


@cache
def build(source: str, name: str) -> nn.Module:
    """The network of a row, on the meta device: shapes, no numbers."""
    if source == "nets":
        return make_net(name).to("meta")
    make: dict[str, Callable[[], Any]] = {
        "timm": lambda: pytest.importorskip("timm").create_model(name),
        "torchvision": lambda: pytest.importorskip("torchvision").models.get_model(name, weights=None),
        "here": lambda: HERE[name](),
    }
    if source != "here":
        pytest.importorskip(source)  # before the meta device: modules that torch 2.6 imports along read numbers
    with torch.device("meta"):
        net: nn.Module = make[source]()
    return net.eval()


def numbers(net: nn.Module, names: tuple[str, ...]) -> int:
    """How many affine scalars the named norm layers hold."""
    return sum(p.numel() for name in names for p in affine(net.get_submodule(name)).values())


def images(row: Row) -> Tensor:
    """Two inputs of the size the network takes."""
    side = {"nets": 16, "here": 32}.get(row.source, 224)
    shape = {"mlp": (8,), "equal_blocks": (3, 8, 8)}.get(row.name, (3, side, side))
    return torch.zeros(2, *shape, device="meta")


each_row = pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.source}-{row.name}")


@each_row
def test_table_row_is_what_anatomy_finds(row: Row) -> None:
    net = build(row.source, row.name)
    found = anatomy(net)
    split = found.split()
    assert row == Row(
        source=row.source,
        name=row.name,
        kind=found.kind,
        family=found.family,
        split=split,
        norms=len(found.norms),
        top=len(found.top),
        beyond=len(found.beyond(split)),
        numbers=numbers(net, found.beyond(split)),
        total=numbers(net, found.norms),
    )


@each_row
def test_registration_order_is_the_order_of_the_flow(row: Row) -> None:
    net = build(row.source, row.name)
    found = anatomy(net)
    split = found.split()
    calls: list[str] = []
    handles = [
        net.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.append(name))
        for name in dict.fromkeys((split, *found.norms))
    ]
    with torch.no_grad():
        logits = net(images(row))
    for handle in handles:
        handle.remove()
    at = calls.index(split)
    assert set(calls[:at]) == set(found.below(split)) != set()
    assert set(calls[at:]) - {split} == set(found.beyond(split)) - {split}
    assert calls.count(split) == 1
    assert found.head is not None
    head = net.get_submodule(found.head)
    assert isinstance(head, nn.Linear | nn.Conv2d)
    assert logits.shape == (2, len(head.weight))


@each_row
def test_below_and_beyond_share_out_the_norms(row: Row) -> None:
    found = anatomy(build(row.source, row.name))
    for name in found.modules:
        assert found.below(name) + found.beyond(name) == found.norms
    left = [len(found.beyond(stage)) for stage in found.stages]
    assert left == sorted(set(left), reverse=True), "every stage holds a norm layer of its own"
    assert found.norms[-len(found.top) :] == found.top


@pytest.mark.parametrize("name", ["resnet50", "resnet50_gn"])
def test_resnet50_keeps_43_layers_with_30592_numbers(name: str) -> None:
    net = build("timm", name)
    found = anatomy(net)
    rest = tuple(norm for norm in found.norms if norm not in found.top)
    assert (len(rest), numbers(net, rest)) == (43, 30_592)
    assert found.stages == ("layer1", "layer2", "layer3", "layer4")
    assert (found.head, found.channels) == ("fc", 3)


@pytest.mark.parametrize(("source", "name"), [("timm", "vit_base_patch16_224"), ("torchvision", "vit_b_16")])
def test_vit_b_keeps_the_18_layers_of_its_first_nine_blocks(source: str, name: str) -> None:
    net = build(source, name)
    found = anatomy(net)
    rest = tuple(norm for norm in found.norms if norm not in found.top)
    assert (len(rest), numbers(net, rest)) == (18, 27_648)
    assert rest == found.below(found.stages[9])


def test_resnetv2_keeps_41_layers_with_25088_numbers() -> None:
    net = build("timm", "resnetv2_50d_gn")
    found = anatomy(net)
    rest = tuple(norm for norm in found.norms if norm not in found.top)
    assert (len(rest), numbers(net, rest)) == (41, 25_088)
    assert "norm" in found.top


def test_names_do_not_matter() -> None:
    pairs = {"alpha": (3, 8), "norm4": (8, 16), "layer4": (16, 24), "omega": (24, 32)}
    net = Chain(**{name: nn.Sequential(*conv(a, b, 2), *conv(b, b)) for name, (a, b) in pairs.items()})
    assert anatomy(net).stages == tuple(pairs)
    assert anatomy(nn.Sequential(nn.Identity(), net)).split() == "1.omega"


def test_transition_that_ends_in_a_pooling_closes_its_stage() -> None:
    def dense(width: int, count: int) -> nn.Module:
        return nn.Sequential(*[part for _ in range(count) for part in conv(width, width)])

    def transition(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(a), nn.BatchNorm2d(a), nn.Conv2d(a, b, 1), nn.AvgPool2d(2, 2))

    parts = [
        dense(8, 2),
        transition(8, 9),
        dense(9, 3),
        transition(9, 10),
        dense(10, 4),
        transition(10, 11),
        dense(11, 2),
    ]
    assert anatomy(nn.Sequential(*parts)).stages == ("0", "2", "4", "6")


def test_strided_shortcut_at_the_end_of_a_block_begins_a_stage() -> None:
    def block(a: int, b: int, stride: int) -> nn.Module:
        shortcut = [nn.Conv2d(a, b, 1, stride)] if stride > 1 else []
        return nn.Sequential(nn.BatchNorm2d(a), nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), *shortcut)

    steps = ((8, 8, 1), (8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1))
    assert anatomy(nn.Sequential(*[block(*step) for step in steps])).stages == ("0", "3", "6")


def test_deep_third_stage_is_still_one_of_four() -> None:
    found = anatomy(build("timm", "resnet152"))  # layer3 holds 109 of 155 norm layers
    assert found.stages == ("layer1", "layer2", "layer3", "layer4")


def test_list_of_lists_is_entered_at_a_module_that_runs() -> None:
    found = anatomy(build("timm", "twins_svt_small"))
    assert found.stages == ("blocks.0.0", "blocks.1.0", "blocks.2.0", "blocks.3.0")


def test_two_equal_children_are_stages() -> None:
    found = anatomy(nn.Sequential(*conv(3, 8), *[nn.Sequential(*conv(8, 8), *conv(8, 8)) for _ in range(2)]))
    assert (found.kind, found.stages) == ("stages", ("3", "4"))


def test_long_stage_of_one_resolution_counts_as_blocks() -> None:
    stem = [*conv(3, 8), nn.MaxPool2d(2)]
    net = nn.Sequential(*stem, *[part for _ in range(8) for part in conv(8, 8)], nn.Flatten(), nn.Linear(8, 10))
    found = anatomy(net)
    assert found.kind == "blocks"
    assert (found.split(), found.top) == ("25", ("23", "26"))


def test_last_convolution_with_its_norm_is_no_stage() -> None:
    stages = [nn.Sequential(*conv(a, b, 2), *conv(b, b)) for a, b in ((3, 8), (8, 16), (16, 24))]
    assert anatomy(nn.Sequential(*stages, nn.Sequential(*conv(24, 64)))).split() == "2"


def test_blocks_of_the_same_class_count_even_where_some_differ() -> None:
    found = anatomy(build("timm", "convit_tiny"))  # ten blocks with gated, two with plain attention
    assert (found.split(), len(found.top)) == ("blocks.11", 7)


def test_pooler_behind_equal_blocks_is_beyond_and_no_block() -> None:
    blocks = {f"block{i}": nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for i in range(8)}
    found = anatomy(Chain(**blocks, pooler=Chain(norm=nn.LayerNorm(8), dense=nn.Linear(8, 8)), head=nn.Linear(8, 10)))
    assert (found.kind, found.stages) == ("blocks", tuple(blocks))
    assert found.beyond(found.split()) == ("block7.0", "pooler.norm")
    assert found.top == ("block6.0", "block7.0", "pooler.norm")


def test_family_follows_the_majority_of_norms() -> None:
    net = nn.Sequential(*conv(3, 8), *conv(8, 8), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 10))
    assert anatomy(net).family == "convolutional"


@pytest.mark.parametrize("count", [2, 3, 5])
def test_two_norms_or_more_leave_some_on_either_side(count: int) -> None:
    found = anatomy(nn.Sequential(nn.Conv2d(3, 4, 1), *[nn.BatchNorm2d(4) for _ in range(count)], nn.Conv2d(4, 10, 1)))
    assert found.below(found.split())
    assert found.beyond(found.split())
    assert 0 < len(found.top) < count
    assert (found.head, found.channels) == (str(count + 1), 3)


def test_single_norm_has_no_split_and_the_error_says_what_to_pass() -> None:
    found = anatomy(nn.Sequential(*conv(3, 8), nn.Flatten(), nn.Linear(8, 10)))
    assert (found.norms, found.top) == (("1",), ())
    with pytest.raises(ValueError, match="too little below the split; pass split="):
        found.split()


def test_network_without_norms_is_empty() -> None:
    found = anatomy(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10)))
    assert (found.norms, found.stages, found.top) == ((), (), ())
    assert (found.head, found.channels) == ("3", 3)
    with pytest.raises(ValueError, match="found 0 in all"):
        found.split()


def test_depth_walks_up_from_the_last_stage_and_stops_where_nothing_is_below() -> None:
    resnet, vit = anatomy(build("nets", "bn")), anatomy(build("nets", "ln"))
    assert [resnet.split(depth) for depth in (1, 2, 4)] == ["layer4", "layer3", "layer1"]
    assert vit.split(7) == "blocks.1"
    for found, depth in ((resnet, 0), (resnet, 5), (vit, 8), (vit, -1)):
        with pytest.raises(ValueError, match=f"expected depth 1..{4 if found is resnet else 7} .* got {depth}"):
            found.split(depth)


def test_any_module_may_be_the_split_and_a_wrong_name_brings_the_nearest() -> None:
    found = anatomy(build("timm", "resnet50"))
    assert found.beyond("layer4.2.conv1") == ("layer4.2.bn1", "layer4.2.bn2", "layer4.2.bn3")
    assert found.beyond("layer4.2.bn3") == ("layer4.2.bn3",)
    assert found.beyond("fc") == ()
    assert found.beyond("") == found.norms
    with pytest.raises(ValueError, match=r"got 'layer4\.2\.norm3'; nearest: .*'layer4\.2\.bn3'"):
        found.beyond("layer4.2.norm3")
    with pytest.raises(ValueError, match="expected the name of a module"):
        found.below("encoder.layer.11")


def test_facts_are_values() -> None:
    first, second = anatomy(build("nets", "gn")), anatomy(make_net("gn", seed=1))
    assert first == second
    assert hash(first) == hash(second)
    assert isinstance(first, Anatomy)


def test_anatomy_leaves_the_model_as_it_was() -> None:
    net = make_net("bn")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    anatomy(net)
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_head_is_none_where_something_else_gives_the_logits() -> None:
    assert anatomy(nn.Sequential(*conv(3, 8), nn.Flatten(), nn.Linear(8, 8), nn.Bilinear(8, 8, 10))).head is None


NORM_MAKERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "BatchNorm1d": (partial(nn.BatchNorm1d, 4), 2),
    "BatchNorm3d": (partial(nn.BatchNorm3d, 4), 2),
    "SyncBatchNorm": (partial(nn.SyncBatchNorm, 4), 2),
    "BatchNorm2d without affine": (partial(nn.BatchNorm2d, 4, affine=False), 0),
    "InstanceNorm2d": (partial(nn.InstanceNorm2d, 4, affine=True), 2),
    "GroupNorm": (partial(nn.GroupNorm, 2, 4), 2),
    "LayerNorm": (partial(nn.LayerNorm, 4), 2),
    "LayerNorm without affine": (partial(nn.LayerNorm, 4, elementwise_affine=False), 0),
    "RMSNorm": (partial(nn.RMSNorm, 4), 1),
    "hand-written": (partial(RootMeanSquare, 4), 1),
}


@pytest.mark.parametrize("name", NORM_MAKERS)
def test_norm_layers_are_recognised(name: str) -> None:
    make, parameters = NORM_MAKERS[name]
    module = make()
    assert is_norm(module)
    assert len(affine(module)) == parameters


@pytest.mark.parametrize("name", ["BatchNormAct2d", "GroupNormAct", "LayerNorm2d", "LayerNormAct2d", "RmsNorm"])
def test_norm_layers_of_timm_are_recognised(name: str) -> None:
    make = getattr(pytest.importorskip("timm.layers"), name)
    module: nn.Module = make(8, num_groups=2) if name == "GroupNormAct" else make(8)
    assert is_norm(module)
    assert "weight" in affine(module)


class Scale(nn.Module):
    """One-dimensional weight, no eps: scales, does not normalise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class PowerMean(nn.Module):
    """An eps and one parameter that is no weight: a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1))
        self.eps = 1e-6


class Gate(nn.Module):
    """An eps, a weight, and a parameter that does something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.threshold = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.eps = 1e-6


class StandardisedConv(nn.Conv2d):
    """A convolution with an eps for its weights."""

    def __init__(self) -> None:
        super().__init__(3, 4, 1)
        self.eps = 1e-6


class Wrapped(nn.Module):
    """A module with an eps and a weight that also holds a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "make", [nn.PReLU, Scale, PowerMean, Gate, StandardisedConv, Wrapped, nn.Identity, partial(nn.Linear, 4, 4)]
)
def test_other_modules_are_no_norms(make: Callable[[], nn.Module]) -> None:
    assert not is_norm(make())
