"""Fill README and docs with measured speeds: the places `<!-- speed:FILE WHAT -->` ... `<!-- /speed -->`.

    python benchmarks/speed_docs.py            # after a run of benchmarks/gpu_check.sh

FILE is one of results/speed/. WHAT is `rows` (all rows), `summary` (a few of them, for README), `curve` (images per
second by batch size), `picture` (what `speed_figure.py` draws), `agreement`, `contract`, `ratio` (one update
against a forward), `memory` (allocated, reserved, and after `unload`), `auto` (its times, and whether it was captured),
`none` (batches of which no sample is selected), `stream` (from files to answers), or `stacked` (streams as one batch).
A file that is not there, or is of another tree (`tree_hash.py`), is not quoted: its place says so. A test holds the
pages to this.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from tree_hash import GUARDED, MEASURED, ROOT, STACKED, plain_tree, tree_hash  # noqa: E402, F401 - some for tests

PLACE = re.compile(r"<!-- speed:(\S+) (\w+) -->\n.*?<!-- /speed -->", re.DOTALL)
Content = dict[str, Any]


def pages(root: Path = ROOT) -> list[Path]:
    """README and every page of the docs."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def filled(page: str, results: Path, today: str) -> str:
    """A page with what the files of today's tree say in its places.

    Raises:
        ValueError: A place asks for something that there is not.
    """

    def place(match: re.Match[str]) -> str:
        name, what = match[1], match[2]
        if what not in SHOWN:
            raise ValueError(f"expected speed:FILE with one of {', '.join(SHOWN)}; got {what!r}")
        return f"<!-- speed:{name} {what} -->\n\n{_said(results / name, what, today)}\n\n<!-- /speed -->"

    return PLACE.sub(place, page)


def _said(path: Path, what: str, today: str) -> str:
    if not path.is_file():
        return f"Not measured yet for this version of the code (`{path.name}`)."
    content = json.loads(path.read_text())
    if content.get("tree") != today:
        return f"The numbers in `results/speed/{path.name}` are of an earlier version of the code and not quoted."
    return SHOWN[what](content)


def _good(content: Content) -> list[Content]:
    """Rows without an error; those with a guard only where its code is as it was."""
    same = content.get("guarded") == tree_hash(names=GUARDED)
    return [row for row in content["rows"] if row["status"] == "ok" and (same or not _is_guarded(row))]


def _is_guarded(row: Content) -> bool:
    return str(row.get("method", "")).startswith("guarded")


def _left_out(content: Content, rows: list[Content]) -> str:
    """Sentences about rows with a guard that are not quoted, and about those that an unfinished run did not come to.

    `rows` are those that the table shows: it leaves out networks that are in another table alone.
    """
    said = ""
    if any(map(_is_guarded, content["rows"])) and not any(map(_is_guarded, _good(content))):
        said += "\n\nRows with a guard are of an earlier version of its code and not quoted."
    there = {" ".join(str(row.get(key)) for key in ROW) for row in content["rows"]}
    elsewhere = {str(row["net"]) for row in _good(content)} - {str(row["net"]) for row in rows}
    skipped = [each for each in content.get("skipped", ()) if each.split()[0] not in elsewhere]
    skipped = [each for each in skipped if _named(each) not in there]
    if skipped:
        said += f"\n\n**Unfinished**: {_why_unfinished(content)}. Not measured: {', '.join(map(_words, skipped))}."
    return said


def _why_unfinished(content: Content) -> str:
    """Whether a run that left rows out had used its time, or was cut off before."""
    spent, budget = content["seconds"], content["settings"]["budget"]
    if spent >= budget:
        return f"the run was cut off when its {budget:.0f} s were over"
    return f"the run was cut off after {spent:.0f} s, of {budget:.0f} that it might have taken"


def _named(skipped: str) -> str:
    """The `ROW` of a row that was left out, which is written `NET batch SIZE METHOD MODE SHARE %`."""
    net, _, batch, method, mode, share, _ = skipped.split()
    return f"{net} {method} {mode} {batch} {share}"


def _words(skipped: str) -> str:
    """The same for a page: without a share where none is forced."""
    return skipped.removesuffix(" 100 %") if skipped.split()[3] in AS_THEY_DO else skipped


ROW = ("net", "method", "mode", "batch", "select")
"""What tells one row of a file from another."""


def _mode(row: Content) -> str:
    return str(row["mode"]) if row.get("as_asked", True) else f"{row['mode']}, ran eagerly"


def _mode_in_full(row: Content) -> str:
    return _mode(row) + (", additions apart" if _apart(row) else "")


def _apart(row: Content) -> bool:
    """Whether the trial of fused ReLUs and additions failed, so that norm layers ran without them."""
    return any(note.startswith("ReLU and additions run apart") for note in row.get("notes", ()))


def _selected(row: Content) -> str:
    return f"{row['select']} %" if row["method"] not in AS_THEY_DO else "-"


AS_THEY_DO = ("forward", "source", "bn", "auto", "guarded-auto")
"""Rows whose selection is not forced."""


def _rows(content: Content) -> str:
    rows = [row for row in _good(content) if row.get("curve") is None]
    lines = [
        [row["net"], row["batch"], row["method"], _mode_in_full(row), _selected(row), f"{row['images_per_s']:.0f}",
         f"{row['median_ms']:.2f}", _or_dash(row["ratio_to_source"], ".2f"), _or_dash(row["share_of_limit"], ".0%"),
         _or_dash(row["peak_allocated_mib"], "d"), _or_dash(row.get("memory_over_tent"), ".2f"),
         _or_dash(row.get("peak_reserved_mib"), "d")]
        for row in rows
    ]  # fmt: skip
    heads = [
        "network",
        "batch",
        "method",
        "mode",
        "selected",
        "images/s",
        "ms",
        "x source",
        "of limit",
        "MiB",
        "x Tent",
        "reserved",
    ]
    return f"{_machine(content)}\n\n{_table(heads, lines)}{_left_out(content, rows)}"


def _machine(content: Content) -> str:
    """The device and torch that a file was measured with."""
    about = {**content, **content.get("host", {})}
    return f"{about['device'].replace('cpu', 'a CPU')}, torch {about['torch']}:"


SUMMARISED = {
    "source": "the model as it is", "tent": "Tent", "poem1": "POEM, one update", "poem2": "POEM, two updates",
    "guarded-auto": "`auto`, guarded",
}  # fmt: skip


def _summary(content: Content) -> str:
    rows = {(row["method"], row["batch"]): row for row in _good(content) if _mode(row) == "bf16"}
    lines = []
    for method, words in SUMMARISED.items():
        many, one = rows.get((method, 64)), rows.get((method, 1))
        if many is not None and one is not None:
            share = _or_dash(many["share_of_limit"], ".0%")
            lines.append([words, f"{many['images_per_s']:.0f}", share, f"{one['median_ms']:.1f}"])
    return _table(["method", "images/s, batches of 64", "of limit", "ms for one image"], lines) + _left_out(
        content, _good(content)
    )


def _curve(content: Content) -> str:
    rows = [row for row in _good(content) if row.get("curve") == "batch"]
    batches = sorted({row["batch"] for row in rows})
    speeds = {(row["net"], row["batch"]): f"{row['images_per_s']:.0f}" + r" \*" * _apart(row) for row in rows}
    nets = sorted({row["net"] for row in rows})
    lines = [[net, *(speeds.get((net, batch), "-") for batch in batches)] for net in nets]
    table = _table(["POEM, one update, bf16: images/s at batch", *map(str, batches)], lines)
    apart = f"\n\n\\* {APART}" if any(map(_apart, rows)) else ""
    return f"{_machine(content)}\n\n{table}{apart}{_left_out(content, rows)}"


APART = (
    "ReLU and additions ran apart from the norm layers before them: on the first batch the answers with and without "
    "differed by more than the trial's tolerance."
)


def _memory(content: Content) -> str:
    """MiB of the first row of a process, and what the whole process came to hold."""
    good = [row for row in _good(content) if row.get("unloaded_reserved_mib") is not None]
    if not good:
        return "No such row was measured."
    first, most = good[0], max(good, key=lambda row: int(row["unloaded_reserved_mib"]))
    return (
        f"The first row of its file, {first['net']}, `{first['method']}` in batches of {first['batch']}, had at its "
        f"peak {first['peak_allocated_mib']:,} MiB allocated and {first['peak_reserved_mib']:,} reserved; after "
        f"`unload` {first['unloaded_mib']:,} and {first['unloaded_reserved_mib']:,} were left. Later rows of the same "
        f"process capture into what is reserved, and add to it: after {most['net']} in batches of {most['batch']} was "
        f"unloaded, {most['unloaded_mib']:,} MiB were allocated and {most['unloaded_reserved_mib']:,} reserved."
    )


def _none(content: Content) -> str:
    """What a call takes that selects no sample, beside one that selects all: of methods captured, and of the others."""
    rows = [row for row in _good(content) if row.get("curve") is None and row["mode"] == "bf16"]
    full = {(row["net"], row["batch"], row["method"]): row for row in rows if row["select"] == 100 and row["as_asked"]}
    captured, eager = [], []
    for row in rows:
        other = full.get((row["net"], row["batch"], row["method"]))
        if row["select"] == 0 and other is not None:
            now = f"`{row['method']}` {row['median_ms']:.1f}"
            (captured if row["as_asked"] else eager).append(f"{now} in the place of {other['median_ms']:.1f}")
    if not captured and not eager:
        return "No such row was measured."
    said = [f"{rows[0]['net']}, bf16, batches of {rows[0]['batch']}, ms of a call that selects no sample:"]
    if captured:
        said.append(f"{', '.join(captured)}.")
    if eager:
        said.append(f"Where no sample was selected from the beginning, these ran eagerly: {', '.join(eager)}.")
    return " ".join(said)


def _auto(content: Content) -> str:
    """What `auto` took with `precision="bf16"`, with a guard and without, and whether it was captured."""
    rows = [row for row in _good(content) if row["mode"] == "bf16" and row["method"] in ("auto", "guarded-auto")]
    if not rows:
        return "No row of `auto` is quoted."
    said = []
    for row in rows:
        size = "one image" if row["batch"] == 1 else f"a batch of {row['batch']}"
        captured = "captured" if row["as_asked"] else "eager"
        said.append(
            f"{'guarded ' * _is_guarded(row)}`auto` for {size} {row['median_ms']:.1f} ms ({captured}, "
            f"{row['ratio_to_source']:.1f} times `source`)"
        )
    there = {(row["method"], row["batch"]) for row in rows}
    skipped = [_named(each).split() for each in content.get("skipped", ())]
    missing = [
        f"{'guarded ' * (method == 'guarded-auto')}`auto` in batches of {batch}"
        for _, method, mode, batch, _ in skipped
        if mode == "bf16" and method in ("auto", "guarded-auto") and (method, int(batch)) not in there
    ]
    left = f" Not measured: {', '.join(missing)}." if missing else ""
    return f"- {rows[0]['net']}, bf16: {', '.join(said)}.{left}"


CAMERA = {"source": "no adapting", "tent": "Tent", "poem2": "POEM", "auto": "`auto`", "guarded-auto": "guarded `auto`"}
"""Methods that a camera's owner compares, as a page calls them."""


def _camera(content: Content) -> str:
    """Single images in bf16: median and 99th percentile of a call, and images per second."""
    lines = []
    for row in _good(content):
        if row["batch"] == 1 and row["mode"] == "bf16" and row["method"] in CAMERA:
            eager = "" if row["as_asked"] else ", eager"
            said = f"{row['median_ms']:.1f} ms (p99 {row['p99_ms']:.1f}; {row['images_per_s']:.0f} images/s{eager})"
            lines.append(f"{CAMERA[row['method']]} {said}")
    if not lines:
        return "No row of single images is quoted."
    about = {**content, **content.get("host", {})}
    return f"- {_good(content)[0]['net']}, {about['device']}, bf16, one image: {'; '.join(lines)}."


def _camera_cpu(content: Content) -> str:
    """Images per second of the network alone and of POEM with one update, on a CPU."""
    ratio = content["ratio"]
    alone, poem = (ratio["batch"] / ratio[key] for key in ("forward_s", "poem1_s"))
    return (
        f"- {ratio['net']}, {ratio['threads']} threads of a CPU, fp32, batches of {ratio['batch']}: no adapting "
        f"{alone:.0f} images/s, POEM with one update {poem:.0f}."
    )


def _picture(content: Content) -> str:
    """The pictures of `speed_figure.py` that there are rows for, what is on them, and what they leave out."""
    curves = [row for row in _good(content) if row.get("curve") == "batch"]
    methods = [row for row in _good(content) if row.get("curve") is None]
    device, said = {**content, **content.get("host", {})}["device"], []
    if curves:
        poem = f"POEM with one update, {curves[0]['mode']}"
        said += [
            f"![{poem}: images per second, milliseconds of a call and allocated memory over the batch size, for "
            f"{len({row['net'] for row in curves})} networks](speed_curves.png)",
            f"{poem}, {curves[0]['select']} % selected, {device}. Memory is the peak of what was allocated, the "
            "network and eight batches of images included. A line has no point where the file has no row. At open "
            "points ReLU and additions ran apart from the norm layers: the first batch had shown a difference.",
        ]
    if methods:
        shares = _listed(sorted({row["select"] for row in methods}, reverse=True))
        where = f"{methods[0]['net']}, batches of {methods[0]['batch']}, {methods[0]['mode']}, {device}"
        said += [
            f"![Images per second of methods with {shares} % of the samples selected](speed_methods.png)",
            f"{where}. Hatched bars ran eagerly; there is no bar where the file has no row.",
        ]
    return "\n\n".join([*said, *_around_a_run(curves)])


def _around_a_run(rows: list[Content]) -> list[str]:
    """Seconds of the call that captured, by network, and memory after `unload`, by batch."""
    rows = [row for row in rows if row.get("unloaded_mib") is not None and row.get("as_asked", True)]
    if not rows:
        return []
    batches, nets = sorted({row["batch"] for row in rows}), sorted({row["net"] for row in rows})
    seconds = [
        f"{_span([row['slowest_call_s'] for row in rows if row['net'] == net], '.1f')} for {net}" for net in nets
    ]
    left = [_span([row["unloaded_mib"] for row in rows if row["batch"] == batch], "d") for batch in batches]
    reserved = _span([row["unloaded_reserved_mib"] for row in rows], "d")
    return [
        f"The call that captured took, in seconds, {_listed(seconds)}. After `unload`, with the network gone too, "
        f"{_listed(left)} MiB were allocated at batches of {_listed(batches)}, the images among them. All rows were "
        f"measured in one process, which still had {reserved} MiB reserved after `empty_cache`, what earlier rows left "
        "included; so reserved memory is not drawn."
    ]


def _span(values: list[float], form: str) -> str:
    ends = format(min(values), form), format(max(values), form)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _listed(each: list[Any]) -> str:
    *first, last = map(str, each)
    return f"{', '.join(first)} and {last}" if first else last


def _agreement(content: Content) -> str:
    found: dict[str, list[Content]] = {}
    for row in content["rows"]:  # of a stage that passed, and so without errors
        found.setdefault(row["network"], []).append(row)
    lines = [
        [net, len({row["method"] for row in rows}), min(row["batches"] for row in rows),
         sum(row["captured"] for row in rows), f"{max(row['largest_difference_of_probabilities'] for row in rows):.1g}",
         sum(row["largest_difference_of_probabilities"] == 0 for row in rows),
         sum(row["selected_by_one_alone"] for row in rows)]
        for net, rows in sorted(found.items())
    ]  # fmt: skip
    heads = ["network", "methods", "batches", "methods captured", "largest difference", "methods equal to the bit",
             "selected by one alone"]  # fmt: skip
    return f"{_machine(content)}\n\n{_table(heads, lines)}\n\n{_about_agreement(found)}"


def _about_agreement(found: dict[str, list[Content]]) -> str:
    """Which networks differ at all, and which methods are captured on none."""
    said = []
    for net, rows in sorted(found.items()):
        far = [each for each in (row["largest_difference_of_probabilities"] for row in rows) if each]
        if far:
            others = sum(row["selected_by_one_alone"] for row in rows)
            said.append(
                f"On {net} {len(far)} of {len(rows)} methods differ, by at most {max(far):.1g} in a probability; "
                f"{others or 'no'} samples are selected by one alone."
            )
    every = [row for rows in found.values() for row in rows]
    never = {row["method"] for row in every} - {row["method"] for row in every if row["captured"]}
    if never:
        hosts = sorted({name.partition("+")[0].removesuffix("*") for name in never})
        said.append(
            f"{len(never)} methods decide on the host and are captured on no network, so that both of their runs are "
            f"eager: those of {', '.join(f'`{name}`' for name in hosts)}, with `*` and `+poem` where they have them."
        )
    return " ".join(said)


def _contract(content: Content) -> str:
    """Number of tests; the stage writes the file only where none failed."""
    return f"{content['passed']} tests of the contract passed on a GPU with `fast=True`, {content['failed']} failed."


def _ratio(content: Content) -> str:
    found = content["ratio"]
    pairs = found["ratio_of_each_pair"]
    return (
        f"{found['net']}, batch {found['batch']}, {found['threads']} threads, {_machine(content)} POEM with one update "
        f"takes **{found['ratio']:.2f}** times a plain forward: the median time of {found['pairs']} calls over the "
        f"median of {found['pairs']} forwards, in turns. Single pairs are {min(pairs):.2f} to {max(pairs):.2f}, their "
        f"median {statistics.median(pairs):.2f}."
    )


def _stream(content: Content) -> str:
    lines = [
        [row["images"], row["workers"], f"{row['loader_images_per_s']:.0f}", f"{row['adapter_images_per_s']:.0f}",
         f"{row['run_images_per_s']:.0f}", f"{row['of_adapter']:.0%}", f"{row['over_in_turn']:.2f}"]
        for row in _good(content)
    ]  # fmt: skip
    heads = ["images", "loader processes", "loader alone, images/s", "adapter alone", "run", "of adapter", "x in turn"]
    settings = content["settings"]
    words = (
        f"{settings['net']}, POEM with one update, {settings['precision']}, batches of {settings['batch']}: **run** is "
        f"`StreamRun`, **of adapter** its share of the adapter's own speed, **x in turn** its speed over that of "
        f"loading in turn. Each number is of {float(settings['seconds']):g} seconds."
    )
    left = "; ".join(f"{images} with {workers} processes" for images, workers in content["skipped"])
    left = f"\n\nNot measured: {left}." if left else ""
    return f"{words}\n\n{content['device']}, {content['cores']} cores:\n\n{_table(heads, lines)}{left}"


def _stacked(content: Content) -> str:
    if content.get("serve") != tree_hash(names=STACKED):
        return "The numbers in `results/speed/stacked.json` are of an earlier version of the service and not quoted."
    lines = [
        [f"`{row['method']}`", f"{row['stacked']:.0f}", f"{row['turns']:.0f}", f"{row['one_stream']:.0f}",
         f"{row['ratio']:.0%}", f"{row['difference']:.0e}"]
        for row in content["rows"]
    ]  # fmt: skip
    heads = ["method", "stacked, images/s", "in turn", "one stream, batches of 64", "stacked over one stream",
             "largest difference in probability"]  # fmt: skip
    return f"{content['device']}, {content['streams']} streams:\n\n{_table(heads, lines)}"


SHOWN: dict[str, Callable[[Content], str]] = {
    "rows": _rows, "summary": _summary, "curve": _curve, "picture": _picture, "memory": _memory, "auto": _auto,
    "none": _none, "camera": _camera, "cpu": _camera_cpu,
    "agreement": _agreement, "ratio": _ratio, "stream": _stream, "stacked": _stacked,
    "contract": _contract,
}  # fmt: skip


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _table(heads: list[str], lines: list[list[Any]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [heads, ["---"] * len(heads), *lines])


def main(arguments: list[str] | None = None) -> int:
    """Fill every page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    today = tree_hash()
    for path in pages():
        text = path.read_text()
        new = filled(text, ROOT / "results" / "speed", today)
        if new != text:
            path.write_text(new)
            print(f"filled {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
