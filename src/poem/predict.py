"""Predictions for images without labels, by the adapted model and by the model unadapted.

Two adapters borrow one model: one runs the method, the other runs `source`, which never updates. Where their
predictions differ, adapting changed the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from poem._util import outside
from poem._util.files import printable, read_bytes
from poem.adapter import Adapter
from poem.api import adapt
from poem.engine.accounting import BatchRecord
from poem.engine.anatomy import anatomy
from poem.engine.network import two_columns
from poem.guarded.guard import Guard
from poem.guarded.guard_state import GuardState
from poem.parts.base import entropy as entropy_of
from poem.streams import corrupt
from poem.streams.datasets.archives import MAX_FILE_BYTES
from poem.streams.datasets.classes import class_indices, is_wnid
from poem.streams.datasets.folders import FORMATS, walk
from poem.streams.loading.prepare import Prepare
from poem.zoo.outside_bases import build_outside

log = logging.getLogger("poem")
MIN_IMAGES, MIN_AGREEMENT = 20, 0.5
"""With at least so many images, a smaller share of answers that agree with the model unadapted gives a warning."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The prediction for one image; the fields are the columns of `predictions.csv`, `verdict` of guarded runs only."""

    file: str
    label: int | None = None
    """Index of the predicted class, or its position in the list of classes where one was given."""
    name: str = ""
    """Name of the predicted class; its number where no name is known."""
    class_index: int | None = None
    """Index of the predicted class among the model's logits, whatever list of classes was given."""
    wnid: str = ""
    """WordNet id of the predicted class, where the model's classes are known to be ImageNet's."""
    confidence: float | None = None
    """Probability of the predicted class, 0 to 1."""
    entropy: float | None = None
    """Entropy of the prediction, in nats."""
    first_entropy: float | None = None
    """Entropy at the first forward pass, before any update on the batch; None where a guard let nothing be learnt."""
    source_label: int | None = None
    """The class that the model predicts unadapted, numbered as `label`."""
    source_name: str = ""
    source_entropy: float | None = None
    """Entropy of the unadapted prediction, in nats."""
    taught: bool | None = None
    """Whether the image was selected for an update."""
    newly_reliable: bool | None = None
    """Whether it was selected only after an update, not at the first forward pass."""
    verdict: str = ""
    """Whose answer a guard gave: "source", "adapted", or "mean" of both; "" without a guard."""
    error: str = ""
    """Why there is no prediction, such as a file that does not decode."""


class Checkpoint(Protocol):
    """What `answers` needs to resume a stopped run; `poem.cli._checkpoint.FileCheckpoint` keeps it in files."""

    @property
    def done(self) -> int:
        """Number of images answered already."""
        ...

    @property
    def state(self) -> dict[str, Any] | None:
        """The adapter's state after those images, where a run is resumed."""
        ...

    def add(self, batch: Sequence[Answer], images: int, adapter: Adapter | Guard) -> None:
        """Store the answers of a batch, after which `images` are done."""
        ...


def find_images(folder: Path) -> list[Path]:
    """Every image file under a folder, sorted by name.

    Names that begin with a dot are skipped. Links to files are followed, links to folders are not. What is not a
    regular file (FIFOs, sockets, devices, broken links) is skipped, and a warning says how many there were.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of images, got {folder}, which is not one")
    names = list(walk(folder, links=False))
    kept = sorted(folder / name for name in names if Path(name).suffix.lower() in FORMATS)
    if kept and len(kept) < len(names):
        log.warning(
            "%d files under %s left alone: their endings are none of %s",
            len(names) - len(kept), printable(str(folder)), " ".join(FORMATS),
        )  # fmt: skip
    if not kept:
        raise FileNotFoundError(f"no images under {folder}; endings looked for: {' '.join(FORMATS)}")
    return kept


def wnid_folders(files: Sequence[Path], top: Path) -> dict[str, int] | None:
    """ImageNet's class index for each class folder, or None unless every image is in a folder named by wnid."""
    paths = [path.relative_to(top).parts for path in files]
    folders = sorted({each[-2] if len(each) > 1 else "" for each in paths})
    return dict(zip(folders, class_indices(folders), strict=True)) if all(map(is_wnid, folders)) else None


def parse_class_list(text: str) -> list[int]:
    """Parse class indices from a text with one per line: indices of logits, or wnids of ImageNet."""
    lines = [line.split()[0] for line in text.splitlines() if line.strip()]
    if lines and all(line.isdecimal() for line in lines):
        return [int(line) for line in lines]
    return list(class_indices(lines))


def answers(
    model: nn.Module,
    files: Sequence[Path],
    method: str | None = None,
    *,
    prepare: Prepare,
    folder: Path,
    batch_size: int = 64,
    names: Mapping[int, str] | None = None,
    wnids: Mapping[int, str] | None = None,
    classes: Sequence[int] | None = None,
    corruption: tuple[str, int] | None = None,
    on_batch: Callable[[Tensor, list[Path], Any], None] | None = None,
    on_end: Callable[[Adapter | Guard], None] | None = None,
    checkpoint: Checkpoint | None = None,
    **settings: Any,
) -> Iterator[list[Answer]]:
    """Yield the answers batch by batch, in the order of the files; one that does not decode gives an error as answer.

    Args:
        model: Any classifier.
        files: Images under `folder`, in order of arrival.
        method: A name of `poem.methods()`; None for `auto`, guarded.
        prepare: Resize and crop to the model's size.
        folder: The folder that file names are relative to.
        batch_size: Images per batch.
        names: Names of the labels.
        wnids: WordNet ids of the model's classes, by index.
        classes: Indices of the logits to keep; labels are then positions in this list.
        corruption: A corruption to apply to the images, such as `("fog", 3)`.
        on_batch: Called after each batch with images, their files and `adapter.last`.
        on_end: Called with the adapter after the last batch, before it is unloaded.
        checkpoint: Stores every batch, and holds the state of a stopped run; its answers are not yielded again.
        settings: Passed on to `poem.adapt`; with `guard=` answers come from a guarded adapter.
    """
    adapter: Adapter | Guard = adapt(model, method, classes=classes, batch_size=batch_size, **settings)
    shared = {key: settings[key] for key in ("mean", "std", "logits", "precision") if key in settings}
    source = adapt(model, "source", classes=classes, **shared)
    device = next(model.parameters()).device
    class_names = _ClassNames(names or {}, wnids or {}, classes)
    try:
        if checkpoint is not None and checkpoint.state is not None:
            adapter.load_state_dict(checkpoint.state)
        for start in range(0 if checkpoint is None else checkpoint.done, len(files), batch_size):
            batch = files[start : start + batch_size]
            pixels, good, found = _read_batch(batch, prepare, folder)
            if pixels is not None:
                if corruption is not None:
                    ids = [start + batch.index(path) for path in good]
                    pixels = corrupt(pixels, *corruption, ids=ids)
                images = pixels.to(device).float() / 255
                before = adapter.last
                logits, source_logits = two_columns(adapter(images)), two_columns(source(images))
                if on_batch is not None:
                    on_batch(images, good, adapter.last)
                learnt = None if adapter.last is before else adapter.last
                verdicts: Sequence[str] = adapter.verdicts if isinstance(adapter, Guard) else [""] * len(good)
                found += _make_answers(logits, source_logits, learnt, verdicts, good, folder, class_names)
                found.sort(key=_by_file)
            if checkpoint is not None:
                checkpoint.add(found, start + len(batch), adapter)
            yield found
        if on_end is not None:
            on_end(adapter)
    finally:
        adapter.unload()
        source.unload()


@dataclass(frozen=True)
class _ClassNames:
    """Names of the classes, and which class a label is."""

    names: Mapping[int, str]
    wnids: Mapping[int, str]
    classes: Sequence[int] | None

    def columns(self, label: int) -> dict[str, Any]:
        """The columns `label`, `name`, `class_index` and `wnid` of an answer."""
        index = label if self.classes is None else int(self.classes[label])
        return {"label": label, "name": self.name(label), "class_index": index, "wnid": self.wnids.get(index, "")}

    def name(self, label: int) -> str:
        """The name of a label, or its number where it has none."""
        return self.names.get(label, str(label))


def _by_file(answer: Answer) -> str:
    return answer.file


def _read_batch(
    batch: Sequence[Path], prepare: Prepare, folder: Path
) -> tuple[Tensor | None, list[Path], list[Answer]]:
    """Decode files: images (B, 3, H, W) as uint8, their files, and answers with an error for the other files."""
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


def read_batches(files: Sequence[Path], prepare: Prepare, folder: Path, batch_size: int) -> Iterator[Tensor]:
    """The images of each batch (B, 3, H, W) from 0 to 1, as `answers` hands them to the adapter.

    Files that do not decode are left out, and a batch without any that does.
    """
    for start in range(0, len(files), batch_size):
        pixels, _, _ = _read_batch(files[start : start + batch_size], prepare, folder)
        if pixels is not None:
            yield pixels.float() / 255


def _make_answers(
    logits: Tensor, source_logits: Tensor, last: BatchRecord | None, verdicts: Sequence[str], good: Sequence[Path],
    folder: Path, names: _ClassNames,
) -> list[Answer]:  # fmt: skip
    """One answer per image, from both adapters' logits and `adapter.last`, which is None where nothing was learnt."""
    nothing = [False] * len(good)
    columns = zip(
        good, logits.argmax(1).tolist(), logits.softmax(1).max(1).values.tolist(), _entropy(logits).tolist(),
        [None] * len(good) if last is None else [round(each, 6) for each in last.first_entropy.tolist()],
        source_logits.argmax(1).tolist(), _entropy(source_logits).tolist(),
        nothing if last is None else (last.selected | last.newly_reliable).tolist(),
        nothing if last is None else last.newly_reliable.tolist(), verdicts, strict=True,
    )  # fmt: skip
    return [
        Answer(
            file=str(path.relative_to(folder)), confidence=round(confidence, 6), entropy=round(entropy, 6),
            first_entropy=first, source_label=source, source_name=names.name(source),
            source_entropy=round(source_entropy, 6), taught=taught, newly_reliable=newly, verdict=verdict,
            **names.columns(label),
        )
        for path, label, confidence, entropy, first, source, source_entropy, taught, newly, verdict in columns
    ]  # fmt: skip


def _entropy(logits: Tensor) -> Tensor:
    return entropy_of(logits.log_softmax(1))


def summary(found: Iterable[Answer], *, labelled: bool = False, guard: GuardState | None = None) -> str:
    """A few lines about the answers, first a warning if few agree with the model unadapted, unless `labelled`.

    With what a guard remembers, a line says how often the source answered, and which alarms and rollbacks there were.
    """
    rows = list(found)
    read = [each for each in rows if not each.error]
    if not read:
        return f"none of {len(rows)} images could be read"
    agree = sum(each.label == each.source_label for each in read)
    firsts = [each.first_entropy for each in read if each.first_entropy is not None]
    first = sum(firsts) / max(len(firsts), 1)
    last = sum(each.entropy or 0.0 for each in read) / len(read)
    source = sum(each.source_entropy or 0.0 for each in read) / len(read)
    newly = sum(bool(each.newly_reliable) for each in read)
    selected = sum(bool(each.taught) for each in read)
    doubtful = len(read) >= MIN_IMAGES and agree < MIN_AGREEMENT * len(read) and not labelled
    lines = [
        *([_low_agreement_warning(agree, len(read))] if doubtful else []),
        f"{len(read)} images answered" + (f", {len(rows) - len(read)} unreadable" if len(read) < len(rows) else ""),
        f"entropy {first:.2f} before the updates, {last:.2f} in the answer; the model unadapted: {source:.2f} (nats)",
        f"{agree} answers ({100 * agree / len(read):.1f} %) agree with the model unadapted",
        f"{selected} images selected; {newly} of them were too uncertain at first and reliable after an update",
        *([] if guard is None else [_guard_line(read, guard)]),
    ]
    if not selected and agree < len(read):
        lines.append("No image was selected: the differences come from the batch's statistics alone")
    if last > source + 0.5:
        lines.append(
            "The adapted answers are less certain than the model's own. That cannot tell which are right: label a few "
            "and compare. With batch norm, batches of few classes or few images spoil the statistics"
        )
    return "\n".join(lines)


def _guard_line(read: Sequence[Answer], guard: GuardState) -> str:
    """How often the source answered, alarms, rollbacks, and what was spent of a budget."""
    counts = {kind: sum(each.verdict == kind for each in read) for kind in ("source", "mean", "adapted")}
    alarm = (
        "no alarm of a shift since the stream began"
        if guard.shift.rang_at is None
        else f"shift alarm after {guard.shift.rang_at} images"
    )
    line = (
        f"guard: the source answered {counts['source']} images ({100 * counts['source'] / len(read):.1f} %), the mean "
        f"of both {counts['mean']}, the adapted model {counts['adapted']}; {alarm}; undone {guard.rollbacks} times"
    )
    if guard.budget is not None:
        line += f"; {guard.budget.spent} answers differ from the source's, the budget is {guard.budget.share:.6g}"
    return line


def _low_agreement_warning(agree: int, count: int) -> str:
    return (
        f"Only {agree} of {count} answers are the model's own: the shift is strong, or adapting went wrong. Label a "
        "few images and compare, or leave out --method, which takes auto with a guard; --method source gives the "
        "model's own. Adapting wants images in mixed order (--shuffle 0), larger batches (--batch-size) and, where "
        "folders named by wnid hold all classes that can come, --classes folders"
    )


def class_count(model: nn.Module) -> int | None:
    """How many classes a model has by its last layer, two where that has one output; None if it does not show it."""
    head = anatomy(model).head
    last = None if head is None else model.get_submodule(head)
    outputs: int | None = getattr(last, "out_features", None) or getattr(last, "out_channels", None)
    return 2 if outputs == 1 else outputs


def torchvision_path(name: str) -> str | None:
    """The path of torchvision's function for a network of that name, as `import_model` takes it, or None."""
    if find_spec("torchvision") is None:
        return None
    from torchvision import models

    exists = name in models.list_models() and callable(getattr(models, name, None))
    return f"torchvision.models:{name}" if exists else None


def import_model(path: str) -> nn.Module:
    """Import `package.module:function`, call it, and return the model in eval mode.

    Raises:
        ValueError: No such module or function, or it raised; the message says what to type.
        TypeError: It returned no model.
    """
    if not outside.is_path(path):
        raise ValueError(f"expected package.module:function, such as torchvision.models:resnet18, got {path!r}")
    return build_outside(path).eval()


def imagenet_class_names() -> dict[int, str]:
    """Names of ImageNet's 1000 classes by index, or nothing where timm is not installed."""
    try:
        from timm.data.imagenet_info import ImageNetInfo
    except ImportError:
        return {}
    info = ImageNetInfo("imagenet-1k")
    return {index: info.index_to_description(index).split(",")[0] for index in range(1000)}
