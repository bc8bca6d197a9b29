"""CIFAR as torchvision downloads it: the python version is read, and no pickle runs code."""

from __future__ import annotations

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poem.streams.datasets import open_dataset
from poem.streams.datasets.check import check
from poem.streams.datasets.python_cifar import python_batch

ROWS = 10_000


def pixels(rows: int = ROWS) -> Any:
    found = np.zeros((rows, 3072), np.uint8)
    found[7, :1024], found[-1, 2048:] = 50, 9  # the red plane comes first
    return found


def python2(values: dict[str, Any]) -> bytes:
    """A dictionary of arrays and lists of small integers, pickled as Python 2 did: protocol 2, text as byte strings."""
    out = [b"\x80\x02}("]
    for key, value in values.items():
        out.append(b"U" + bytes([len(key)]) + key.encode())
        if isinstance(value, list):
            out.append(b"](" + b"".join(b"K" + bytes([each]) for each in value) + b"e")
        else:
            shape = b"".join(b"M" + struct.pack("<H", each) for each in value.shape)
            raw = value.tobytes()
            out.append(
                b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape + b"\x86"
                b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
                b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
            )
    return b"".join([*out, b"u."])


def test_cifar10_as_torchvision_downloads_it(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    labels = [index % 10 for index in range(ROWS)]
    for at, name in enumerate(["test_batch", *(f"data_batch_{part}" for part in range(1, 6))]):
        held = pixels()
        held[0, 0] = at
        (folder / name).write_bytes(python2({"data": held, "labels": labels}))
    data = open_dataset("cifar10", tmp_path)
    assert data.labels.tolist() == labels
    assert data.classes is not None
    assert data.classes[3] == "cat"
    assert data[7].flatten(1).float().mean(1).tolist() == [50, 0, 0]
    assert data[ROWS - 1].flatten(1).float().mean(1).tolist() == [0, 0, 9]
    train = open_dataset("cifar10", folder, split="train")
    assert len(train) == 5 * ROWS
    assert [int(train[at * ROWS][0, 0, 0]) for at in range(5)] == [1, 2, 3, 4, 5]
    assert len(pickle.loads(pickle.dumps(data))) == ROWS, "loader processes get it by pickling"
    assert check("cifar10", tmp_path).complete


def test_cifar100_and_pickles_that_python_3_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    fine = [index % 100 for index in range(ROWS)]
    held = {"data": pixels(), "fine_labels": fine, "coarse_labels": [0] * ROWS, "filenames": ["a.png"] * ROWS}
    (folder / "test").write_bytes(pickle.dumps(held, protocol=2))
    data = open_dataset("cifar100", tmp_path)
    assert data.labels.tolist() == fine
    assert data[7].flatten(1).float().mean(1).tolist() == [50, 0, 0]


class Evil:
    """Creates a file when it is unpickled by `pickle.load`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_names_code_is_refused_and_not_run(tmp_path: Path, protocol: int) -> None:
    path, mark = tmp_path / "test_batch", tmp_path / "ran"
    evil = pickle.dumps({"data": Evil(mark), "labels": []}, protocol=protocol)
    path.write_bytes(evil)
    with pytest.raises(ValueError, match=r"it names posix.mkdir, which is no part of CIFAR|names nt.mkdir"):
        python_batch(path, ROWS, 10)
    assert not mark.exists()
    pickle.loads(evil)
    assert mark.exists(), "the same bytes do run code elsewhere"


@pytest.mark.parametrize(
    "values",
    [
        {"data": 1},
        {"data": pixels(50), "labels": [0] * 50},
        {"data": pixels(), "labels": [0] * 5},
        {"data": pixels(), "labels": [10] * ROWS},
        {"data": pixels().astype(np.int16), "labels": [0] * ROWS},
        {"data": np.asfortranarray(pixels()), "labels": [0] * ROWS},
        [1, 2],
    ],
    ids=["no array", "few images", "few labels", "labels", "type", "order", "list"],
)
def test_other_content_is_one_error(tmp_path: Path, values: Any) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps(values, protocol=2))
    with pytest.raises(ValueError, match=r"expected .* in .*test_batch, got others; download it again"):
        python_batch(path, ROWS, 10)


def test_damaged_pickles_are_one_error(tmp_path: Path) -> None:
    path, whole = tmp_path / "test_batch", python2({"data": pixels(100), "labels": [0] * 100})
    for data in (b"", b"\x80", b"not a pickle", whole[:-1000], b"\x80\x02]\x94(K\x01K\x02b."):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="expected a batch of CIFAR's python version"):
            python_batch(path, 100, 10)


def test_a_huge_shape_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(python2({"data": pixels(30), "labels": [0] * 30}).replace(b"M\x1e\x00", b"M\xff\xff"))
    with pytest.raises(ValueError, match="got others"):
        python_batch(path, 30, 10)


@pytest.mark.parametrize("put", [b"r" + struct.pack("<I", 0x0FFFFFFF), b"p268435455\n"], ids=["binary", "text"])
def test_a_huge_place_in_the_memo_allocates_nothing(tmp_path: Path, put: bytes) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "test_batch"
    path.write_bytes(b"\x80\x02N" + put + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="puts a value at place 268435455 of its memo"):
        python_batch(path, 30, 10)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10, "kilobytes"
