"""Metrics of loops and sweeps, sent to TensorBoard, MLflow, Weights & Biases, or a function of your own.

    with TensorBoardLogger("runs/tent") as logger:                # a loop of your own
        measure = BatchMetrics(logger)
        for images in loader:
            measure(adapter, adapter(images))

    with WandbLogger(project="tta") as logger:                    # a sweep
        sweep(cells, store, on_event=SweepMetrics(logger))

The three packages are optional; each is imported when its logger is made. Anything with `log(metrics, step)` is a
logger.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from poem.adapter import Adapter
from poem.bench.cell import Cell
from poem.bench.run_stream import class_numbers, label_indices
from poem.bench.runners import CellEnded, Event
from poem.bench.sweep import OnSweepEvent, SweepPlanned
from poem.engine.network import two_columns
from poem.guarded.guard import Guard

__all__ = [
    "BatchMetrics", "FunctionLogger", "MLflowLogger", "MetricsLogger", "SweepMetrics", "TensorBoardLogger",
    "WandbLogger", "several",
]  # fmt: skip

log = logging.getLogger("poem")
L = TypeVar("L", bound="_Closing")


class MetricsLogger(Protocol):
    """Receives numbers by name, and the step that they belong to."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Store numbers; names have parts between slashes."""
        ...


class _Closing:
    """A logger that is closed at the end of a `with` block."""

    def close(self) -> None:
        """Write what is buffered, and end."""

    def __enter__(self: L) -> L:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class FunctionLogger(_Closing):
    """Calls a function with the numbers and the step: `FunctionLogger(lambda metrics, step: print(step, metrics))`."""

    def __init__(self, function: Callable[[Mapping[str, float], int], object]) -> None:
        self._function = function

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Call the function."""
        self._function(metrics, step)


class TensorBoardLogger(_Closing):
    """Writes scalars for TensorBoard into a folder; `tensorboard --logdir FOLDER` shows them.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], **settings: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoardLogger needs tensorboard; type: pip install tensorboard") from error
        self.writer: Any = SummaryWriter(os.fspath(folder), **settings)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a scalar for each number."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file and close it."""
        self.writer.close()


class MLflowLogger(_Closing):
    """Logs to a run of MLflow: the active one, or a new one, which is ended at the end.

    Args:
        experiment: The experiment's name; by default MLflow's own.
        run_name: The name of a new run.
        parameters: Logged once as the run's parameters.

    Raises:
        ImportError: mlflow is not installed.
    """

    def __init__(
        self,
        *,
        experiment: str | None = None,
        run_name: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise ImportError("MLflowLogger needs mlflow; type: pip install mlflow") from error
        self._mlflow: Any = mlflow
        if experiment is not None:
            mlflow.set_experiment(experiment)
        self._own = mlflow.active_run() is None
        if self._own:
            mlflow.start_run(run_name=run_name)
        if parameters:
            mlflow.log_params(dict(parameters))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers; characters that MLflow does not take in names become underscores."""
        named = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        """End the run if this logger started it."""
        if self._own:
            self._mlflow.end_run()


class WandbLogger(_Closing):
    """Logs to a run of Weights & Biases: the one given, or a new one, which is finished at the end.

    The step is sent as the number `step` beside the others, to be chosen as the x-axis: wandb's own step may only rise,
    and numbers of an earlier one are dropped.

    Args:
        run: A run of `wandb.init`; None to start one with the settings.
        settings: Arguments of `wandb.init`: project, name, mode, config, ...

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **settings: Any) -> None:
        self._own = run is None
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError("WandbLogger needs wandb; type: pip install wandb") from error
            run = wandb.init(**settings)
        self.run = run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the numbers, and the step among them."""
        self.run.log({**metrics, "step": step})

    def close(self) -> None:
        """Finish the run if this logger started it."""
        if self._own:
            self.run.finish()


class _Sending:
    """Sends finite numbers to a logger; an error of the logger is told once, and nothing is sent any more."""

    def __init__(self, logger: MetricsLogger, prefix: str) -> None:
        if not callable(getattr(logger, "log", None)):
            raise TypeError(
                f"expected a logger with log(metrics, step), got {type(logger).__name__}; see FunctionLogger"
            )
        self._logger, self._prefix, self._failed = logger, prefix, False

    def _send(self, metrics: Mapping[str, float], step: int) -> None:
        found = {f"{self._prefix}{name}": float(value) for name, value in metrics.items() if math.isfinite(value)}
        if self._failed or not found:
            return
        try:
            self._logger.log(found, step)
        except Exception as error:  # a server that is down must not end a run of hours
            self._failed = True
            log.warning("metrics are no longer sent: %s: %s", type(error).__name__, error)


class BatchMetrics(_Sending):
    """Sends what an adapter did with each batch: call it after the adapter, with the adapter's answer.

    An error, such as of labels that do not fit, is a warning, and ends no loop.

    Sent are `entropy` (mean, nats, of the first pass and the last), `confidence`, `selected` (share of the batch),
    `updates`, `loss` and `reset`; with labels `top1` of the batch and `top1_so_far` in percent. Reading them waits for
    the device.

    Args:
        logger: Where to.
        prefix: Put before every name, such as `"tent/"`.
        every: Send every that many batches.
    """

    def __init__(self, logger: MetricsLogger, *, prefix: str = "", every: int = 1) -> None:
        super().__init__(logger, prefix)
        if every < 1:
            raise ValueError(f"expected every >= 1, got {every}")
        self.every, self.step, self._right, self._seen, self._warned = every, 0, 0, 0, False

    def __call__(self, adapter: Adapter | Guard, logits: Tensor, labels: Any = None) -> None:
        """Count a batch, and send its metrics if it is due.

        Args:
            adapter: The adapter, or guard, that has just answered.
            logits: Its answer (B, C), or (B, 1) of a model with one logit.
            labels: (B,) where they are known; they never reach the adapter.
        """
        try:
            logits = two_columns(logits)
            accuracy = {} if labels is None else self._accuracy(logits, labels)
            if self.step % self.every == 0:
                self._send({**_batch_numbers(adapter, logits), **accuracy}, self.step)
        except Exception as error:  # a measurement must not end a loop that serves
            if not self._warned:
                log.warning("no metrics of batch %d: %s: %s", self.step, type(error).__name__, error)
            self._warned = True
        self.step += 1

    def _accuracy(self, logits: Tensor, labels: Any) -> dict[str, float]:
        found = class_numbers(label_indices(labels, len(logits)), logits)
        right = int((logits.detach().argmax(1).cpu() == found.cpu()).sum())
        self._right, self._seen = self._right + right, self._seen + len(logits)
        return {"top1": 100 * right / len(logits), "top1_so_far": 100 * self._right / self._seen}


def _batch_numbers(adapter: Adapter | Guard, logits: Tensor) -> dict[str, float]:
    last = adapter.last
    found = {"confidence": float(logits.detach().float().softmax(1).amax(1).mean()), "updates": float(last.updates)}
    for name, values in (("entropy/first", last.first_entropy), ("entropy/last", last.last_entropy)):
        found |= {name: float(values.float().mean())} if values.numel() else {}
    found |= {"selected": float(last.selected.float().mean())} if last.selected.numel() else {}
    found |= {"loss": float(last.loss_value)} if last.loss_value is not None else {}
    return {**found, "reset": float(bool(torch.as_tensor(last.reset_flag).any()))}


class SweepMetrics(_Sending):
    """Sends the metrics of every cell of a sweep as it ends; give it to `sweep` as `on_event`.

    Names are `BASE/METHOD/SHIFTS/top1` and so on; the step is the cell's seed, so that seeds are points of one curve.
    Besides, `sweep/done` and `sweep/failed` are counted, the step being the number of cells that have ended.

    Args:
        logger: Where to.
        prefix: Put before every name.
        domains: Send the accuracy of each shift of a stream with several as well.
    """

    def __init__(self, logger: MetricsLogger, *, prefix: str = "", domains: bool = True) -> None:
        super().__init__(logger, prefix)
        self.domains, self.done, self.failed = domains, 0, 0

    def __call__(self, event: SweepPlanned | Event) -> None:
        """Send the result of a cell that has ended; other events are ignored."""
        if not isinstance(event, CellEnded):
            return
        self.done, self.failed = self.done + (event.result is not None), self.failed + (event.result is None)
        if (result := event.result) is not None:
            name = metric_name(event.cell)
            numbers = {f"{name}/{key}": value for key, value in result.metrics.items()}
            numbers |= {f"{name}/{key}": value for key, value in result.timing.items() if key == "images_per_s"}
            if self.domains and len(result.domains) > 1:
                numbers |= {
                    f"{name}/top1/{shift}": each["top1"] for shift, each in result.domains.items() if "top1" in each
                }
            self._send(numbers, event.cell.seed)
        self._send({"sweep/done": self.done, "sweep/failed": self.failed}, self.done + self.failed)


def metric_name(cell: Cell) -> str:
    """`BASE/METHOD/SHIFTS` of a cell: one shift by its name, several by their scenario."""
    shifts = cell.corruptions[0] if len(cell.corruptions) == 1 else f"{cell.scenario} {len(cell.corruptions)} shifts"
    return f"{cell.base}/{cell.method_label}/{shifts}"


def several(*handlers: OnSweepEvent) -> OnSweepEvent:
    """One handler of a sweep's events that calls several, in their order."""

    def handle(event: SweepPlanned | Event) -> None:
        for handler in handlers:
            handler(event)

    return handle
