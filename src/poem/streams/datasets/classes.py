"""The indices of a data set's classes among a model's logits.

    mask = class_indices(data.classes)                  # folders named by wnid, a model with ImageNet's 1000 classes
    mask = class_indices(data.classes, "labels.txt")    # folders named otherwise, and a file that names the logits

For the published subsets of ImageNet the indices are here as numbers, ascending: positions in the sorted list of wnids.
A set's folders sorted by name have the same order, so `logits[:, list(IMAGENET_A)]` lines up with its labels.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from poem._util.files import read_json, read_text
from poem._util.nearest import nearest_hint

LogitNames = Mapping[str, int] | Iterable[str] | str | os.PathLike[str]
"""The names of a model's logits: names in order, a mapping from name to index, or a file of either."""

WNID = r"n\d{8}"
"""Regular expression for a class name of ImageNet, such as n01440764."""


def is_wnid(name: str) -> bool:
    """Whether a folder has the name of an ImageNet class, such as n01440764."""
    return re.fullmatch(WNID, name) is not None


@cache
def imagenet_wnids() -> tuple[str, ...]:
    """The 1000 wnids of ImageNet-1k in the order of the logits, which is that of their names."""
    return tuple((resources.files("poem.streams.datasets") / "imagenet_wnids.txt").read_text(encoding="ascii").split())


def class_indices(classes: Iterable[str], order: LogitNames | None = None) -> tuple[int, ...]:
    """The indices of some classes among a model's logits, for `poem.adapt(classes=...)` or a data set's `mask=`.

    Labels stay the ranks of the folders by name: the logits are reduced to these classes, in this order. So
    `class_indices(ImageFolder(root).classes)` fits torchvision's `ImageFolder`, whose labels are such ranks.

    Args:
        classes: Names of the class folders in the order of the labels, as `data.classes` has them.
        order: The names of the logits. By default ImageNet's 1000 wnids; or names in order; or a mapping from name to
            index; or a file: JSON of either, or text with one name a line (what follows a wnid is ignored).

    Raises:
        ValueError: A class that the model does not have, or one given twice; the message has the nearest name.
    """
    index_of = _index_by_name(imagenet_wnids() if order is None else order)
    names = [str(name) for name in classes]
    unknown = [name for name in names if name not in index_of]
    if unknown:
        what = "wnids of ImageNet-1k" if order is None else f"names among the {len(index_of)} given"
        hint = "pass order= for other names"
        if order is not None and len(index_of) <= 1000:
            hint = nearest_hint(unknown[0], index_of)
        raise ValueError(f"expected {what}, got {len(unknown)} others: {', '.join(unknown[:3])}; {hint}")
    found = tuple(index_of[name] for name in names)
    if len(set(found)) < len(found):
        raise ValueError(f"expected each class once, got {len(found)} names for {len(set(found))} logits")
    return found


def _index_by_name(order: LogitNames) -> dict[str, int]:
    """Convert the names of logits to a dictionary from name to index."""
    if isinstance(order, str | os.PathLike):
        path = Path(order)
        held = read_json(path) if path.suffix == ".json" else _lines(read_text(path))
        if isinstance(held, list) and all(isinstance(each, str) for each in held):
            return _index_by_name(held)
        if isinstance(held, dict) and all(isinstance(each, int) for each in held.values()):
            return _index_by_name(held)
        raise ValueError(f"expected a list of names, or names with indices, in {path}")
    if isinstance(order, Mapping):
        return {str(name): int(index) for name, index in order.items()}
    return {str(name): index for index, name in enumerate(order)}


def _lines(text: str) -> list[str]:
    """One name per line; of lines that begin with a wnid, the wnid alone."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [line.split()[0].rstrip(",:") if is_wnid(line.split()[0].rstrip(",:")) else line for line in lines]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split())


IMAGENET_A = _numbers("""
    6 11 13 15 17 22 23 27 30 37 39 42 47 50 57 70 71 76 79 89 90 94 96 97 99 105 107 108 110 113 124 125 130
    132 143 144 150 151 207 234 235 254 277 283 287 291 295 298 301 306 307 308 309 310 311 313 314 315 317 319
    323 324 326 327 330 334 335 336 347 361 363 372 378 386 397 400 401 402 404 407 411 416 417 420 425 428 430
    437 438 445 456 457 461 462 470 472 483 486 488 492 496 514 516 528 530 539 542 543 549 552 557 561 562 569
    572 573 575 579 589 606 607 609 614 626 627 640 641 642 643 658 668 677 682 684 687 701 704 719 736 746 749
    752 758 763 765 768 773 774 776 779 780 786 792 797 802 803 804 813 815 820 823 831 833 835 839 845 847 850
    859 862 870 879 880 888 890 897 900 907 913 924 932 933 934 937 943 945 947 951 954 956 957 959 971 972 980
    981 984 986 987 988
""")
"""Logits of ImageNet-A's 200 classes."""

IMAGENET_R = _numbers("""
    1 2 4 6 8 9 11 13 22 23 26 29 31 39 47 63 71 76 79 84 90 94 96 97 99 100 105 107 113 122 125 130 132 144 145
    147 148 150 151 155 160 161 162 163 171 172 178 187 195 199 203 207 208 219 231 232 234 235 242 245 247 250
    251 254 259 260 263 265 267 269 276 277 281 288 289 291 292 293 296 299 301 308 309 310 311 314 315 319 323
    327 330 334 335 337 338 340 341 344 347 353 355 361 362 365 366 367 368 372 388 390 393 397 401 407 413 414
    425 428 430 435 437 441 447 448 457 462 463 469 470 471 472 476 483 487 515 546 555 558 570 579 583 587 593
    594 596 609 613 617 621 629 637 657 658 701 717 724 763 768 774 776 779 780 787 805 812 815 820 824 833 847
    852 866 875 883 889 895 907 928 931 932 933 934 936 937 943 945 947 948 949 951 953 954 957 963 965 967 980
    981 983 988
""")
"""Logits of ImageNet-R's 200 classes; 86 of them are in ImageNet-A too."""

TINY_IMAGENET = _numbers("""
    1 25 30 32 50 61 69 71 75 76 79 99 105 107 109 113 114 115 122 123 128 145 146 149 151 187 207 208 235 267
    281 283 285 286 291 294 301 308 309 311 313 314 315 319 323 325 329 338 341 345 347 349 353 354 365 367 372
    386 387 398 400 406 411 414 421 424 425 427 430 435 436 437 438 440 445 447 448 457 458 462 463 466 467 470
    471 474 480 485 488 492 496 500 508 509 511 517 525 526 532 542 543 557 562 565 567 568 570 573 576 604 605
    612 614 619 621 625 627 635 645 652 655 675 677 678 682 683 687 704 707 716 720 731 733 734 735 737 739 744
    747 758 760 761 765 768 774 779 781 786 801 806 808 811 815 817 821 826 837 839 842 845 849 850 853 862 866
    873 874 877 879 887 888 890 899 900 909 910 917 923 924 928 929 932 935 938 945 947 950 951 954 957 962 963
    964 967 970 972 973 975 978 988
""")
"""Logits of Tiny-ImageNet's 200 classes."""
