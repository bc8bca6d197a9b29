"""Compare methods on the same labelled stream, corruption by corruption, each from a fresh adapter.

Run it: python examples/03_compare.py
"""

from __future__ import annotations

import poem
from poem import zoo
from poem.streams.datasets import Stream, open_dataset
from poem.streams.orders import single


def main() -> None:
    """Digits in fog and at low contrast, through a small network with batch norm."""
    model, base = zoo.load("digits-bn")
    stream = Stream(data=open_dataset("digits-test"), order=single(["fog", "contrast"], severity=4), batch_size=128)
    print(stream.card(base=base.tag, normalisation=base.normalisation))
    table = poem.evaluate(
        model, stream, ["source", "bn", "tent", "deyo", "poem", "deyo+poem"], mean=base.mean, std=base.std,
        preset="cifar", lr=0.005,
    )  # fmt: skip
    print(table)
    best = max(table, key=lambda row: row.accuracy)
    print(f"\nbest here: {best.method}, {best.accuracy:.1f} % of {best.n} images, one seed")


if __name__ == "__main__":
    main()
