"""Trees in the layout, and of the size, of ImageNet-C, -A, -R, -Sketch, ImageNet val and CIFAR-100-C, from small data.

They let the full scale run unmodified without the real sets: every folder, count and name that a loader checks is
there. Images are Tiny-ImageNet's (enlarged to 224) and CIFAR-10's; a few of each class are real files, the
rest are links to them, and classes that Tiny-ImageNet lacks use another's images, so accuracies mean nothing.

    python benchmarks/stand_in_trees.py --tiny ROOT/tiny-imagenet-val.tar.xz --cifar10 ROOT/cifar10-jpeg.tar.xz TREES
    POEM_DATA=TREES poem reproduce all --scale full --limit 256 --set weights=random
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import poem
from poem.streams import CORRUPTIONS
from poem.streams.datasets import image_folder
from poem.streams.datasets.classes import IMAGENET_A, IMAGENET_R, TINY_IMAGENET

SEVERITY = 5


def class_names() -> list[str]:
    """The 1000 wnids, sorted, from timm."""
    from timm.data.imagenet_info import ImageNetInfo

    return sorted(ImageNetInfo("imagenet-1k").label_names())


def stored(images: torch.Tensor, folder: Path, names: Sequence[str]) -> list[Path]:
    """Images as JPEG files, quality 85."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in names]
    for image, path in zip(images, paths, strict=True):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path, "JPEG", quality=85)
    return paths


def link_tree(top: Path, classes: Sequence[str], sizes: Sequence[int], files: Sequence[Sequence[Path]]) -> None:
    """A folder per class with as many names as it should hold, each a link to one of the class's real files."""
    for number, (name, size) in enumerate(zip(classes, sizes, strict=True)):
        folder = top / name
        folder.mkdir(parents=True, exist_ok=True)
        for at in range(size):
            source = files[number][at % len(files[number])]
            target = folder / f"ILSVRC2012_val_{number * 100 + at:08d}.JPEG"
            if not target.exists():
                os.link(source, target)


def spread(total: int, parts: int) -> list[int]:
    """A total in nearly equal whole parts."""
    return [total // parts + (at < total % parts) for at in range(parts)]


def one_shift(task: tuple[str, torch.Tensor, Path, list[str], list[int]]) -> str:
    """Make the tree of one corruption, or of clean images; runs in a process of its own."""
    shift, images, out, classes, owner = task
    torch.set_num_threads(1)
    made = images if shift == "clean" else poem.corrupt(images, shift, SEVERITY)
    per_class = len(images) // len(set(owner))
    paths = stored(made, out / "files" / shift, [f"{at:05d}.jpg" for at in range(len(made))])
    files = [paths[each * per_class : (each + 1) * per_class] for each in owner]
    if shift == "clean":
        link_tree(out / "imagenet-val", classes, [50] * 1000, files)
        link_tree(out / "imagenet-sketch", classes, spread(50_889, 1000), files)
        for name, mask, total in (("imagenet-a", IMAGENET_A, 7500), ("imagenet-r", IMAGENET_R, 30_000)):
            chosen = [classes[each] for each in mask]
            link_tree(out / name, chosen, spread(total, len(mask)), [files[each] for each in mask])
    else:
        link_tree(out / "ImageNet-C" / shift / str(SEVERITY), classes, [50] * 1000, files)
    return shift


def imagenet_like(tiny: Path, out: Path, per_class: int, workers: int, shifts: Sequence[str]) -> Iterator[str]:
    """All trees of 224x224 JPEG files."""
    data = image_folder(tiny, mask=TINY_IMAGENET)
    assert data.classes is not None
    chosen = [int(at) for label in range(200) for at in np.flatnonzero(data.labels == label)[:per_class]]
    images = torch.stack([data[at] for at in chosen]).float()
    big = F.interpolate(images, size=(224, 224), mode="bicubic", antialias=True).round().clamp(0, 255).to(torch.uint8)
    classes = class_names()
    assert [classes[index] for index in sorted(TINY_IMAGENET)] == sorted(data.classes)
    rank = {index: number for number, index in enumerate(sorted(TINY_IMAGENET))}
    owner = [rank.get(number, number % 200) for number in range(1000)]
    tasks = [(shift, big, out, classes, owner) for shift in ("clean", *shifts)]
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(one_shift, tasks)


def cifar_like(archive: Path, out: Path, count: int, shifts: Sequence[str]) -> Iterator[str]:
    """CIFAR-100-C as arrays (the last severity; the rest is a hole in the file), and CIFAR-100 itself."""
    data = image_folder(archive, under="test")
    chosen = np.random.default_rng(0).permutation(len(data))[:count]
    images = torch.stack([data[int(at)] for at in chosen])
    labels = (data.labels[chosen] * 10 + chosen % 10).astype(np.uint8)
    places = np.resize(np.arange(count), 10_000)
    folder = out / "CIFAR-100-C"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "labels.npy", np.tile(labels[places], 5))
    for shift in shifts:
        made = poem.corrupt(images, shift, SEVERITY).permute(0, 2, 3, 1).numpy()
        array = np.lib.format.open_memmap(folder / f"{shift}.npy", "w+", np.uint8, (50_000, 32, 32, 3))
        array[(SEVERITY - 1) * 10_000 :] = made[places]
        array.flush()
        yield f"cifar100-c {shift}"
    binary = out / "cifar-100-binary"
    binary.mkdir(exist_ok=True)
    for name, size in (("train.bin", 50_000), ("test.bin", 10_000)):
        at = np.resize(np.arange(count), size)
        pixels = images.reshape(count, -1).numpy()[at]
        np.concatenate([labels[at][:, None] // 5, labels[at][:, None], pixels], 1).tofile(binary / name)
    yield "cifar100"


def main() -> None:
    """Build the trees that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", type=Path, help="Tiny-ImageNet-val: a folder of class folders or a tar of it")
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10 as class folders under test/, or a tar of it")
    parser.add_argument("--per-class", type=int, default=2, help="real images of each class (default 2)")
    parser.add_argument("--count", type=int, default=1000, help="CIFAR images (default 1000)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--corruptions", nargs="+", default=list(CORRUPTIONS))
    args = parser.parse_args()
    if args.tiny:
        for name in imagenet_like(args.tiny, args.out, args.per_class, args.workers, args.corruptions):
            print(f"made {name}", flush=True)
    if args.cifar10:
        for name in cifar_like(args.cifar10, args.out, args.count, args.corruptions):
            print(f"made {name}", flush=True)


if __name__ == "__main__":
    main()
