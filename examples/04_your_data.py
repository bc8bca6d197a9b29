"""Your own images in your own folders: corrupt them, open them, adapt on them, and predict without labels.

Run it: python examples/04_your_data.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from PIL import Image

import poem
from poem import zoo
from poem.cli.main import main as command
from poem.streams.datasets import Stream, image_folder, open_dataset
from poem.streams.orders import single


def some_photos(top: Path, count: int = 160) -> None:
    """Stands in for your data: class folders of image files."""
    digits = open_dataset("digits-test")
    for index in range(0, len(digits), len(digits) // count):
        folder = top / str(digits.labels[index])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits[index].permute(1, 2, 0).numpy()).save(folder / f"{index:04d}.png")


def main() -> None:
    """Three ways: as a labelled data set, as a corrupted copy of it, and as files without labels."""
    with tempfile.TemporaryDirectory() as place:
        top = Path(place)
        some_photos(top / "photos")
        model, base = zoo.load("digits-bn")

        data = image_folder(top / "photos")  # labels are the folders' ranks by name
        for shift in ("clean", "contrast"):
            adapter = poem.adapt(model, "poem", mean=base.mean, std=base.std, preset="cifar")
            right = 0
            for images, labels, _ in Stream(data=data, order=single([shift], severity=4), batch_size=32):
                right += int((adapter(images).argmax(1) == labels).sum())
            print(f"{shift}: {100 * right / len(data):.1f} % of {len(data)}")
            adapter.unload()

        answers = top / "predictions.csv"
        arguments = ["predict", str(top / "photos"), "--model", "digits-bn", "--preset", "cifar", "-o", str(answers)]
        command(arguments)  # the same on the command line: poem predict photos/ --model digits-bn
        print(answers.read_text().splitlines()[1])


if __name__ == "__main__":
    main()
