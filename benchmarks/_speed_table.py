"""What follows from the rows of `benchmarks/speed.py`: shares of the limit, gains, and the table."""

from __future__ import annotations

from _speed_place import Row
from _speed_rows import METHODS, MODES

FACTORS = {  # arithmetic of 1 and 2 updates over that of a plain forward, with a doubled deep part
    "resnet50-bn": {"poem1": 3.45, "poem2": 5.75},
    "resnet50-gn": {"poem1": 3.45, "poem2": 5.75},
    "vit-b16": {"poem1": 3.25, "poem2": 5.4},
}


def derive(rows: list[Row]) -> None:
    """Adds to each row its time against source's, and its share of the limit."""
    source = {(row["net"], row["batch"], row["mode"]): row["images_per_s"] for row in _good(rows, "source")}
    limit: dict[tuple[str, int], float] = {}
    for row in _good(rows, "forward"):
        if row["mode"].startswith("bf16-compiled"):
            key = row["net"], row["batch"]
            limit[key] = max(limit.get(key, 0.0), row["images_per_s"])
    tent = {(row["net"], row["batch"], row["mode"]): row["peak_allocated_mib"] for row in _good(rows, "tent")}
    for row in rows:
        if row["status"] != "ok":
            continue
        least, peak = tent.get((row["net"], row["batch"], row["mode"])), row.get("peak_allocated_mib")
        row["memory_over_tent"] = peak / least if least and peak else None
        mode = "eager" if row["mode"].startswith("plain") else row["mode"]
        base, top = source.get((row["net"], row["batch"], mode)), limit.get((row["net"], row["batch"]))
        factor = FACTORS.get(row["net"], {}).get(row["method"])
        row["ratio_to_source"] = None if base is None else base / row["images_per_s"]
        row["share_of_limit"] = None if top is None or factor is None else row["images_per_s"] * factor / top


def gains(rows: list[Row]) -> list[Row]:
    """Our best mode, and each mode, against the plain implementation of the same run."""
    found = []
    for row in rows:
        if not row["mode"].startswith("plain") or row["status"] != "ok":
            continue
        same = {
            other["mode"]: other["images_per_s"] / row["images_per_s"]
            for other in _good(rows, row["method"])
            if (other["net"], other["batch"], other["select"]) == (row["net"], row["batch"], row["select"])
            and not other["mode"].startswith("plain")
            and other["as_asked"]
        }
        ours = {mode: gain for mode, gain in same.items() if mode in MODES}
        best = max(ours, key=lambda mode: ours[mode], default=None)
        found.append(
            {
                "net": row["net"], "batch": row["batch"], "method": row["method"], "over": row["mode"],
                "best_mode": best, "gain": None if best is None else ours[best], "by_mode": same,
                "plain_images_per_s": row["images_per_s"],
            }
        )  # fmt: skip
    return found


def _good(rows: list[Row], method: str) -> list[Row]:
    return [row for row in rows if row["method"] == method and row["status"] == "ok"]


def table(rows: list[Row], won: list[Row]) -> str:
    """Rows and gains as text."""
    heads = ("net", "batch", "method", "mode", "select", "images/s", "median ms", "p99 ms", "x source", "of limit",
             "alloc MiB", "reserved MiB")  # fmt: skip
    lines = [[*map(str, (row["net"], row["batch"], row["method"], row["mode"], f"{row['select']} %"))] + (
        [_number(row[key]) for key in ("images_per_s", "median_ms", "p99_ms", "ratio_to_source", "share_of_limit",
                                            "peak_allocated_mib", "peak_reserved_mib")]
        if row["status"] == "ok" else [row["status"], *[""] * 6]
    ) for row in rows]  # fmt: skip
    for line, row in zip(lines, rows, strict=True):
        line[3] += "" if row.get("as_asked", True) else " (ran eagerly)"
    more = [
        [*map(str, (row["net"], row["batch"], row["method"], row["best_mode"], row["over"])), _number(row["gain"])]
        for row in won
    ]
    parts = [_laid_out(heads, lines)]
    if more:
        parts.append(_laid_out(("net", "batch", "method", "best mode", "over", "x plain implementation"), more))
    return "\n\n".join(parts)


def page(rows: list[Row]) -> str:
    """The rows that were measured, as the documentation shows them."""
    order = ["forward", *METHODS]
    modes = ["eager", "captured", "bf16", "bf16-compiled", "bf16-compiled-graph", "plain", "plain-separate"]
    good = [row for row in rows if row["status"] == "ok" and row.get("as_asked", True)]
    good.sort(key=lambda row: (order.index(row["method"]), -row["select"], modes.index(row["mode"])))
    good.sort(key=lambda row: (row["net"], -row["batch"]))
    shares = len({row["select"] for row in good}) > 1
    heads = ["network", "batch", "method", "mode", *(["teach"] if shares else []),
             "images/s", "ms", "x source", "of limit", "MiB"]  # fmt: skip
    lines = [
        [row["net"], str(row["batch"]), row["method"], row["mode"], *([f"{row['select']} %"] if shares else []),
         f"{row['images_per_s']:.0f}", f"{row['median_ms']:.2f}", _or_dash(row["ratio_to_source"], ".2f"),
         _or_dash(row["share_of_limit"], ".0%"), _or_dash(row["peak_allocated_mib"], "d")]
        for row in good
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ["---"] * len(heads), *lines])


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _laid_out(heads: tuple[str, ...], lines: list[list[str]]) -> str:
    wide = [max(len(line[column]) for line in [list(heads), *lines]) for column in range(len(heads))]
    rule = ["-" * width for width in wide]
    rows = [[*heads], rule, *lines]
    filled = [[cell.ljust(width) for cell, width in zip(row, wide, strict=True)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in filled)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
