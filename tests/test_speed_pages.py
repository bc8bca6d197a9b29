"""Numbers of results/speed in sentences of pages are those of the files, and operations are as many as pages say.

What `benchmarks/speed_docs.py` writes into its places is held to the files by `tests/test_docs.py`.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.flop_counter import FlopCounterMode

from poem.engine.network import Network

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS, SPEED = ROOT / "benchmarks", ROOT / "results" / "speed"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "speed_docs.py").is_file(), reason="a copy without benchmarks")

NETS = ("resnet50-bn", "resnet50-gn", "vit-b16")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _held(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((SPEED / name).read_text())
    return content


def _page(name: str) -> str:
    """A page in one line, without what is written into its places."""
    return " ".join(_script("speed_docs").PLACE.sub("", (ROOT / name).read_text()).split())


def _row(name: str, method: str, batch: int, mode: str = "bf16") -> dict[str, Any]:
    """The row of all samples selected, of those that are no curve."""
    (found,) = (
        row for row in _held(name)["rows"]
        if (row["method"], row["batch"], row["mode"], row["select"], row["curve"]) == (method, batch, mode, 100, None)
    )  # fmt: skip
    return dict(found)


def test_what_the_page_says_of_the_files() -> None:
    page, files = _page("docs/speed.md"), [_held(f"speed-{net}.json") for net in NETS]
    taken = sum(content["seconds"] for content in files)
    assert f"its stage `speed` took {taken:.0f} s for three networks, of which the last ran into its limit" in page
    assert [content["seconds"] >= content["settings"]["budget"] for content in files] == [False, False, True]
    stages = (BENCHMARKS / "gpu_check.sh").read_text()
    curves, stream = (
        re.findall(rf"\n{name}\(\).*?--budget (\d+)", stages, re.DOTALL)[0] for name in ("curves", "stream")
    )
    assert f"`curves` may take {curves} s and `stream` {stream}, and how long the others take is in no file" in page
    every = [*files, _held("curves.json")]
    (seconds,) = {content["settings"]["seconds"] for content in every}
    assert f"Every row is of {seconds:g} seconds of calls" in page
    assert "`plain` (`benchmarks/_plain.py`, the same method as such code is usually written), is in none of" in page
    assert not [row for content in every for row in content["rows"] if row["mode"].startswith("plain")]
    assert "On group norm in batches of 64 it is above 100 %" in page
    shares = {
        (net, batch): _row(f"speed-{net}.json", "poem1", batch)["share_of_limit"] for net in NETS for batch in (64, 1)
    }
    assert [key for key, share in shares.items() if share > 1] == [("resnet50-gn", 64)]


def test_what_the_page_says_of_auto() -> None:
    page = _page("docs/speed.md")
    assert "On batch norm `auto` is captured. On group norm and on the ViT its rows are of forward passes alone" in page
    for net in NETS:
        rows = [row for row in _held(f"speed-{net}.json")["rows"] if row["method"] in ("auto", "guarded-auto")]
        asked = [row for row in rows if row["mode"] != "eager"]
        assert asked
        assert not any(row["updates"] for row in rows)
        assert all(row["as_asked"] == (net == "resnet50-bn") for row in asked), net
        assert all(_row(f"speed-{net}.json", "source", batch)["as_asked"] for batch in (64, 1))


def test_what_the_page_says_of_agreement() -> None:
    page, rows = _page("docs/speed.md"), _held("agreement.json")["rows"]
    verdict = _script("gpu_verdict")
    assert all(map(verdict._agrees, rows))
    assert (
        f"The stage fails where a probability differs by more than {verdict.ROUNDING:.0e}.".replace("e-0", "e-") in page
    )
    assert "32 images a batch on the small networks (MEMO 2) and 16 on the large" in page
    for small, batch in ((True, 32), (False, 16)):
        some = [row for row in rows if row["network"].startswith("digits") == small]
        assert {row["batch"] for row in some if not row["method"].startswith("memo")} == {batch}
        assert {row["batch"] for row in some if row["method"].startswith("memo")} <= {2}
    assert "`auto` is compared on the three small networks, and no guard is." in page
    assert sorted(row["network"] for row in rows if row["method"] == "auto") == ["digits-bn", "digits-gn", "digits-ln"]
    check = (BENCHMARKS / "capture_check.py").read_text()
    assert "`use_deterministic_algorithms(True, warn_only=True)`" in page
    assert "torch.use_deterministic_algorithms(True, warn_only=True)" in check
    assert "with cuDNN's TF32 as torch has it, on" in page
    assert "allow_tf32" not in check


def test_the_contract_says_how_it_ran() -> None:
    held = _held("contract.json")
    said = f"{held['passed']} tests of the contract passed on a GPU with fast=True, {held['failed']} failed."
    assert held["verdict"] == said


def test_what_the_changelog_says_of_this_version() -> None:
    said, tree = " ".join((ROOT / "CHANGELOG.md").read_text().split()), _script("tree_hash").tree_hash()
    assert said.count("Speed of this version") == 1
    assert "Speeds of this version" not in said
    words = said[said.index("- Speed of this version") :].split(" - ")[0].partition("- ")[2]
    names = ("agreement.json", "contract.json", "cpu.json", "curves.json", "stacked.json")
    (measured,) = {_held(name)["tree"] for name in (*names, *(f"speed-{net}.json" for net in NETS))}
    if measured != tree:
        pytest.skip("the code has changed since its speeds were measured")

    def pair(net: str, form: str, key: str, batch: int = 64) -> str:
        rows = [_row(f"speed-{net}.json", method, batch) for method in ("poem1", "poem2")]
        return " / ".join(form.format(row[key] * (100 if key == "share_of_limit" else 1)) for row in rows)

    def both(net: str) -> tuple[str, str]:
        return pair(net, "{:,.0f}", "images_per_s"), pair(net, "{:.0f}", "share_of_limit")

    of = {net: both(net) for net in NETS}
    assert "POEM with 1 / 2 updates {} images/s ({} % of the limit), group norm".format(*of["resnet50-bn"]) in words
    assert "group norm {} ({} %), ViT-B/16".format(*of["resnet50-gn"]) in words
    assert "ViT-B/16 {} ({} %); one image".format(*of["vit-b16"]) in words
    guarded = _row("speed-resnet50-bn.json", "guarded-auto", 1)["median_ms"]
    one = pair("resnet50-bn", "{:.1f}", "median_ms", 1)
    assert f"one image on ResNet-50 {one} ms, guarded `auto` {guarded:.1f}." in words
    shares = " / ".join(f"{100 * row['ratio']:.0f}" for row in _held("stacked.json")["rows"])
    assert f"single images have {shares} % of one stream's throughput with Tent, POEM and `auto`" in words
    assert f"{_held('contract.json')['passed']:,} tests of the contract pass there with `fast=True`" in words
    rows = _held("agreement.json")["rows"]
    agree = sum(map(_script("gpu_verdict")._agrees, rows))
    assert f"agree on {agree} of {len(rows)} pairs of a method and a network, to the bit but for ViT-B/16" in words
    far = [row for row in rows if row["largest_difference_of_probabilities"]]
    assert {row["network"] for row in far} == {"vit-b16"}
    assert f"({max(row['largest_difference_of_probabilities'] for row in far):.1g})" in words
    never = {row["method"] for row in rows} - {row["method"] for row in rows if row["captured"]}
    assert f"{len(never)} methods are never captured" in words
    unfinished = [
        name for name in (*names, *(f"speed-{net}.json" for net in NETS)) if _held(name).get("finished") is False
    ]
    assert "Two runs were cut off: the ViT has no `auto` for one image, guarded or not, and the curves" in words
    assert unfinished == ["curves.json", "speed-vit-b16.json"]
    assert "no EfficientNet-Lite0 in batches of 64 and 256" in words
    ratio = _held("cpu.json")["ratio"]
    assert (
        f"On a CPU, two cores, POEM with one update takes {ratio['ratio']:.2f} forwards (3.53 by arithmetic)" in words
    )
    assert ratio["ratio"] > 3.3
    assert "the aim of 3.3 is missed" in words
    assert ("From files to answers was not measured again" in words) == (_held("stream.json")["tree"] != measured)


def test_what_the_page_counts_from_its_table_of_operations() -> None:
    page = (ROOT / "docs" / "speed.md").read_text()
    table = page[page.index("| | plain forward | first forward |") :].split("\n\n")[0].splitlines()[2:]
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table}
    plain, whole = ({name: float(row[at]) for name, row in cells.items() if row[at] != "-"} for at in (0, -1))
    text, rest = _page("docs/speed.md"), sum(whole.values()) - whole["convolutions"]
    gain = whole["convolutions"] / plain["convolutions"]
    assert f"{whole['convolutions']:.2f} is {gain:.1f} times {plain['convolutions']:.2f}." in text
    left, two = 3.3 - whole["convolutions"], 2 * (sum(plain.values()) - plain["convolutions"])
    assert f"A ratio of 3.3 would leave {left:.1f} for all of it, half of what it takes now" in text
    assert left / rest == pytest.approx(0.5, abs=0.02)
    assert f"two plain forward passes have {two:.1f}." in text


def _counted(net: str, method: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Operations of a call over those of a forward, at 224 as measured: smaller images have other shares."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rows, place = _script("_speed_rows"), _script("_speed_place").Place("cpu", 224, 0.0)
    adapter, images, _ = rows.made(place, rows.Job(net, 2, method, "eager"))
    adapter(images[0])
    flops = []
    for call in (adapter.source, adapter):
        with FlopCounterMode(display=False) as counter:
            call(images[1])
        flops.append(counter.get_total_flops())
    return float(flops[1] / flops[0])


@pytest.mark.slow
def test_the_arithmetic_of_a_vit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    one, two = (_counted("vit-b16", method, monkeypatch) for method in ("poem1", "poem2"))
    assert f"(on the ViT {one:.2f} and {two:.2f})" in _page("docs/speed.md")


@pytest.mark.slow
def test_the_arithmetic_that_the_page_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    one, two = (_counted("resnet50-bn", method, monkeypatch) for method in ("poem1", "poem2"))
    page, changes = _page("docs/speed.md"), " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert f"counts {one:.2f} and {two:.2f} on ResNet-50 at 224" in page
    assert f"The arithmetic alone is {one:.2f} forwards for ResNet-50" in page
    assert f"({one:.2f} by arithmetic)" in changes
    monkeypatch.setattr(Network, "undoubled", lambda self, x: None)
    twice = _counted("resnet50-bn", "poem1", monkeypatch)
    assert f"{twice:.2f} without the layers that run once for both heads" in page
    assert f"which saves {twice - one:.2f}, and" in page
    assert f"{one:.2f} instead of {twice:.2f} times the arithmetic of a forward pass" in changes
    factors = _script("_speed_table").FACTORS
    of = "if one update cost {poem1} forwards and two {poem2}: three and five passes"
    assert of.format(**factors["resnet50-bn"]) in page
    assert "(for the ViT {poem1} and {poem2})".format(**factors["vit-b16"]) in page


def test_a_file_of_a_run_that_was_cut_off_has_a_sentence_for_each_place() -> None:
    docs = _script("speed_docs")
    held = _held("speed-resnet50-bn.json")
    some = {**held, "rows": [row for row in held["rows"] if (row["batch"], row["method"]) == (64, "auto")]}
    some["skipped"] = ["resnet50-bn batch 64 guarded-auto bf16 100 %", "resnet50-bn batch 1 auto bf16 100 %"]
    for content in (some, {**held, "rows": [], "skipped": []}):
        for place in ("none", "memory", "auto", "camera"):
            said = docs.SHOWN[place](content)
            assert said.endswith("."), place
            assert ": ." not in said, place
    assert "Not measured: guarded `auto` in batches of 64, `auto` in batches of 1." in docs.SHOWN["auto"](some)
