"""Class folders, on disk or inside a tar: list them, check their completeness, and read their images in class order.

An image is a file in a class folder, at any depth, with one of the endings of `FORMATS`. Names that begin with a dot
are ignored. All other files, images outside class folders among them, are listed in `Listing.others`. Anything but
regular files (FIFOs, sockets, devices, links that lead nowhere or in a circle) is skipped, never opened, and counted in
a warning.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch import Tensor

from poem._util.files import printable
from poem.streams.datasets.archives import FolderStore, JoinedStore, TarStore, plain_tar, tar_index
from poem.streams.images import DatasetInfo, ImageSet, Unreadable
from poem.streams.loading.prepare import Prepare

log = logging.getLogger("poem")

FORMATS = {
    ".jpeg": "JPEG", ".jpg": "JPEG", ".png": "PNG", ".bmp": "BMP", ".webp": "WEBP", ".ppm": "PPM", ".tif": "TIFF",
    ".tiff": "TIFF",
}  # fmt: skip
"""File endings of images, in lower case, and Pillow's names of their formats."""
ARCHIVES = (".tar", ".tar.xz", ".txz", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2")


@dataclass(frozen=True, kw_only=True)
class ExpectedCounts:
    """Numbers of classes and images in a complete data set; None where any number will do."""

    classes: int | None = None
    per_class: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Listing:
    """The class folders that were found; nothing is decoded yet."""

    path: Path
    store: FolderStore | TarStore | JoinedStore
    members: dict[str, list[int]]
    """Class folder -> positions in the store; folders in the order of their labels, files by name."""
    others: tuple[str, ...]
    """Names of all files that are no images in class folders."""

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(map(len, self.members.values()))

    def problems(self, expect: ExpectedCounts) -> list[str]:
        """Differences to the expected counts, one line each."""
        found = []
        if expect.classes is not None and len(self.members) != expect.classes:
            found.append(f"expected {expect.classes} class folders, found {len(self.members)}")
        wanted = expect.per_class
        odd = {name: len(each) for name, each in self.members.items() if not each or wanted not in (None, len(each))}
        if odd:
            shown = ", ".join(f"{name} {count}" for name, count in list(odd.items())[:8])
            more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
            what = "at least one" if wanted is None else str(wanted)
            found.append(f"expected {what} images per class, but: {shown}{more}")
        if expect.total is not None and self.count != expect.total:
            found.append(f"expected {expect.total} images in all, found {self.count}")
        return found


class ImageFiles(ImageSet):
    """The images of a listing, decoded when indexed."""

    def __init__(
        self,
        listing: Listing,
        info: DatasetInfo,
        *,
        prepare: Prepare | None = None,
        mask: tuple[int, ...] | None = None,
        chosen: list[int] | None = None,
    ) -> None:
        label = {at: number for number, each in enumerate(listing.members.values()) for at in each}
        positions = list(label) if chosen is None else chosen
        super().__init__(np.array([label[at] for at in positions]), info, classes=tuple(listing.members), mask=mask)
        self.positions = np.array(positions, np.int64)
        self.store, self.prepare, self.others = listing.store, prepare or Prepare(), listing.others

    def where(self, index: int) -> str:
        """Name of the image's file, for messages."""
        return self.store.where(int(self.positions[index]))

    def _read(self, index: int) -> Tensor:
        try:
            data = self.store.read(int(self.positions[index]))
        except OSError as error:
            raise Unreadable(f"{self.where(index)}: {error.strerror or error}") from error
        return self.prepare(data, self.where(index))


def is_archive(path: Path) -> bool:
    """Whether the path is a file with the name of a tar, compressed or not."""
    return path.is_file() and path.name.lower().endswith(ARCHIVES)


def listing(path: Path, *, under: str | None = None, numbered: bool = False, cache: Path | None = None) -> Listing:
    """List the class folders of a folder or an archive, sorted by name, or by number if `numbered`."""
    if is_archive(path):
        return _tar_listing(path, under, numbered, cache)
    folder = path / under if under else path
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of class folders, or a tar of them, at {folder}")
    below: dict[str, list[str]] = {}
    others: list[str] = []
    for name in sorted(walk(folder, top_folders=below)):
        first, slash, _ = name.partition("/")
        (below[first] if slash else others).append(name)
    names: list[str] = []
    members: dict[str, list[int]] = {}
    for name in sorted(below, key=_sort_key(numbered, folder)):
        files = below[name]
        images = [file for file in files if _is_image(file)]
        others += [file for file in files if not _is_image(file)]
        members[name] = list(range(len(names), len(names) + len(images)))
        names += images
    return Listing(folder, FolderStore(folder, names), members, tuple(others))


def join(path: Path, parts: Sequence[Listing]) -> Listing:
    """Join listings of folders or archives below `path` to one; a class has the images of each, one after the other."""
    stores = []
    members: dict[str, list[int]] = {name: [] for name in sorted({name for part in parts for name in part.members})}
    start = 0
    for part in parts:
        if isinstance(part.store, JoinedStore):
            raise TypeError(f"expected listings of one folder or archive each, got one of several in {part.path}")
        for name, each in part.members.items():
            members[name] += [start + at for at in each]
        stores.append(part.store)
        start += len(part.store.names)
    return Listing(path, JoinedStore(stores), members, tuple(name for part in parts for name in part.others))


def walk(folder: Path, *, links: bool = True, top_folders: dict[str, list[str]] | None = None) -> Iterator[str]:
    """Yield the regular files under a folder, relative to it, in no order; a warning counts what was skipped.

    Args:
        folder: The folder; names below it that begin with a dot are ignored.
        links: Follow links to folders. Each real folder is entered once per top folder.
        top_folders: A dictionary that gets an empty list for every folder at the top, also for those without files.
    """
    skipped: Counter[str] = Counter()
    waiting = [(os.fspath(folder), "", {_device_and_inode(folder)})]
    while waiting:
        path, prefix, seen = waiting.pop()
        try:
            with os.scandir(path) as found:
                entries = [entry for entry in found if not entry.name.startswith(".")]
        except OSError:
            if not prefix:
                raise
            skipped["folders that cannot be read"] += 1
            continue
        for entry in entries:
            kind, name = _kind(entry, links), prefix + entry.name
            if kind == "file":
                yield name
            elif kind == "folder" and (real := _device_and_inode(entry.path)) not in seen:
                if prefix:
                    seen.add(real)
                elif top_folders is not None:
                    top_folders[name] = []
                waiting.append((entry.path, f"{name}/", seen if prefix else {*seen, real}))
            else:
                skipped["folders visited before" if kind == "folder" else kind] += 1
    if skipped:
        words = ", ".join(
            f"{count} {name if count > 1 else _SINGULAR[name]}" for name, count in sorted(skipped.items())
        )
        total = sum(skipped.values())
        log.warning("%s: %d entr%s skipped: %s", printable(str(folder)), total, "y" if total == 1 else "ies", words)


_SINGULAR = {
    "FIFOs": "FIFO", "sockets": "socket", "devices": "device", "links that lead nowhere": "link that leads nowhere",
    "linked folders": "linked folder", "folders visited before": "folder visited before",
    "folders that cannot be read": "folder that cannot be read", "other entries": "other entry",
}  # fmt: skip
"""Kinds of skipped entries: plural and singular."""


def _device_and_inode(folder: str | Path) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def _kind(entry: os.DirEntry[str], links: bool) -> str:
    """Return "file" or "folder", or the key of `_SINGULAR` under which anything else is counted."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "folder" if links or not entry.is_symlink() else "linked folders"
        mode = entry.stat().st_mode
    except OSError:
        return "links that lead nowhere" if entry.is_symlink() else "other entries"
    kinds = {stat.S_IFIFO: "FIFOs", stat.S_IFSOCK: "sockets"}
    return kinds.get(stat.S_IFMT(mode), "devices")


def _is_image(name: str) -> bool:
    return name.lower().endswith(tuple(FORMATS))


def _sort_key(numbered: bool, path: Path) -> Callable[[str], Any]:
    """The key that sorts class folders: their name, or their number, where anything else is an error."""

    def number(name: str) -> int:
        if not name.isdecimal():
            raise ValueError(f"expected folders named by class number in {path}, got {name!r}")
        return int(name)

    return number if numbered else str


def _tar_listing(path: Path, under: str | None, numbered: bool, cache: Path | None) -> Listing:
    tar = plain_tar(path, cache)
    names, spans = tar_index(tar)
    parts = [tuple(part for part in PurePosixPath(name).parts if part not in (".", "/")) for name in names]
    visible = [at for at, each in enumerate(parts) if each and not any(part.startswith(".") for part in each)]
    start = _class_root(path, [parts[at] for at in visible if _is_image(names[at])], under)
    members: dict[str, list[int]] = {}
    others = []
    for at in sorted((at for at in visible if parts[at][: len(start)] == start), key=lambda at: parts[at]):
        rest = parts[at][len(start) :]
        if len(rest) > 1 and _is_image(rest[-1]):
            members.setdefault(rest[0], []).append(at)
        else:
            others.append("/".join(rest))
    members = {name: members[name] for name in sorted(members, key=_sort_key(numbered, path))}
    return Listing(path, TarStore(tar, names, spans), members, tuple(others))


def _class_root(path: Path, parts: list[tuple[str, ...]], under: str | None) -> tuple[str, ...]:
    """Find the folder inside an archive that holds the class folders; raises where it is ambiguous."""
    if under is not None:
        start = tuple(part for part in PurePosixPath(under).parts if part != ".")
        if not any(each[: len(start)] == start for each in parts):
            begins = ", ".join(sorted({each[0] for each in parts})[:5])
            raise ValueError(f"no images under {under!r} in {path.name}; it begins with: {begins}")
        return start
    parts = [each for each in parts if len(each) > 1]
    if not parts:
        raise ValueError(f"expected images in class folders in {path.name}, found none")
    depth = 0
    while all(len(each) > depth + 2 for each in parts) and len({each[depth] for each in parts}) == 1:
        depth += 1
    deeper = [each for each in parts if len(each) > depth + 2]
    tops = sorted({"/".join(each[: depth + 1]) for each in parts})
    if len(deeper) == len(parts) or (deeper and len(tops) == 1):  # splits; or a class, or loose images above classes?
        choice = ", ".join(tops[:5] if len(tops) > 1 else [*tops, "/".join(parts[0][:depth]) or "."])
        raise ValueError(f"expected class/file in {path.name}, got {'/'.join(deeper[0])}; pass under= one of: {choice}")
    return parts[0][:depth]
