"""The pictures of `results/speed/curves.json`: those in docs are of the file, and the script draws another one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
PICTURES = ("speed_curves.png", "speed_methods.png")
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "speed_figure.py").is_file(), reason="a copy without benchmarks")

APART = "ReLU and additions run apart from the norm layers before them: the answers differ"
EAGER = "not captured: MemoryBank(64) decides on the host as it goes"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(net: str = "net18", batch: int = 64, method: str = "poem1", select: int = 100, **other: Any) -> dict[str, Any]:
    return {
        "net": net, "batch": batch, "method": method, "mode": "bf16", "select": select, "curve": None, "status": "ok",
        "images_per_s": 100.0 * batch, "median_ms": 1.5 + batch, "peak_allocated_mib": 200 + batch, "notes": [],
        "as_asked": True, "slowest_call_s": 0.25, "unloaded_mib": 100 + batch, "unloaded_reserved_mib": 3000, **other,
    }  # fmt: skip


def made_up(tree: str) -> dict[str, Any]:
    """Two networks, of which the larger has no row at 64, and two methods, of which the second ran eagerly."""
    curves = [row(net, batch, curve="batch") for net in ("net18", "net152") for batch in (1, 4, 64)]
    curves[1]["notes"], curves[5]["status"] = [APART], "error"
    methods = [row(select=select) for select in (100, 0)]
    methods += [row(method="rotta", select=select, as_asked=False, notes=[EAGER]) for select in (100, 0)]
    return {"tree": tree, "host": {"device": "A GPU", "torch": "2.9"}, "rows": [*methods, *curves]}


def told(path: Path) -> dict[str, str]:
    """What a picture says of itself."""
    with pytest.importorskip("PIL.Image").open(path) as picture:
        picture.load()
        return dict(picture.text)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_in_docs_are_of_the_file_beside_the_tables(name: str) -> None:
    content = json.loads((ROOT / "results" / "speed" / "curves.json").read_text())
    found, again = told(ROOT / "docs" / name), f"{name} is of other rows; type: python benchmarks/speed_figure.py"
    assert found["Description"] == content["tree"], again
    assert found["Comment"] == script("speed_figure").rows_hash(content), again
    assert (ROOT / "docs" / name).stat().st_size < 300_000


def test_a_small_file_of_this_tree_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = script("speed_figure")
    content = made_up(figure.tree_hash())
    file = tmp_path / "curves.json"
    file.write_text(json.dumps(content))
    assert figure.main([str(file), "--out", str(tmp_path)]) == 0
    for name in PICTURES:
        assert told(tmp_path / name) == {"Description": content["tree"], "Comment": figure.rows_hash(content)}


def test_a_file_with_curves_alone_makes_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure, content = script("speed_figure"), made_up("any")
    content["rows"] = figure.by_batch(content)
    assert [path.name for path in figure.draw(content, tmp_path)] == ["speed_curves.png"]


def test_a_file_of_another_tree_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "curves.json"
    file.write_text(json.dumps(made_up("another")))
    assert script("speed_figure").main([str(file), "--out", str(tmp_path)]) == 1
    assert "curves.json is of another; measure again" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [file]


def test_what_ran_eagerly_or_apart_is_marked_and_what_is_missing_is_not_drawn() -> None:
    pytest.importorskip("matplotlib")
    figure, content = script("speed_figure"), made_up("any")
    curves, methods = figure._curves(figure.by_batch(content)), figure._methods(figure.by_method(content))
    for axes in curves.axes:
        points = [line for line in axes.lines if line.get_marker() != "None"]
        assert len(points) == 5
        assert sum(line.get_markerfacecolor() == "white" for line in points) == 1
    assert [bool(bar.get_hatch()) for bar in methods.axes[0].patches] == [False, False, True, True]


def test_text_is_not_under_eight_points_where_a_page_is_640_pixels_wide() -> None:
    text = pytest.importorskip("matplotlib.text")
    figure, content = script("speed_figure"), made_up("any")
    from matplotlib import rc_context

    with rc_context(figure.STYLE):
        drawn = [figure._curves(figure.by_batch(content)), figure._methods(figure.by_method(content))]
    for each in drawn:
        shrunk = 640 / 96 / each.get_size_inches()[0]
        sizes = {found.get_fontsize() for found in each.findobj(text.Text) if found.get_text()}
        assert min(sizes) * shrunk >= 8


def test_the_page_says_what_is_on_the_pictures(tmp_path: Path) -> None:
    content = made_up("today")
    (tmp_path / "curves.json").write_text(json.dumps(content))
    said = script("speed_docs").filled("<!-- speed:curves.json picture -->\n<!-- /speed -->\n", tmp_path, "today")
    assert all(f"({name})" in said for name in PICTURES)
    assert "POEM with one update, bf16, 100 % selected, A GPU." in said
    assert "net18, batches of 64, bf16, A GPU. Hatched bars ran eagerly" in said
    assert "took, in seconds, 0.2 for net152 and 0.2 for net18." in said
    assert "101, 104 and 164 MiB were allocated at batches of 1, 4 and 64" in said
    assert "still had 3000 MiB reserved" in said
