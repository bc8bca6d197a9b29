"""Class folders, on disk or inside a tar: what is there, what is missing, and the images in class order.

One rule for all who look: an image is a file in a class folder, at any depth, with one of the endings of `FORMATS`.
What begins with a dot, file or folder, is not looked at. All other files, images outside class folders among them, are
left alone and named in `Listing.others`. What is no regular file (FIFOs, sockets, devices, links that lead nowhere or
in a circle) is skipped, never opened, and counted in a warning.
"""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from torch import Tensor

from poem._util.files import printable
from poem.streams.datasets.archives import FolderStore, TarStore, index, plain_tar
from poem.streams.images import About, ImageSet, Unreadable
from poem.streams.loading.prepare import Prepare

log = logging.getLogger("poem")

FORMATS = {
    ".jpeg": "JPEG", ".jpg": "JPEG", ".png": "PNG", ".bmp": "BMP", ".webp": "WEBP", ".ppm": "PPM", ".tif": "TIFF",
    ".tiff": "TIFF",
}  # fmt: skip
"""Endings of images, in any case, and what Pillow calls their formats."""
ARCHIVES = (".tar", ".tar.xz", ".txz", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2")


@dataclass(frozen=True, kw_only=True)
class Expect:
    """How much a complete set holds; None where that is open."""

    classes: int | None = None
    per_class: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Listing:
    """Class folders as found, before anything is decoded."""

    place: Path
    store: FolderStore | TarStore
    members: dict[str, list[int]]
    """Class folder -> positions in the store; folders and files in the order of their labels and names."""
    others: tuple[str, ...]
    """Names of files that are no images in class folders; they are left alone."""

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(map(len, self.members.values()))

    def problems(self, expect: Expect) -> list[str]:
        """What is not as it should be, one line each."""
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


class Files(ImageSet):
    """Images of a listing, decoded when asked for."""

    def __init__(
        self,
        listing: Listing,
        about: About,
        *,
        prepare: Prepare | None = None,
        mask: tuple[int, ...] | None = None,
        chosen: list[int] | None = None,
    ) -> None:
        places = [at for each in listing.members.values() for at in each]
        label = {at: number for number, each in enumerate(listing.members.values()) for at in each}
        kept = places if chosen is None else chosen
        super().__init__(np.array([label[at] for at in kept]), about, classes=tuple(listing.members), mask=mask)
        self.places = np.array(kept, np.int64)
        self.store, self.prepare, self.others = listing.store, prepare or Prepare(), listing.others

    def where(self, index: int) -> str:
        """The file."""
        return self.store.where(int(self.places[index]))

    def _read(self, index: int) -> Tensor:
        try:
            data = self.store.read(int(self.places[index]))
        except OSError as error:
            raise Unreadable(f"{self.where(index)}: {error.strerror or error}") from error
        return self.prepare(data, self.where(index))


def is_archive(path: Path) -> bool:
    """Whether the file's name is that of a tar, compressed or not."""
    return path.is_file() and path.name.lower().endswith(ARCHIVES)


def listing(path: Path, *, under: str | None = None, numbered: bool = False, cache: Path | None = None) -> Listing:
    """Class folders of a folder or an archive; `numbered` folders count by their number, not by their spelling."""
    if is_archive(path):
        return _archive(path, under, numbered, cache)
    folder = path / under if under else path
    if not folder.is_dir():
        raise FileNotFoundError(f"expected a folder of class folders, or a tar of them, at {folder}")
    below: dict[str, list[str]] = {}
    others: list[str] = []
    for name in sorted(walk(folder, within=below)):
        first, apart, _ = name.partition("/")
        (below[first] if apart else others).append(name)
    names: list[str] = []
    members: dict[str, list[int]] = {}
    for name in sorted(below, key=_rank(numbered, folder)):
        files = below[name]
        images = [file for file in files if _is_image(file)]
        others += [file for file in files if not _is_image(file)]
        members[name] = list(range(len(names), len(names) + len(images)))
        names += images
    return Listing(folder, FolderStore(folder, names), members, tuple(others))


def walk(folder: Path, *, links: bool = True, within: dict[str, list[str]] | None = None) -> Iterator[str]:
    """Names of the regular files under a folder, relative to it, in no order; a warning counts what was skipped.

    Args:
        folder: Where to look; what begins with a dot is passed over.
        links: Follow links to folders. Within one top folder, each real folder is entered once.
        within: Takes a list for every top folder, those without files too.
    """
    skipped: Counter[str] = Counter()
    waiting = [(os.fspath(folder), "", {_identity(folder)})]
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
            elif kind == "folder" and (real := _identity(entry.path)) not in seen:
                if prefix:
                    seen.add(real)
                elif within is not None:
                    within[name] = []
                waiting.append((entry.path, f"{name}/", seen if prefix else {*seen, real}))
            else:
                skipped["folders met before" if kind == "folder" else kind] += 1
    if skipped:
        words = ", ".join(f"{count} {name if count > 1 else _SINGLE[name]}" for name, count in sorted(skipped.items()))
        total = sum(skipped.values())
        log.warning("%s: %d entr%s skipped: %s", printable(str(folder)), total, "y" if total == 1 else "ies", words)


_SINGLE = {
    "FIFOs": "FIFO", "sockets": "socket", "devices": "device", "links that lead nowhere": "link that leads nowhere",
    "linked folders": "linked folder", "folders met before": "folder met before",
    "folders that cannot be read": "folder that cannot be read", "other entries": "other entry",
}  # fmt: skip
"""What is skipped, for several and for one."""


def _identity(folder: str | Path) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def _kind(entry: os.DirEntry[str], links: bool) -> str:
    """The word "file" or "folder", or in what words to count something else."""
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


def _rank(numbered: bool, place: Path) -> Callable[[str], Any]:
    def number(name: str) -> int:
        if not name.isdecimal():
            raise ValueError(f"expected folders named by class number in {place}, got {name!r}")
        return int(name)

    return number if numbered else str


def _archive(path: Path, under: str | None, numbered: bool, cache: Path | None) -> Listing:
    tar = plain_tar(path, cache)
    names, spans = index(tar)
    parts = [tuple(part for part in PurePosixPath(name).parts if part not in (".", "/")) for name in names]
    seen = [at for at, each in enumerate(parts) if each and not any(part.startswith(".") for part in each)]
    start = _start(path, [parts[at] for at in seen if _is_image(names[at])], under)
    members: dict[str, list[int]] = {}
    others = []
    for at in sorted((at for at in seen if parts[at][: len(start)] == start), key=lambda at: parts[at]):
        rest = parts[at][len(start) :]
        if len(rest) > 1 and _is_image(rest[-1]):
            members.setdefault(rest[0], []).append(at)
        else:
            others.append("/".join(rest))
    members = {name: members[name] for name in sorted(members, key=_rank(numbered, path))}
    return Listing(path, TarStore(tar, names, spans), members, tuple(others))


def _start(path: Path, parts: list[tuple[str, ...]], under: str | None) -> tuple[str, ...]:
    """The folder inside an archive that holds the class folders."""
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
