"""What `poem.engine.anatomy` finds in twenty networks: the table that docs/architectures.md prints."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """What `anatomy` finds in one network."""

    source: str  # timm, torchvision, nets (tests/nets.py) or here (tests/engine/test_anatomy.py)
    name: str
    kind: str
    family: str
    split: str
    norms: int  # norm layers in all
    top: int  # of these that SAR, DeYO and POEM leave out
    beyond: int  # of these at or after the split
    numbers: int  # affine scalars at or after the split
    total: int  # affine scalars in all


def row(source: str, name: str, kind: str, family: str, split: str, *counts: int) -> Row:
    """A row with its counts in the order norms, top, beyond, numbers, total."""
    norms, top, beyond, numbers, total = counts
    return Row(
        source=source, name=name, kind=kind, family=family, split=split,
        norms=norms, top=top, beyond=beyond, numbers=numbers, total=total,
    )  # fmt: skip


CONV, TRANS = "convolutional", "transformer"
TABLE: tuple[Row, ...] = (
    row("timm", "resnet50", "stages", CONV, "layer4", 53, 10, 10, 22_528, 53_120),
    row("timm", "resnet50_gn", "stages", CONV, "layer4", 53, 10, 10, 22_528, 53_120),
    # stages.3 holds 9 norm layers, the final `norm` is the tenth: 41 / 25,088 stay, as in the published substring rule,
    # which names `stages.3` and `norm` both.
    row("timm", "resnetv2_50d_gn", "stages", CONV, "stages.3", 51, 10, 10, 20_480, 45_568),
    row("timm", "vit_base_patch16_224", "blocks", TRANS, "blocks.11", 25, 7, 3, 4_608, 38_400),
    row("timm", "deit_tiny_patch16_224", "blocks", TRANS, "blocks.11", 25, 7, 3, 1_152, 9_600),
    row("timm", "swin_tiny_patch4_window7_224", "stages", TRANS, "layers.3", 29, 6, 6, 10_752, 24_768),
    row("timm", "convnext_tiny", "stages", TRANS, "stages.3", 23, 5, 5, 6_912, 16_320),
    row("timm", "tf_efficientnet_lite0", "stages", CONV, "blocks.5", 49, 16, 16, 25_856, 42_016),
    row("torchvision", "vit_b_16", "blocks", TRANS, "encoder.layers.encoder_layer_11", 25, 7, 3, 4_608, 38_400),
    row("torchvision", "resnet18", "stages", CONV, "layer4", 20, 5, 5, 5_120, 9_600),
    row("torchvision", "mobilenet_v3_small", "stages", CONV, "features.9", 34, 10, 10, 7_488, 12_112),
    row("torchvision", "densenet121", "stages", CONV, "features.denseblock4", 121, 33, 33, 30_208, 83_648),
    row("nets", "bn", "stages", CONV, "layer4", 12, 3, 3, 120, 336),
    row("nets", "gn", "stages", CONV, "layer4", 12, 3, 3, 120, 336),
    row("nets", "ln", "blocks", TRANS, "blocks.7", 17, 5, 3, 96, 544),
    row("here", "four_stages", "stages", CONV, "layer4", 9, 2, 2, 128, 368),
    row("here", "equal_blocks", "blocks", TRANS, "body.blocks.5", 13, 3, 3, 48, 208),
    row("here", "vgg", "stages", CONV, "features.22", 8, 2, 2, 256, 496),
    row("here", "mlp", "blocks", CONV, "6", 3, 1, 1, 32, 96),
    row("here", "loose_lists", "stages", TRANS, "stages.3", 23, 4, 4, 256, 944),
)
