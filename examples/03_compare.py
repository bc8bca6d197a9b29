"""Compare methods on the same labelled stream, corruption by corruption, each from a fresh adapter.

Run it: python examples/03_compare.py
"""

from __future__ import annotations

import poem
from poem import zoo
from poem.streams.datasets import Stream, Tensors, mnist_digits
from poem.streams.orders import single


def main() -> None:
    """Digits in fog and at low contrast, through a small network with batch norm."""
    model, base = zoo.load("digits-bn")
    digits = mnist_digits(split="test")
    third = Tensors(digits.images[::3], digits.labels[::3], name="every third test digit")  # any images and labels
    stream = Stream(data=third, order=single(["fog", "contrast"], severity=4), batch_size=64)
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
