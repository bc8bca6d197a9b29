"""Metrics of loops and sweeps arrive where they are sent, by the real TensorBoard writer too."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_reports import cell, report
from nets import make_net
from toys import images

import poem
from poem.bench.loggers import (
    BatchMetrics,
    FunctionLogger,
    MLflowLogger,
    SweepMetrics,
    TensorBoardLogger,
    WandbLogger,
    several,
)
from poem.bench.runners import CellEnded, CellProgress
from poem.bench.store import Store
from poem.bench.sweep import sweep


class Kept:
    """A logger that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.seen.append((step, dict(metrics)))


def run_loop(logger: Any, batches: int = 3, **settings: Any) -> poem.Adapter:
    adapter = poem.adapt(make_net("gn", sharpness=6.0), "tent", lr=1e-3)
    measure = BatchMetrics(logger, **settings)
    for seed in range(batches):
        logits = adapter(images(8, seed=seed))
        measure(adapter, logits, labels=logits.argmax(1))
    return adapter


def test_a_loop_sends_what_the_adapter_did() -> None:
    kept = Kept()
    adapter = run_loop(kept, prefix="tent/")
    assert [step for step, _ in kept.seen] == [0, 1, 2]
    last = kept.seen[-1][1]
    assert last["tent/updates"] == adapter.last.updates > 0
    assert last["tent/entropy/first"] == pytest.approx(float(adapter.last.first_entropy.mean()))
    assert last["tent/selected"] == 1.0
    assert last["tent/top1"] == last["tent/top1_so_far"] == 100.0
    assert 0 < last["tent/confidence"] <= 1
    assert "tent/loss" in last


def test_accuracy_so_far_counts_batches_that_are_not_sent() -> None:
    kept = Kept()
    adapter = poem.adapt(make_net("gn"), "source")
    measure = BatchMetrics(kept, every=2)
    for seed in range(3):
        logits = adapter(images(4, seed=seed))
        right = logits.argmax(1)
        measure(adapter, logits, labels=right if seed != 1 else (right + 1) % logits.shape[1])
    assert [step for step, _ in kept.seen] == [0, 2]
    assert kept.seen[-1][1]["top1_so_far"] == pytest.approx(100 * 8 / 12)


def test_labels_are_optional_and_those_that_do_not_fit_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    adapter = poem.adapt(make_net("gn"), "source")
    logits = adapter(images(4, seed=0))
    BatchMetrics(kept)(adapter, logits)
    assert "top1" not in kept.seen[0][1]
    measure = BatchMetrics(kept)
    with caplog.at_level(logging.WARNING, "poem"):
        measure(adapter, logits, labels=[1, 2])
        measure(adapter, logits, labels=[1, 2])
        measure(adapter, logits, labels=[1, 2, 3, 4])
    told = [each.getMessage() for each in caplog.records]
    assert told == ["no metrics of batch 0: ValueError: expected one label for each of 4 images, got 2"]
    assert [step for step, _ in kept.seen] == [0, 2]


def test_a_model_with_one_logit_is_scored_as_two_classes() -> None:
    kept = Kept()
    net = torch.nn.Sequential(make_net("gn"), torch.nn.Linear(10, 1))
    adapter = poem.adapt(net, "source")
    logits = adapter(images(8, seed=0))
    assert logits.shape == (8, 1)
    BatchMetrics(kept)(adapter, logits, labels=(logits[:, 0] > 0).long())
    assert kept.seen[0][1]["top1"] == 100.0
    assert 0.5 <= kept.seen[0][1]["confidence"] < 1


def test_a_logger_that_fails_is_told_once_and_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def down(metrics: Mapping[str, float], step: int) -> None:
        calls.append(step)
        raise ConnectionError("the server is down")

    with caplog.at_level(logging.WARNING, "poem"):
        run_loop(FunctionLogger(down))
    assert calls == [0]
    assert [each.getMessage() for each in caplog.records if "no longer sent" in each.getMessage()] == [
        "metrics are no longer sent: ConnectionError: the server is down"
    ]


def test_what_is_no_logger_is_told_at_once() -> None:
    with pytest.raises(
        TypeError, match=r"expected a logger with log\(metrics, step\), got function; see FunctionLogger"
    ):
        BatchMetrics(lambda metrics, step: None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected every >= 1, got 0"):
        BatchMetrics(Kept(), every=0)


class Fixed:
    """A runner whose results are stated."""

    def run(self, cells: Any, on_event: Any) -> None:
        for at, each in enumerate(cells):
            on_event(CellProgress(each, 1, 2))
            on_event(CellEnded(each, None, "ValueError: no") if at == 1 else CellEnded(each, report(each, 60.0 + at)))


def test_a_sweep_sends_every_result_as_it_comes(tmp_path: Path) -> None:
    kept = Kept()
    seen: list[Any] = []
    cells = [cell("tent", "fog"), cell("tent", "snow"), cell("tent", "fog", seed=1)]
    handler = several(SweepMetrics(kept), seen.append)
    outcome = sweep(cells, Store(tmp_path), runner=Fixed(), on_event=handler)
    assert len(outcome.failed) == 1
    assert len(seen) == 1 + 2 * 3, "the other handler has every event"
    found = [(step, metrics) for step, metrics in kept.seen if "sweep/done" not in metrics]
    assert [step for step, _ in found] == [0, 1], "seeds are points of one curve"
    assert all("digits-bn/tent/fog/top1" in metrics for _, metrics in found)
    assert found[0][1]["digits-bn/tent/fog/images_per_s"] == 250.0
    assert kept.seen[-1] == (3, {"sweep/done": 2.0, "sweep/failed": 1.0})


def test_each_shift_of_a_continual_run_is_sent() -> None:
    kept = Kept()
    several_shifts = report(cell(), domains={"fog 5": {"n": 5.0, "top1": 40.0}, "snow 5": {"n": 5.0, "top1": 60.0}})
    SweepMetrics(kept)(CellEnded(several_shifts.cell, several_shifts))
    assert kept.seen[0][1]["digits-bn/tent/fog/top1/snow 5"] == 60.0
    SweepMetrics(kept, domains=False)(CellEnded(several_shifts.cell, several_shifts))
    assert "digits-bn/tent/fog/top1/snow 5" not in kept.seen[2][1]


def test_numbers_that_are_not_finite_are_left_out() -> None:
    kept = Kept()
    result = report(cell(), metrics={"top1": float("nan"), "ece": 3.0})
    SweepMetrics(kept)(CellEnded(result.cell, result))
    assert "digits-bn/tent/fog/top1" not in kept.seen[0][1]
    assert kept.seen[0][1]["digits-bn/tent/fog/ece"] == 3.0


def test_the_real_tensorboard_writer_has_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLogger(tmp_path) as logger:
        run_loop(logger, prefix="loop/")
        result = report(cell(), 61.5)
        SweepMetrics(logger)(CellEnded(result.cell, result))
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in read.Scalars("loop/updates")] == [0, 1, 2]
    assert read.Scalars("digits-bn/tent/fog/top1")[0].value == 61.5
    assert torch.isfinite(torch.tensor([event.value for event in read.Scalars("loop/entropy/first")])).all()


def test_mlflow_and_wandb_are_called_as_they_document(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    mlflow: Any = types.ModuleType("mlflow")
    mlflow.active_run = lambda: None
    mlflow.set_experiment = lambda name: calls.append(("experiment", name))
    mlflow.start_run = lambda run_name=None: calls.append(("start", run_name))
    mlflow.log_params = lambda values: calls.append(("params", values))
    mlflow.log_metrics = lambda values, step: calls.append(("metrics", (values, step)))
    mlflow.end_run = lambda: calls.append(("end", None))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    with MLflowLogger(experiment="tta", run_name="one", parameters={"method": "tent"}) as logger:
        logger.log({"digits-bn/sar+poem*/top1": 50.0}, 3)
    assert calls == [
        ("experiment", "tta"), ("start", "one"), ("params", {"method": "tent"}),
        ("metrics", ({"digits-bn/sar_poem_/top1": 50.0}, 3)), ("end", None),
    ]  # fmt: skip
    calls.clear()
    mlflow.active_run = lambda: object()
    MLflowLogger().close()
    assert calls == [], "a run of the caller's is not ended"

    class Run:
        def log(self, values: dict[str, float]) -> None:
            calls.append(("log", values))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**settings: Any) -> Run:
        calls.append(("init", settings))
        return Run()

    wandb: Any = types.ModuleType("wandb")
    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with WandbLogger(project="tta") as tracked:
        tracked.log({"top1": 1.0}, 2)
    with WandbLogger(Run()) as tracked:
        tracked.log({"top1": 1.0}, 3)
    assert calls == [
        ("init", {"project": "tta"}), ("log", {"top1": 1.0, "step": 2}), ("finish", None),
        ("log", {"top1": 1.0, "step": 3}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("mlflow", MLflowLogger),
        ("wandb", WandbLogger),
        ("torch.utils.tensorboard", lambda: TensorBoardLogger("unused")),
    ],
)
def test_a_package_that_is_not_installed_is_named(module: str, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"type: pip install {module.rpartition('.')[2]}"):
        make()
