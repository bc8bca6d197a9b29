"""The tables of the study as Markdown, each with n, seeds and a paired standard error."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from auto.rows import has_batch_norm

from study import answers, parts, rows
from study.claims import CORRUPTED, verdicts
from study.evidence import ROOT, Difference, Evidence
from study.rows import AUTO_STATISTICS

NONE = "Not measured yet.\n"
SHORT = {
    "clean": "clean", "gaussian_noise-5": "gauss", "shot_noise-5": "shot", "impulse_noise-5": "impulse",
    "defocus_blur-5": "defocus", "glass_blur-5": "glass", "motion_blur-5": "motion", "zoom_blur-5": "zoom",
    "snow-5": "snow", "frost-5": "frost", "fog-5": "fog", "brightness-5": "bright", "contrast-5": "contrast",
    "elastic_transform-5": "elastic", "pixelate-5": "pixel", "jpeg_compression-5": "jpeg",
}  # fmt: skip
"""Streams in the order of the paper's columns, and their heads."""
NET_WORDS = {
    "resnet50-keras": "ResNet-50, batch norm; ImageNet", "vit-tiny16": "ViT-Tiny/16; ImageNet",
    "cifar10-bn": "small ResNet, batch norm; CIFAR-10", "cifar10-gn": "small ResNet, group norm; CIFAR-10",
    "cifar10-vit": "small ViT; CIFAR-10", "effnet-lite0": "EfficientNet-Lite0; Tiny-ImageNet",
    "effnet-lite1": "EfficientNet-Lite1; Tiny-ImageNet", "effnet-lite2": "EfficientNet-Lite2; Tiny-ImageNet",
}  # fmt: skip
PAPER_NETS = {"resnet50-keras": "ResNet-50-BN", "vit-tiny16": "ViTbase-LN"}
PAPER_ROWS = {"source": "No Adapt.", "tent": "Tent", "eata": "EATA", "sar": "SAR", "deyo": "DeYO", "roid": "ROID",
              "poem": "POEM (Algorithm 1)"}  # fmt: skip
LARGE = ("source", "bn", "tent", "poem", "deyo+poem", "mean6", "auto")


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with numbers to the right; `left` columns to the left."""
    if not lines:
        return NONE
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def about(evidence: Evidence, net: str, streams: Sequence[str] = parts.ALL, batch: int = 64) -> str:
    """Images of a stream and seeds of a network's cells, in words."""
    runs = next((evidence.run(net, "source", stream, batch) for stream in streams), {})
    if not runs:
        return ""
    each = len(next(iter(runs.values())).bits)
    seeds = f"{len(runs)} seeds" if len(runs) > 1 else "one seed"
    told = " (of `results/auto`, until the suite is measured)" if net in evidence.borrowed else ""
    return f"{each:,} images a stream, {seeds}{told}"


def _points(found: Difference | None) -> str:
    if found is None:
        return ""
    return _marked(found.rounded(1), found)


def _marked(text: str, found: Difference) -> str:
    """Bold where a difference is above, italic where it is below."""
    return f"**{text}**" if found.state == "above" else f"*{text}*" if found.state == "below" else text


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


# Each suite -----------------------------------------------------------------------------------------------------------


def means(evidence: Evidence, net: str) -> str:
    """Every main row of a network: mean over all 16 streams, published statistics beside those of `auto`."""
    lines = []
    both = has_batch_norm(net)
    four = [row for row in rows.MAIN if evidence.has(net, row + AUTO_STATISTICS, parts.FOUR)]
    for row in rows.MAIN:
        if not evidence.has(net, row, parts.ALL):
            continue
        found = None if row == "source" else evidence.difference(net, [(row, "source")], parts.ALL)
        seeds = evidence.run(net, row, "clean")
        n = sum(evidence.count(net, row, stream) for stream in parts.ALL)
        line = [f"`{row}`", _number(evidence.accuracy(net, row, parts.ALL)), _points(found), f"{n:,}", str(len(seeds))]
        if both and four:
            own = row + AUTO_STATISTICS if row in four else row
            other = evidence.difference(net, [(own, "source")], parts.FOUR) if row in four else None
            line += [
                _number(evidence.accuracy(net, row, parts.FOUR)) if row in four else "",
                _number(evidence.accuracy(net, own, parts.FOUR)) if row in four else "", _points(other),
            ]  # fmt: skip
        lines.append(line)
    head = ["row", "mean of 16", "minus source", "n", "seeds"]
    if both and four:
        head += ["mean of four", "with `auto`'s statistics", "minus source"]
    if not lines:
        return ""
    return f"`{net}`: {NET_WORDS[net]}; {about(evidence, net)}.\n\n{table(head, lines)}"


def streams(evidence: Evidence, net: str) -> str:
    """Rows by streams: accuracy ± the paired standard error of the difference to source."""
    chosen = [stream for stream in SHORT if evidence.run(net, "source", stream)]
    lines = []
    for row in [*rows.MAIN, *rows.STATISTICS]:
        line = [f"`{row}`"]
        for stream in chosen:
            accuracy = evidence.accuracy(net, row, [stream])
            found = None if row == "source" else evidence.difference(net, [(row, "source")], [stream])
            text = _number(accuracy)
            if found is not None:
                text = _marked(f"{text} ± {found.error:.1f}", found)
            line.append(text)
        if any(line[1:]):
            lines.append(line)
    if not lines:
        return ""
    return f"`{net}`, {about(evidence, net)}:\n\n" + table([net, *(SHORT[each] for each in chosen)], lines)


def paper(evidence: Evidence) -> str:
    """Mean over 15 corruptions beside the paper's, for the networks that are nearest to its own."""
    printed = json.loads((ROOT / "benchmarks" / "suites" / "paper.json").read_text())["ICmain"]
    found = []
    for net, block in PAPER_NETS.items():
        lines = []
        source = fmean(value for name, value in printed[block]["No Adapt."].items() if name != "Avg.")
        for row, name in PAPER_ROWS.items():
            own = printed[block].get(name) or printed[block].get("POEM(ours)")
            theirs = fmean(value for column, value in own.items() if column != "Avg.")
            accuracy = evidence.accuracy(net, row, CORRUPTED)
            if accuracy is None:
                continue
            one = None if row == "source" else evidence.difference(net, [(row, "source")], CORRUPTED)
            lines.append([
                f"`{row}`", _number(accuracy), _points(one), f"{theirs:.1f}",
                "" if row == "source" else f"{theirs - source:+.1f}",
            ])  # fmt: skip
        head = [f"{net} / {block}", "here", "minus source", "the paper", "minus its source"]
        if lines:
            found.append(f"`{net}`: {about(evidence, net)}.\n\n" + table(head, lines))
    return "\n".join(found) or NONE


def scenarios(evidence: Evidence) -> str:
    """The main methods on streams of several shifts, of classes in runs, and of single images."""
    lines = []
    for net in answers.NETS:
        for stream in answers.SCENARIO_STREAMS:
            if evidence.run(net, "source", stream):
                lines.append([net, stream, f"{evidence.count(net, 'source', stream):,}",
                              *(_versus(evidence, net, row, [stream], 64) for row in rows.FIRST)])  # fmt: skip
        if evidence.has(net, "source", parts.FOUR, 1):
            n = sum(evidence.count(net, "source", stream, 1) for stream in parts.FOUR)
            lines.append([net, "single images, four corruptions", f"{n:,}",
                          *(_versus(evidence, net, row, parts.FOUR, 1) for row in rows.FIRST)])  # fmt: skip
    return table(["network", "stream", "n", *(f"`{row}`" for row in rows.FIRST)], lines, 2)


def _versus(evidence: Evidence, net: str, row: str, chosen: Sequence[str], batch: int) -> str:
    """Accuracy, and the difference to source with its error."""
    accuracy = evidence.accuracy(net, row, chosen, batch)
    if accuracy is None or row == "source":
        return _number(accuracy)
    found = evidence.difference(net, [(row, "source")], chosen, batch)
    return f"{accuracy:.1f} ({_points(found)})" if found is not None else _number(accuracy)


def batches(evidence: Evidence) -> str:
    """Batch sizes beside 64, over the four corruptions."""
    lines = []
    for net in answers.NETS:
        for size in (1, *parts.BATCHES):
            if evidence.has(net, "source", parts.FOUR, size):
                n = sum(evidence.count(net, "source", stream, size) for stream in parts.FOUR)
                values = [_versus(evidence, net, row, parts.FOUR, size) for row in rows.FEW]
                lines.append([net, str(size), f"{n:,}", *values])
    return table(["network", "batch", "n", *(f"`{row}`" for row in rows.FEW)], lines)


def _beside(row: str) -> str:
    """The row that a variant is compared with."""
    return "poem" if row == "poem-official" else row.split(",")[0].removesuffix("*").split("+poem-i")[0]


def variants(evidence: Evidence, net: str) -> str:
    """Each variant over the four corruptions, against the row that it varies."""
    lines = []
    for row in rows.VARIANTS:
        other = _beside(row)
        accuracy = evidence.accuracy(net, row, parts.FOUR)
        if accuracy is None or other == row or row == "source":
            continue
        found = evidence.difference(net, [(row, other)], parts.FOUR)
        seeds = str(len(found.seeds)) if found is not None else ""
        lines.append([f"`{row}`", _number(accuracy), f"`{other}`", _points(found), seeds])
    if not lines:
        return ""
    runs = evidence.run(net, lines[0][0].strip("`"), parts.FOUR[0])
    told = f"{len(next(iter(runs.values())).bits):,} images a stream and seed"
    head = ["row", "mean", "against", "difference", "seeds of both"]
    return f"`{net}`, mean over four corruptions, {told}:\n\n" + table(head, lines)


def newest(evidence: Evidence) -> str:
    """The newest methods over clean and four corruptions, against source, and their `+poem` against themselves."""
    found = []
    for net in answers.APART:
        lines = []
        for row in rows.NEWEST[1:]:
            accuracy = evidence.accuracy(net, row, parts.FIVE)
            if accuracy is None:
                continue
            one = evidence.difference(net, [(row, "source")], parts.FIVE)
            host = row.removesuffix("+poem")
            two = evidence.difference(net, [(row, host)], parts.FIVE) if host != row else None
            seeds = len(evidence.run(net, row, "clean"))
            n = sum(evidence.count(net, row, stream) for stream in parts.FIVE)
            lines.append([f"`{row}`", _number(accuracy), _points(one), _points(two), f"{n:,}", str(seeds)])
        if lines:
            head = [net, "mean of five", "minus source", "minus its host", "n", "seeds"]
            found.append(table(head, lines))
    return "\n".join(found) or NONE


def records(evidence: Evidence) -> str:
    """What became of samples: right before any update, by group."""
    lines = []
    for net in answers.APART:
        for row in rows.RECORDED:
            found = answers.samples(evidence, net, row)
            if found is None:
                continue
            groups = [
                f"{each.share:.1f} % of {each.n:,}" if each.n else "none"
                for each in (found.selected, found.newly, found.rest)
            ]
            lines.append([
                net, f"`{row.removesuffix(', recorded')}`", *groups, _points(found.over_rest),
                _points(found.over_selected), _points(found.same_entropy),
            ])  # fmt: skip
    head = ["network", "row", "selected at first", "newly reliable", "never", "newly minus never",
            "newly minus selected", "at the same entropy"]  # fmt: skip
    return table(head, lines, 2)


# Over all suites ------------------------------------------------------------------------------------------------------


def coverage(suites: Mapping[str, Mapping[str, Any]]) -> str:
    """Cells that are there and that are not, by suite and part."""
    lines = []
    for suite, facts in suites.items():
        left = {part: sum(own.values()) for part, own in facts["left_out"].items()}
        words = ", ".join(f"{part} {count}" for part, count in left.items())
        lines.append([suite, str(facts["cells"]), str(sum(left.values())), words or "-"])
    return table(["suite", "cells", "not measured", "of the parts"], lines)


def provenance(suites: Mapping[str, Mapping[str, Any]]) -> str:
    """The runs that cells were measured in."""
    lines = []
    for suite, facts in suites.items():
        for name, run in facts["runs"].items():
            told = [str(run.get(key, "")) for key in ("started", "tree", "torch", "device", "processes")]
            lines.append([suite, name, *told])
    if not lines:
        return (
            "Every cell so far was taken over from `results/auto`, where its `tree` says what it was measured with.\n"
        )
    return table(["suite", "run", "started", "library (hash)", "torch", "device", "processes"], lines, 7)


def left_out() -> str:
    """What the plan does not have."""
    return "".join(f"- {what}: {why}.\n" for what, why in parts.LEFT_OUT.items())


def claims(evidence: Evidence) -> str:
    """The paper's claims by network."""
    nets = answers.MAIN_NETS
    marks = {"holds": "**holds**", "fails": "*fails*", "open": "open", "": ""}
    lines = []
    for claim, found in verdicts(evidence):
        values = []
        for net in nets:
            verdict = found.get(net)
            if verdict is None:
                values.append("-")
            else:
                values.append(f"{marks[verdict.state]} {verdict.words}".strip() or "not measured")
        lines.append([claim.where, claim.text, *values])
    return table(["paper", "claim", *nets], lines, 2 + len(nets))


def claim_counts(evidence: Evidence) -> str:
    """How many of the paper's claims hold, in a sentence."""
    found = [verdict for _, each in verdicts(evidence) for verdict in each.values()]
    counts = {state: sum(each.state == state for each in found) for state in ("holds", "fails", "open", "")}
    return (
        f"Of {len(found)} pairs of a claim and a network, {counts['holds']} hold, {counts['fails']} fail, "
        f"{counts['open']} are open, and {counts['']} were not measured.\n"
    )


def failures(evidence: Evidence) -> str:
    """Rows that are below source somewhere."""
    lines = [
        [
            each.net,
            f"`{each.row}`",
            f"{each.below} of {each.cells}",
            each.worst,
            each.difference.rounded(1),
        ]
        for each in answers.failures(evidence, rows.MAIN[1:])
    ]
    return table(["network", "row", "streams below source", "worst of them", "minus source"], lines, 2)


# For the text ---------------------------------------------------------------------------------------------------------


def large(earlier: Evidence) -> str:
    """Large networks with batch norm: the batch's statistics, the mean over six weights, and `auto`."""
    lines = []
    for net in ("resnet50-keras", "effnet-lite0", "effnet-lite1", "effnet-lite2", "cifar10-bn"):
        chosen = [stream for stream in parts.ALL if earlier.run(net, "source", stream)]
        for row in LARGE:
            accuracy = earlier.accuracy(net, row, chosen)
            if accuracy is None:
                continue
            if row == "source":
                told, worst = f"{len(chosen)} streams, {_count(earlier, net)}", ""
            else:
                found = {each: earlier.difference(net, [(row, "source")], [each]) for each in chosen}
                held = {each: one for each, one in found.items() if one is not None}
                least = min(held, key=lambda each: held[each].points)
                told = _points(earlier.difference(net, [(row, "source")], chosen))
                worst = f"{SHORT[least]} {_points(held[least])}"
            name = "mean over six weights" if row == "mean6" else f"`{row}`"
            lines.append([net, name, _number(accuracy), told, worst])
    return table(["network", "row", "mean", "minus source", "worst of these streams"], lines, 2)


def _sentence(evidence: Evidence, pair: tuple[str, str], chosen: Sequence[str]) -> str:
    """A difference on every network that has it."""
    found = {net: evidence.difference(net, [pair], chosen) for net in NET_WORDS}
    return ", ".join(f"{each} on `{net}`" for net, each in found.items() if each is not None)


def shares(earlier: Evidence) -> str:
    """The mean over six weights against the batch's statistics alone, and `auto` against that mean."""
    return (
        f"The mean over six weights minus `bn`, 16 streams: {_sentence(earlier, ('mean6', 'bn'), parts.ALL)}. "
        f"`auto` minus that mean: {_sentence(earlier, ('auto', 'mean6'), parts.ALL)}.\n"
    )


def clean_cost(earlier: Evidence) -> str:
    """What the batch's statistics cost where nothing has shifted."""
    return f"`bn` minus `source` on clean images: {_sentence(earlier, ('bn', 'source'), ['clean'])}.\n"


def in_order(earlier: Evidence) -> str:
    """Images sorted by class, in the cells of the earlier comparison."""
    lines = []
    for net in NET_WORDS:
        for stream in ("sorted-clean", "sorted-contrast-5"):
            if earlier.run(net, "source", stream):
                values = [_versus(earlier, net, row, [stream], 64) for row in ("source", "tent", "poem", "auto")]
                lines.append([net, stream, f"{earlier.count(net, 'source', stream):,}", *values])
    return table(["network", "stream", "n", "`source`", "`tent`", "`poem`", "`auto`"], lines, 2)


def _count(evidence: Evidence, net: str) -> str:
    runs = evidence.run(net, "source", "clean")
    return f"{len(next(iter(runs.values())).bits):,} images" + (f", {len(runs)} seeds" if len(runs) > 1 else "")


def seeds(evidence: Evidence) -> str:
    """How far seeds differ, in a sentence."""
    found = answers.spread(evidence)
    if found is None:
        return NONE
    middle, most, cells = found
    return (
        f"Over {cells} cells with three seeds (a main row against source on one stream), the standard error over seeds "
        f"is {middle:.1f} times the paired one in the median, and up to {most:.1f} times.\n"
    )


def all_tables(evidence: Evidence, suites: Mapping[str, Mapping[str, Any]], earlier: Evidence) -> dict[str, str]:
    """Every table and text by the name of its place."""
    found = {
        "coverage": coverage(suites), "provenance": provenance(suites), "left-out": left_out(),
        "paper": paper(evidence), "scenarios": scenarios(evidence), "batches": batches(evidence),
        "newest": newest(evidence), "records": records(evidence), "claims": claims(evidence),
        "claim-counts": claim_counts(evidence), "failures": failures(evidence), "large": large(earlier),
        "seeds": seeds(evidence), "shares": shares(earlier), "clean-cost": clean_cost(earlier),
        "in-order": in_order(earlier),
    }  # fmt: skip
    makers: dict[str, Callable[[Evidence, str], str]] = {"means": means, "streams": streams, "variants": variants}
    for kind, make in makers.items():
        for suite, nets in parts.SUITES.items():
            texts = [text for net in nets if (text := make(evidence, net))]
            found[f"{kind}-{suite}"] = "\n".join(texts) or NONE
    for answer in answers.answers(evidence):
        found[f"answer-{answer.name}"] = answer.text
    found["answers"] = "\n".join(found[name] for name in found if name.startswith("answer-"))
    return found
