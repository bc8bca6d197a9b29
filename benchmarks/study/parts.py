"""The parts of the study, in the order in which they matter: which rows are run on which streams of which networks."""

from __future__ import annotations

from dataclasses import dataclass

from auto.rows import seeds
from auto.streams import WORST

from study import rows

SUITES = {
    "imagenet-3k": ("resnet50-keras", "vit-tiny16"),
    "cifar10": ("cifar10-bn", "cifar10-gn", "cifar10-vit"),
    "tiny-imagenet": ("effnet-lite0", "effnet-lite1", "effnet-lite2"),
}
"""The networks of each suite."""
IMAGES = {"imagenet-3k": 3000, "cifar10": 2000, "tiny-imagenet": 2560}
"""Images of a stream."""
SINGLE_IMAGES = {"imagenet-3k": 250, "cifar10": 500}
"""Images of a stream that come one by one."""
GRADIENT_IMAGES = 512
BATCH_IMAGES = 1000
"""Images of a stream in batches of other sizes than 64."""
FOUR = ("gaussian_noise-5", "defocus_blur-5", "snow-5", "contrast-5")
"""The corruptions of the paper's ablations."""
FIVE = ("clean", *FOUR)
REST = tuple(name for name in WORST if name not in FOUR)
ALL = FIVE + REST
SCENARIOS = ("label_shift", "mixed", "continual")
BATCHES = (4, 16, 128)
"""Batch sizes beside 64."""
LARGE_FIRST = ("resnet50-keras", "vit-tiny16", "effnet-lite0")


@dataclass(frozen=True)
class Block:
    """Rows on streams of networks; every network runs those rows that fit it."""

    nets: tuple[str, ...]
    streams: tuple[str, ...]
    rows: tuple[str, ...]
    batches: tuple[int, ...] = (64,)
    images: int | None = None
    """Images of a stream where they are not the suite's number."""
    one_seed: bool = False

    def seeds(self, net: str) -> tuple[int, ...]:
        """The seeds of a network here."""
        return seeds(net)[:1] if self.one_seed else seeds(net)


def suite_of(net: str) -> str:
    """The suite that a network belongs to."""
    return next(suite for suite, nets in SUITES.items() if net in nets)


_CIFAR = SUITES["cifar10"]
_IMAGENET = SUITES["imagenet-3k"]
PARTS: dict[str, tuple[Block, ...]] = {
    "imagenet": (Block(_IMAGENET, ALL, rows.MAIN),),
    "cifar10": (Block(_CIFAR, ALL, rows.MAIN),),
    "lite0": (Block(("effnet-lite0",), ALL, rows.MAIN),),
    "records": (Block((*_IMAGENET, *_CIFAR), FOUR, rows.RECORDED),),
    "variants": (
        Block(_IMAGENET, FOUR, rows.VARIANTS),
        Block(_CIFAR, FOUR, rows.DECIDING),
        Block(_CIFAR, FOUR, rows.VARIANTS, one_seed=True),
    ),
    "statistics": (
        Block(("resnet50-keras",), FIVE, rows.STATISTICS_FIRST),
        Block(("cifar10-bn",), FIVE, rows.STATISTICS_FIRST),
        Block(("cifar10-bn",), REST, rows.STATISTICS_FIRST, one_seed=True),
        Block(("effnet-lite0",), FIVE, rows.STATISTICS_FIRST),
        Block(("resnet50-keras",), FOUR, rows.STATISTICS_THEN),
        Block(("cifar10-bn",), FOUR, rows.STATISTICS_THEN + rows.STATISTICS_LAST, one_seed=True),
        Block(("effnet-lite0",), FOUR, tuple(row + rows.AUTO_STATISTICS for row in ("eata", "eata+poem"))),
    ),
    "scenarios": (
        Block((*LARGE_FIRST, *_CIFAR), SCENARIOS, rows.FIRST),
        Block(LARGE_FIRST, ("recurring-short",), rows.FIRST),
        Block(_CIFAR, ("recurring",), rows.FIRST, one_seed=True),
    ),
    "single": tuple(
        Block(SUITES[suite], FOUR, rows.FEW, (1,), SINGLE_IMAGES[suite], one_seed=True)
        for suite in ("imagenet-3k", "cifar10")
    ),
    "newest": (Block(_IMAGENET, FIVE, rows.NEWEST), Block(_CIFAR, FIVE, rows.NEWEST, one_seed=True)),
    "batches": (
        Block(_IMAGENET, FOUR, rows.FEW, BATCHES[1:], BATCH_IMAGES),
        Block(_CIFAR, FOUR, rows.FEW, BATCHES, BATCH_IMAGES, one_seed=True),
    ),
    "lites": (Block(("effnet-lite1", "effnet-lite2"), ALL, ("bn", *rows.FEW)),),
    "gradients": (Block(("resnet50-keras", *_CIFAR), FOUR, rows.GRADIENTS, images=GRADIENT_IMAGES, one_seed=True),),
    "statistics-rest": (Block(("resnet50-keras", "effnet-lite0"), REST, rows.STATISTICS_FIRST[:1]),),
}
"""What matters most comes first."""
LEFT_OUT = {
    "ResNet-50 and Lite0 with the statistics of `auto`, but for `bn`, on the eleven other corruptions":
        "these rows run five copies of the batch with their gradients, 60 to 470 s a cell; `tent` and `poem` are run "
        "on clean and four corruptions, `tent+poem`, `eata`, `deyo` and their `+poem` on four (Lite0: `eata`)",
    "`sar` and `roid` with the statistics of `auto` on ResNet-50 and Lite0":
        "the dearest of them; both are run on `cifar10-bn`",
    "`rotta` with the statistics of `auto`": "its teacher's statistics are part of it",
    "seeds 1 and 2 of settings, newest methods and most statistics on CIFAR-10":
        "three seeds are kept for the rows that the questions are answered by; the others have the paired error alone",
    "DeYO and DeYO+POEM on single images, other batch sizes, Lite1 and Lite2": "four methods tell what the size does",
    "single images beyond 250 (CIFAR-10: 500), other batch sizes beyond 1,000 images of a stream, and batches of 4 "
    "on ImageNet": "a batch of one or four images takes as long as one of 64",
    "gradient norms on ViT-Tiny": "Figure 3 of the paper is of a ResNet",
}  # fmt: skip
"""What the plan does not have, and why."""
