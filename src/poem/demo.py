"""The first minute: digits that training never saw, corrupted on the way in, and methods side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from poem.benchmark import Row, evaluate
from poem.method import recipe

METHODS = ("source", "bn", "tent", "eata", "sar", "deyo", "poem", "deyo+poem")
NETS = ("digits-bn", "digits-gn", "digits-ln")
SHIFTS = ("impulse_noise", "defocus_blur", "fog", "contrast")
LR = 0.005  # a short stream: a dozen updates must show something


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method on one network under one shift."""

    net: str
    shift: str
    row: Row


def run(count: int = 384, batch_size: int = 32, severity: int = 4, methods: Sequence[str] = METHODS) -> list[Cell]:
    """Measure every cell; adapters start afresh at each shift. One thread: the networks are too small for more."""
    torch.set_num_threads(1)
    from rich.console import Console
    from rich.progress import Progress

    from poem import zoo
    from poem.streams import corrupt
    from poem.train import digits

    task = digits()
    test, clean = task.test, task.train.images[:256].float() / 255
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:count]
    cells = []
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        bar = progress.add_task("adapting", total=len(NETS) * len(SHIFTS) * len(methods))
        for shift in SHIFTS:
            images = corrupt(test.images[order], shift, severity).float() / 255
            stream = list(zip(images.split(batch_size), test.labels[order].split(batch_size), strict=True))
            for net in NETS:
                model, base = zoo.load(net)
                for method in methods:
                    progress.update(bar, description=f"{net} {shift} {method}", advance=1)
                    table = evaluate(
                        model, stream, [method], mean=base.mean, std=base.std, preset="cifar", lr=LR, source_data=clean
                    )
                    cells.append(Cell(net=net, shift=shift, row=table[method]))
    return cells


def summary(cells: Sequence[Cell]) -> str:
    """Accuracy by method and network, mean over the shifts, with the gain over the source model."""
    methods = list(dict.fromkeys(cell.row.method for cell in cells))
    mean = {
        (method, net): sum(found) / len(found)
        for method in methods
        for net in NETS
        if (found := [cell.row.accuracy for cell in cells if (cell.row.method, cell.net) == (method, net)])
    }
    head = f"accuracy %, mean of {len(SHIFTS)} shifts"
    lines = [f"{head:<30}{'answers':<9}" + "".join(f"{net:>18}" for net in NETS)]
    for method in methods:
        look = recipe(method).readout.look
        row = f"{method:<30}{'after' if look == 'last' else 'before':<9}"
        for net in NETS:
            gain = mean[method, net] - mean["source", net]
            row += f"{mean[method, net]:>10.1f} ({gain:+5.1f})"
        lines.append(row)
    best = max(mean, key=lambda key: mean[key] - mean["source", key[1]])
    gain, statistics = (mean[each, best[1]] - mean["source", best[1]] for each in (best[0], "bn"))
    lines.append("")
    lines.append(
        f"Largest gain: {best[0]} on {best[1]}, {gain:+.1f} points; batch statistics alone: {statistics:+.1f}."
    )
    for net in NETS:
        lost = [method for method in methods if mean[method, net] < mean["source", net] - 0.05]
        if lost:
            lines.append(f"On {net} adapting loses with {', '.join(lost)}.")
    lines.append("Answers before or after the update on the same batch: compare like with like (readout=).")
    return "\n".join(lines)
