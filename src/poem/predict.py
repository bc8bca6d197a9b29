"""Answers for images without labels: what the model says while it learns, beside what it would have said.

Two adapters borrow one model: the method's, which learns, and the source's, which does not. Where they disagree is
where adapting mattered.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from poem._util.files import printable, read_bytes
from poem._util.nearest import nearest_names
from poem.adapter import Adapter
from poem.api import adapt
from poem.engine.anatomy import anatomy
from poem.streams import corrupt
from poem.streams.datasets.archives import MAX_FILE_BYTES
from poem.streams.datasets.classes import class_indices, is_wnid
from poem.streams.datasets.folders import FORMATS, walk
from poem.streams.loading.prepare import Prepare

log = logging.getLogger("poem")
FEW, DOUBT = 20, 0.5
"""From so many images on, a smaller share of answers that are the model's own is a reason not to use them."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One image: the fields are the columns of `predictions.csv`."""

    file: str
    label: int | None = None
    """The answer: the class's index, or its place in the list of classes where one was given."""
    name: str = ""
    """What the label is called; a number where nobody knows."""
    class_index: int | None = None
    """The answer in the model's own numbering, whatever list of classes was given."""
    wnid: str = ""
    """ImageNet's name of the class, where the model's classes are known to be ImageNet's."""
    confidence: float | None = None
    """Probability of the label, 0 to 1."""
    entropy: float | None = None
    """Of the answer, in nats."""
    first_entropy: float | None = None
    """Before the batch was learnt from."""
    source_label: int | None = None
    """What the model says without adapting, numbered as `label`."""
    source_name: str = ""
    source_entropy: float | None = None
    """Of that, in nats."""
    taught: bool | None = None
    """Whether the model learnt from it."""
    newly_reliable: bool | None = None
    """Too uncertain at the first look, reliable at a later one."""
    error: str = ""
    """Why there is no answer."""


class Record(Protocol):
    """What `answers` asks of a record that lets a stopped run go on; `poem._util.journal.Journal` is one in files."""

    @property
    def done(self) -> int:
        """Images that are answered already."""
        ...

    @property
    def state(self) -> dict[str, Any] | None:
        """The adapter's state after them, where a run goes on."""
        ...

    def add(self, batch: Sequence[Answer], images: int, adapter: Adapter) -> None:
        """Keep the answers of a batch, after which `images` are done."""
        ...


def photos(folder: Path) -> list[Path]:
    """Every image under a folder, by name.

    What begins with a dot is not looked at. Links to files are followed, links to folders are not. What is no regular
    file (FIFOs, sockets, devices, links that lead nowhere) is skipped, and a warning says how many there were.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, got {folder}, which is not one")
    names = list(walk(folder, links=False))
    kept = sorted(folder / name for name in names if Path(name).suffix.lower() in FORMATS)
    if kept and len(kept) < len(names):
        log.warning("%d files under %s left alone: their endings are none of %s", len(names) - len(kept), folder,
                    " ".join(FORMATS))  # fmt: skip
    if not kept:
        raise FileNotFoundError(f"no images under {folder}; endings looked for: {' '.join(FORMATS)}")
    return kept


def wnid_folders(files: Sequence[Path], top: Path) -> dict[str, int] | None:
    """ImageNet's index of each class folder by name, where every image is in a folder named by wnid."""
    parts = [path.relative_to(top).parts for path in files]
    folders = sorted({each[-2] if len(each) > 1 else "" for each in parts})
    return dict(zip(folders, class_indices(folders), strict=True)) if all(map(is_wnid, folders)) else None


def listed_classes(text: str) -> list[int]:
    """Indices of classes from a text with one a line: numbers of logits, or wnids of ImageNet."""
    lines = [line.split()[0] for line in text.splitlines() if line.strip()]
    if lines and all(line.isdecimal() for line in lines):
        return [int(line) for line in lines]
    return list(class_indices(lines))


def answers(
    model: nn.Module,
    files: Sequence[Path],
    method: str = "poem",
    *,
    prepare: Prepare,
    folder: Path,
    batch_size: int = 64,
    names: Mapping[int, str] | None = None,
    wnids: Mapping[int, str] | None = None,
    classes: Sequence[int] | None = None,
    corruption: tuple[str, int] | None = None,
    on_batch: Callable[[Tensor, list[Path], Any], None] | None = None,
    journal: Record | None = None,
    **settings: Any,
) -> Iterator[list[Answer]]:
    """Batch by batch in the files' order; a file that does not decode is an answer with its error.

    Args:
        model: Any classifier.
        files: Images under `folder`, in order of arrival.
        method: A name of `poem.methods()`.
        prepare: Resize and crop to the model's size.
        folder: What file names are given relative to.
        batch_size: Images that are learnt from together.
        names: What to call the labels.
        wnids: ImageNet's names of the model's classes, by their index.
        classes: Indices the logits are cut to; labels are then places in this list.
        corruption: A shift to put on the images, such as `("fog", 3)`.
        on_batch: Called with images, their files and `adapter.last`, for whoever wants to look closer.
        journal: Is given every batch, and says where a stopped run goes on; its answers are not given again.
        settings: Passed on to `poem.adapt`.
    """
    adapter = adapt(model, method, classes=classes, batch_size=batch_size, **settings)
    shared = {key: settings[key] for key in ("mean", "std", "logits", "precision") if key in settings}
    plain = adapt(model, "source", classes=classes, **shared)
    device = next(model.parameters()).device
    words = _Words(names or {}, wnids or {}, classes)
    try:
        if journal is not None and journal.state is not None:
            adapter.load_state_dict(journal.state)
        for start in range(0 if journal is None else journal.done, len(files), batch_size):
            batch = files[start : start + batch_size]
            pixels, good, found = _read(batch, prepare, folder)
            if pixels is not None:
                if corruption is not None:
                    ids = [start + batch.index(path) for path in good]
                    pixels = corrupt(pixels, *corruption, ids=ids)
                images = pixels.to(device).float() / 255
                logits, before = adapter(images), plain(images)
                if on_batch is not None:
                    on_batch(images, good, adapter.last)
                found = sorted(found + _answered(logits, before, adapter.last, good, folder, words), key=_by_file)
            if journal is not None:
                journal.add(found, start + len(batch), adapter)
            yield found
    finally:
        adapter.unload()
        plain.unload()


@dataclass(frozen=True)
class _Words:
    """What labels are called."""

    names: Mapping[int, str]
    wnids: Mapping[int, str]
    classes: Sequence[int] | None

    def of(self, label: int) -> dict[str, Any]:
        """The columns that name an answer."""
        index = label if self.classes is None else int(self.classes[label])
        return {"label": label, "name": self.name(label), "class_index": index, "wnid": self.wnids.get(index, "")}

    def name(self, label: int) -> str:
        """In words, or the number."""
        return self.names.get(label, str(label))


def _by_file(answer: Answer) -> str:
    return answer.file


def _read(batch: Sequence[Path], prepare: Prepare, folder: Path) -> tuple[Tensor | None, list[Path], list[Answer]]:
    """Images (B, 3, H, W) as uint8, their files, and answers for those that cannot be read."""
    images, good, bad = [], [], []
    for path in batch:
        name = str(path.relative_to(folder))
        try:
            images.append(prepare(read_bytes(path, MAX_FILE_BYTES), name))
            good.append(path)
        except OSError as error:
            bad.append(Answer(file=name, error=f"{printable(name)}: {error.strerror or error}"))
        except ValueError as error:
            bad.append(Answer(file=name, error=str(error)))
    sizes = {tuple(image.shape[1:]) for image in images}
    if len(sizes) > 1:
        raise ValueError(f"expected images of one size, got {sorted(sizes)[:3]}; pass --resize and --crop")
    return (torch.stack(images) if images else None), good, bad


def _answered(
    logits: Tensor, before: Tensor, last: Any, good: Sequence[Path], folder: Path, words: _Words
) -> list[Answer]:
    """One answer per image."""
    columns = zip(
        good, logits.argmax(1).tolist(), logits.softmax(1).max(1).values.tolist(), _entropy(logits).tolist(),
        last.first_entropy.tolist(), before.argmax(1).tolist(), _entropy(before).tolist(),
        (last.selected | last.newly_reliable).tolist(), last.newly_reliable.tolist(), strict=True,
    )  # fmt: skip
    return [
        Answer(
            file=str(path.relative_to(folder)), confidence=round(sure, 6), entropy=round(now, 6),
            first_entropy=round(first, 6), source_label=source, source_name=words.name(source),
            source_entropy=round(plain, 6), taught=taught, newly_reliable=newly, **words.of(label),
        )
        for path, label, sure, now, first, source, plain, taught, newly in columns
    ]  # fmt: skip


def _entropy(logits: Tensor) -> Tensor:
    logs = logits.log_softmax(1)
    return -(logs.exp() * logs).sum(1)


def summary(found: Iterable[Answer], *, labelled: bool = False) -> str:
    """What happened, in a few lines; a doubt about the whole comes first, unless labels tell what is right."""
    rows = list(found)
    read = [each for each in rows if not each.error]
    if not read:
        return f"none of {len(rows)} images could be read"
    agree = sum(each.label == each.source_label for each in read)
    first = sum(each.first_entropy or 0.0 for each in read) / len(read)
    last = sum(each.entropy or 0.0 for each in read) / len(read)
    plain = sum(each.source_entropy or 0.0 for each in read) / len(read)
    newly = sum(bool(each.newly_reliable) for each in read)
    taught = sum(bool(each.taught) for each in read)
    lines = [
        *([_doubt(agree, len(read))] if len(read) >= FEW and agree < DOUBT * len(read) and not labelled else []),
        f"{len(read)} images answered" + (f", {len(rows) - len(read)} unreadable" if len(read) < len(rows) else ""),
        f"entropy {first:.2f} before learning, {last:.2f} in the answer; the model unadapted: {plain:.2f} (nats)",
        f"{agree} answers ({100 * agree / len(read):.1f} %) agree with the model unadapted",
        f"{taught} images taught; {newly} of them were too uncertain at first and reliable after an update",
    ]
    if not taught and agree < len(read):
        lines.append("Nobody taught: what differs comes from the batch's statistics alone")
    if last > plain + 0.5:
        lines.append(
            "The adapted answers are less certain than the model's own. That cannot tell which are right: label a few "
            "and compare. With batch norm, batches of few classes or few images spoil the statistics"
        )
    return "\n".join(lines)


def _doubt(agree: int, count: int) -> str:
    return (
        f"Do not use these answers as they are: only {agree} of {count} are the model's own. For those type --method "
        "source. Adapting wants images in mixed order (--shuffle 0), larger batches (--batch-size) and, where folders "
        "named by wnid hold all classes that can come, --classes folders"
    )


def logits_of(model: nn.Module) -> int | None:
    """How many classes a model has, where its last layer shows it."""
    head = anatomy(model).head
    last = None if head is None else model.get_submodule(head)
    return getattr(last, "out_features", None) or getattr(last, "out_channels", None)


def elsewhere(name: str) -> str | None:
    """Where torchvision builds a network of that name, as `imported` takes it."""
    if find_spec("torchvision") is None:
        return None
    from torchvision import models

    known = name in models.list_models() and callable(getattr(models, name, None))
    return f"torchvision.models:{name}" if known else None


def imported(place: str) -> nn.Module:
    """The model that `package.module:function` returns."""
    module, _, name = place.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file of the folder one is in, as python itself would find it
    if not module or not name:
        raise ValueError(f"expected package.module:function, such as torchvision.models:resnet18, got {place!r}")
    try:
        held = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # a module that this one needs
        raise ValueError(
            f"expected package.module:function, got {place!r}: there is no module {error.name!r}"
        ) from error
    made = getattr(held, name, None)
    if not callable(made):
        near = nearest_names(name, [each for each in dir(held) if callable(getattr(held, each))], most=3)
        hint = f"; did you mean {' or '.join(f'{module}:{each}' for each in near)}?" if near else ""
        raise ValueError(f"expected package.module:function, a function that returns a model, got {place!r}{hint}")
    model = made()
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected {place} to return a torch.nn.Module, got {type(model).__name__}")
    return model.eval()


def imagenet_names() -> dict[int, str]:
    """What the 1000 classes are called, where timm is there to say so."""
    try:
        from timm.data.imagenet_info import ImageNetInfo
    except ImportError:
        return {}
    info = ImageNetInfo("imagenet-1k")
    return {index: info.index_to_description(index).split(",")[0] for index in range(1000)}
