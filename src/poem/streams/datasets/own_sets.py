"""Data sets of other packages, and any `torch.utils.data.Dataset`, as data sets of this one.

`as_images(torchvision.datasets.CIFAR10(ROOT, train=False))` wraps one in memory, and
`open_outside("my_package.data:photos", root, split="test")` opens one by name.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poem._util import outside
from poem.streams.images import DatasetInfo, Images, ImageSet, Labels, Unreadable, to_pixels

IMAGE_KEYS = ("image", "img", "pixel_values", "images")
LABEL_KEYS = ("label", "labels", "target", "fine_label")
"""Keys of items that are mappings, as of Hugging Face's data sets."""
_NO_LABELS = (
    "scoring needs a label for every image: return (image, class number) from __getitem__; images without labels go to "
    "poem predict or adapter.stream"
)


class OwnImages(ImageSet):
    """A data set whose items are pairs of an image and a label; pixels are read when indexed.

    Args:
        data: Has `__len__` and `__getitem__`. Images are PIL's, arrays (H, W, 3) of uint8, or tensors (3, H, W) of
            uint8 or from 0 to 1, before normalisation; grey ones become three equal channels.
        name: Its name on a protocol card and in errors.
        mask: Indices of the classes among a model's logits.

    Raises:
        TypeError: Items are no pairs, or labels no class numbers.
        ValueError: It is empty, a label is negative or no whole number, or the first item has another label than the
            attribute `targets` or `labels`.
    """

    def __init__(self, data: Any, *, name: str = "data set", mask: Sequence[int] | None = None) -> None:
        if len(data) == 0:
            raise ValueError(f"expected images in {name}, got none")
        labels = _labels(data, name)
        given = getattr(data, "classes", None)
        named = isinstance(given, list | tuple) and all(isinstance(each, str) for each in given)
        classes = tuple(given) if named and given is not None and len(given) > int(labels.max()) else None
        own = getattr(data, "mask", None) if mask is None else mask
        kept = None if own is None else tuple(map(int, own))
        info = DatasetInfo(data=name, provenance=f"items of a {type(data).__module__}.{type(data).__qualname__}")
        super().__init__(labels, info, classes=classes, mask=kept)
        self.data = data

    def _read(self, index: int) -> Tensor:
        image = _pair(self.data[index], self.where(index))[0]
        if isinstance(image, np.ndarray):
            grey = image if image.ndim == 3 else image[..., None]
            image = torch.from_numpy(np.ascontiguousarray(grey)).permute(2, 0, 1)
        elif not isinstance(image, Tensor):
            if not callable(getattr(image, "convert", None)):
                raise Unreadable(f"{self.where(index)}: expected an image, got {type(image).__name__}")
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if image.dim() == 2:
            image = image[None]
        if image.dim() != 3 or image.shape[0] not in (1, 3):
            raise Unreadable(f"{self.where(index)}: expected an image (3, H, W) or (1, H, W), got {tuple(image.shape)}")
        return to_pixels(image, self.where(index))


class _Wrapped(ImageSet):
    """A data set that has everything of the protocol `Images`, as an `ImageSet`."""

    def __init__(self, data: Images) -> None:
        about = data.describe()
        names = ("data", "provenance", "subset", "corruption", "severity", "preparation")
        info = DatasetInfo(**{name: about[name] for name in names if name in about})
        super().__init__(data.labels, info, classes=data.classes, mask=data.mask)
        self.data = data

    def _read(self, index: int) -> Tensor:
        return self.data[index]


def is_images(data: Any) -> bool:
    """Whether an object is a data set of this package: labels in memory, `describe()`, and items that are images."""
    return all(hasattr(data, name) for name in ("labels", "classes", "mask", "describe", "__getitem__", "__len__"))


def is_dataset(data: Any) -> bool:
    """Whether an object is a `torch.utils.data.Dataset`, or anything else with items by number that is no list."""
    if isinstance(data, torch.utils.data.Dataset):
        return True
    return not isinstance(data, list | tuple | str | Mapping | Tensor) and all(
        hasattr(data, name) for name in ("__getitem__", "__len__")
    )


def as_images(data: Any, *, name: str = "data set", mask: Sequence[int] | None = None) -> Images:
    """A data set of this package from any other; one of this package is returned as it is.

    Iterable data sets, which have no items by number, are read into memory.

    Raises:
        TypeError: It has no items, or they are no pairs of an image and a label.
        ValueError: It is empty, a label is negative or no whole number, or the first item has another label than the
            attribute `targets` or `labels`.
    """
    if is_images(data):
        found: Images = data
        return found
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | Mapping | Tensor):
        return OwnImages(data, name=name, mask=mask)
    if isinstance(data, torch.utils.data.IterableDataset):
        return OwnImages(list(data), name=name, mask=mask)
    raise TypeError(
        f"expected {name} to be a data set of (image, label) pairs, such as a torch.utils.data.Dataset, or one of "
        f"poem.streams.datasets, got {type(data).__name__}"
    )


def open_outside(name: str, root: str | os.PathLike[str] | None = None, **options: Any) -> ImageSet:
    """Open the data set of an outside name: a data set, or a function or class that makes one from the options.

    It gets `root` (by default POEM_DATA) if it has a parameter of that name. `mask` is taken off its hands if it has
    none.

    Raises:
        ValueError: The module or the name is not there, or the function raised.
        TypeError: It gives no data set with labels, or does not take these options.
    """
    found = outside.load("data set", name)
    mask = None
    if callable(found) and (isinstance(found, type) or not is_dataset(found)):
        try:
            takes = inspect.signature(found).parameters
        except (TypeError, ValueError):
            takes = inspect.signature(lambda root=None: None).parameters
        given = root if root is not None else os.environ.get("POEM_DATA")
        if "root" in takes and given is not None:
            options = {"root": str(given), **options}
        if "mask" not in takes:
            mask = options.pop("mask", None)
        try:
            inspect.signature(found).bind(**options)
        except TypeError as error:
            hint = "; name the folder with --root or POEM_DATA" if "'root'" in str(error) else ""
            raise TypeError(f"{name}: {error}; it takes {inspect.signature(found)}{hint}") from error
        try:
            found = found(**options)
        except Exception as error:
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            raise ValueError(f"expected {name} to open a data set, got {type(error).__name__}: {reason}") from error
    else:
        mask = options.pop("mask", None)
        if options:
            raise TypeError(f"{name} is a data set and takes no options, got {', '.join(options)}; write a function")
    opened = as_images(found, name=name, mask=mask)
    return opened if isinstance(opened, ImageSet) else _Wrapped(opened)


def _labels(data: Any, name: str) -> Labels:
    """The label of every item: from the attribute that torchvision's sets keep them in, else from the items."""
    found = _known_labels(data)
    if found is not None:
        _check_first(data, found, name)
    else:
        found = [_pair(data[index], f"{name}[{index}]")[1] for index in range(len(data))]
    try:
        numbers = [int(each) for each in found]
    except (TypeError, ValueError, OverflowError) as error:
        shown = next((each for each in found if not _is_class_like(each)), found[0])
        raise TypeError(f"expected labels of {name} as class numbers, got {shown!r:.80}; {_NO_LABELS}") from error
    broken = next((each for each, number in zip(found, numbers, strict=True) if each != number), None)
    if broken is not None and not isinstance(broken, str):
        raise ValueError(f"expected labels of {name} as whole numbers, got {float(broken):g}; {_NO_LABELS}")
    if min(numbers) < 0:
        raise ValueError(f"expected labels of {name} of at least 0, got {min(numbers)}; {_NO_LABELS}")
    return np.asarray(numbers, np.int64)


def _check_first(data: Any, known: Sequence[Any], name: str) -> None:
    """Raise where the first item has another label than the attribute that labels are taken from."""
    try:
        with torch.random.fork_rng(devices=[]):
            item = data[0]
    except Exception:  # an image that cannot be read is told when it is read
        return
    label = _pair(item, f"{name}[0]")[1]
    if not (_is_number(label) or isinstance(label, float | np.floating)) or bool(label == known[0]):
        return
    raise ValueError(
        f"expected {name}[0] to have the label of its attribute targets or labels, {known[0]}, got {label}; let "
        "__getitem__ return the same, or rename the attribute, and labels are read from the items"
    )


def _known_labels(data: Any) -> Sequence[Any] | None:
    """Labels that need no image to be read; None where there are none, or they are changed on the way out."""
    if isinstance(data, torch.utils.data.Subset):
        whole = _known_labels(data.dataset)
        return None if whole is None else [whole[index] for index in data.indices]
    if isinstance(data, torch.utils.data.TensorDataset) and len(data.tensors) > 1:
        return list(data.tensors[1].tolist())
    if getattr(data, "target_transform", None) is not None:
        return None
    for word in ("targets", "labels"):
        held = getattr(data, word, None)
        if isinstance(held, list | tuple | Tensor | np.ndarray) and len(held) == len(data):
            plain = held.tolist() if isinstance(held, Tensor | np.ndarray) else list(held)
            return plain if all(_is_number(each) for each in plain) else None
    return None


def _pair(item: Any, where: str) -> tuple[Any, Any]:
    """Image and label of an item."""
    if isinstance(item, Mapping):
        image = next((item[key] for key in IMAGE_KEYS if key in item), None)
        label = next((item[key] for key in LABEL_KEYS if key in item), None)
        if image is not None and label is not None:
            return image, label
        raise TypeError(f"{where}: expected the keys image and label, got {', '.join(map(str, item))}; {_NO_LABELS}")
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    kind = f"{type(item).__name__} of {len(item)}" if isinstance(item, tuple | list) else type(item).__name__
    raise TypeError(f"{where}: expected a pair (image, label), got a {kind}; {_NO_LABELS}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_class_like(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, float | np.floating) and bool(np.isfinite(value)))


def dataset_order(count: int, seed: int) -> list[int]:
    """A random order of so many items, drawn from a generator of its own."""
    return list(torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist())
