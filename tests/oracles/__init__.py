"""Straight-line references for every method: slow, obvious, one batch after the other, written from the papers.

Nothing is shared with the library. Each method is one function that yields an `Outcome` per batch, in the file of its
paper; the extensions of POEM (`HOST+poem`, `HOST+poem-i`, `HOST+poem-ii`, `HOST*`) are three loops in `plus_poem`
around a small class per host. Chance comes from one CPU generator per run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oracles.auto import auto
from oracles.cmf import CMFHost, cmf
from oracles.come import COMEHost, PlainCOMEHost, come
from oracles.common import (
    Augment,
    Outcome,
    adam,
    all_norms,
    copied,
    deep_part,
    entropy,
    mixed,
    norm_tensors,
    norms_below_top,
    sgd,
    shallow_part,
    with_batch_statistics,
)
from oracles.cotta import cotta, cotta_from_student, cotta_repeated, cotta_with_branch
from oracles.deyo import DeYOHost, deyo
from oracles.eata import EATAHost, ETAHost, RDumbHost, eata, eta, rdumb
from oracles.host import Host
from oracles.lame import lame
from oracles.memo import memo, memo_repeated, memo_with_branch
from oracles.neo import neo
from oracles.petta import petta
from oracles.plain import bn, source
from oracles.plus_poem import Explore, once, repeat, reselect, run
from oracles.poem import poem, poem_official, poem_official_v2
from oracles.protected import ProtectedHost, protected
from oracles.recap import ReCAPHost, recap
from oracles.rem import PlainREMHost, REMHost, rem
from oracles.roid import ROIDHost, roid
from oracles.rotta import rotta
from oracles.rpl import PlainRPLHost, RPLHost, rpl
from oracles.sar import SARHost, sar, sar_coasting
from oracles.spa import spa
from oracles.tent import FilteredTentHost, TentHost, tent, tent_filtered
from oracles.zerosiam import zerosiam

__all__ = [
    "METHODS", "Outcome", "adam", "all_norms", "copied", "deep_part", "entropy", "mixed", "norm_tensors",
    "norms_below_top", "outcomes", "sar_coasting", "sgd", "shallow_part", "with_batch_statistics",
]  # fmt: skip

Reference = Callable[..., Iterator[Outcome]]

HOSTS: dict[str, type[Host]] = {
    "tent": FilteredTentHost,
    "tent-filtered": FilteredTentHost,
    "eta": ETAHost,
    "eata": EATAHost,
    "sar": SARHost,
    "deyo": DeYOHost,
    "roid": ROIDHost,
    "rdumb": RDumbHost,
    "come": COMEHost,
    "rpl": RPLHost,
    "cmf": CMFHost,
    "recap": ReCAPHost,
    "protected": ProtectedHost,
    "rem": REMHost,
}


def extended(host: type[Host], explore: Explore, *, branch: bool) -> Reference:
    """A host under one of POEM's extensions, with the keywords of the host."""

    def reference(net: nn.Module, batches: list[Tensor], **settings: Any) -> Iterator[Outcome]:
        return run(host(net, branch=branch, **settings), explore, batches)

    return reference


REFERENCES: dict[str, Reference] = {
    "auto": auto,
    "source": source,
    "bn": bn,
    "tent": tent,
    "tent-filtered": tent_filtered,
    "eta": eta,
    "eata": eata,
    "sar": sar,
    "deyo": deyo,
    "roid": roid,
    "memo": memo,
    "cotta": cotta,
    "rdumb": rdumb,
    "lame": lame,
    "rotta": rotta,
    "come": come,
    "zerosiam": zerosiam,
    "spa": spa,
    "rem": rem,
    "rpl": rpl,
    "cmf": cmf,
    "recap": recap,
    "protected": protected,
    "petta": petta,
    "neo": neo,
    "poem": poem,
    "poem-official": poem_official,
    "poem-official-v2": poem_official_v2,
    **{f"{name}+poem": extended(host, reselect, branch=True) for name, host in HOSTS.items()},
    **{f"{name}+poem-i": extended(host, reselect, branch=False) for name, host in HOSTS.items()},
    **{f"{name}+poem-ii": extended(host, once, branch=True) for name, host in HOSTS.items()},
    **{f"{name}*": extended(host, repeat, branch=False) for name, host in HOSTS.items()},
    "tent*": extended(TentHost, repeat, branch=False),
    "come*": extended(PlainCOMEHost, repeat, branch=False),
    "rem*": extended(PlainREMHost, repeat, branch=False),
    "rpl*": extended(PlainRPLHost, repeat, branch=False),
    "memo+poem": memo_with_branch,
    "memo+poem-i": memo,
    "memo+poem-ii": memo_with_branch,
    "memo*": memo_repeated,
    "cotta+poem": cotta_with_branch,
    "cotta+poem-i": cotta_from_student,
    "cotta+poem-ii": cotta_with_branch,
    "cotta*": cotta_repeated,
}
METHODS = tuple(REFERENCES)

INPUTS: dict[str, tuple[str, ...]] = {
    "source": (),
    "bn": (),
    "lame": (),
    "neo": (),
    "rotta": ("lr", "rng", "augment"),
    "petta": ("lr", "rng", "augment", "source"),
    "eata": ("lr", "source"),
    "recap": ("lr", "source"),
    "protected": ("lr", "source"),
    "deyo": ("lr", "rng"),
    "spa": ("lr", "rng"),
    "roid": ("lr", "rng", "augment"),
    "cmf": ("lr", "rng", "augment"),
    "memo": ("lr", "rng", "views"),
    "cotta": ("lr", "rng", "augment"),
    "poem-official": ("lr", "rng"),
    "poem-official-v2": ("lr", "rng"),
}
"""What a method reads besides the batches; all others read the learning rate alone."""


def outcomes(
    method: str,
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    seed: int = 0,
    source: list[Tensor] | None = None,
    augment: Augment | None = None,
    views: Augment | None = None,
    **settings: Any,
) -> list[Outcome]:
    """What `method` does with each batch while it adapts a copy of `net`; `settings` are those of its function."""
    given = {"lr": lr, "rng": torch.Generator().manual_seed(seed), "source": source, "augment": augment, "views": views}
    host = method.removesuffix("*").split("+")[0]
    inputs = {name: given[name] for name in INPUTS.get(host, ("lr",))}
    return list(REFERENCES[method](net, batches, **inputs, **settings))
