"""Where a faster way does not apply, the plain path runs with one note and the same answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from interpreted import triton_or_skip
from nets import make_net
from torch import Tensor, nn
from toys import images, stream

import poem
from poem import api
from poem.accelerate import batch_norm, blended, sample_norms, triton_kernels
from poem.engine import input_checks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNKNOWN = "Internal Triton PTX codegen error"
"""The first line of what Triton raises at a kernel's first launch, where ptxas does not know the GPU."""
MODULES: tuple[ModuleType, ...] = (batch_norm, sample_norms, blended)


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_TOLD", set())


@pytest.fixture
def fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels as in a process that has not asked for them yet; without a GPU they are Triton's interpreter's."""
    triton_or_skip(monkeypatch)
    for module in MODULES:
        monkeypatch.setattr(module, "DEVICES", ("cuda", "cpu"))
        monkeypatch.setattr(module.TRITON, "_works", {})


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in MODULES:
        monkeypatch.setattr(module, "DEVICES", ())


def last_in_memory(batches: Iterable[Tensor]) -> list[Tensor]:
    return [each.contiguous(memory_format=torch.channels_last) for each in batches]


@pytest.mark.parametrize(("kind", "method"), [("bn", "auto"), ("gn", "poem"), ("bn", "tent")])
def test_a_float64_model_stays_float64_under_bf16_and_one_note_says_so(
    kind: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_net(kind, sharpness=10.0).double()
    plain = poem.adapt(model, method, fast=False)
    with caplog.at_level(logging.WARNING, logger="poem"):
        adapter = poem.adapt(model, method, fast=False, precision="bf16")
        for seed in range(3):
            batch = images(8, seed=seed).double()
            # In another memory layout, so that sums are rounded otherwise; bf16 would be off by 1e-3.
            torch.testing.assert_close(adapter(batch), plain(batch), rtol=0, atol=1e-10)
    (note,) = [record.getMessage() for record in caplog.records if "bf16" in record.getMessage()]
    assert "the model is float64" in note
    assert "model.float()" in note, "what to type"
    assert adapter.totals.updates == plain.totals.updates


@pytest.mark.parametrize("method", ["tent", "poem", "auto"])
@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
def test_a_float16_model_is_answered_without_kernels_and_near_its_float32_self(
    kind: str, method: str, fresh_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where it is refused, the refusal is lifted: torch computes float16 there too, only slowly."""
    if DEVICE == "cpu":
        unknown = SimpleNamespace(**{**vars(torch), "float16": "a type of no tensor"})
        monkeypatch.setattr(input_checks, "torch", unknown)
    net = make_net(kind, sharpness=10.0).to(DEVICE)
    full, half = (
        poem.adapt(each, method, fast=False, lr=1e-3)
        for each in (net, make_net(kind, sharpness=10.0).half().to(DEVICE))
    )
    batches = list(stream(DEVICE, 3, size=4))
    found = [half(batch) for batch in batches]
    for batch, answer in zip(batches, found, strict=True):
        assert answer.dtype == torch.float32
        torch.testing.assert_close(answer.softmax(1), full(batch).softmax(1), rtol=0, atol=0.02)
    without_kernels(monkeypatch)
    without = poem.adapt(make_net(kind, sharpness=10.0).half().to(DEVICE), method, fast=False, lr=1e-3)
    for batch, answer in zip(batches, found, strict=True):
        assert torch.equal(answer, without(batch))
    assert half.totals == without.totals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
def test_where_bf16_and_the_kernels_apply_there_is_no_note(
    kind: str, dtype: torch.dtype, fresh_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="poem"):
        poem.adapt(make_net(kind).to(DEVICE).to(dtype), "tent", precision="bf16")
    assert not any(word in caplog.text for word in ("bf16", "kernel"))


def unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """Every launch fails as on a GPU that ptxas does not know: the launches, and the reason that is given."""
    from triton.runtime.errors import PTXASError

    asked: list[str] = []

    def fail(*_: Any, **__: Any) -> NoReturn:
        asked.append("launch")
        raise PTXASError(f"{UNKNOWN}\n`ptxas` stderr:\nptxas fatal: Value 'sm_999' is not defined")

    kernels = batch_norm.kernels()
    assert kernels is not None
    monkeypatch.setattr(type(kernels._small), "run", fail)
    return asked, UNKNOWN


def no_triton(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """The kernels' modules cannot be imported: the attempts, and the reason that is given."""
    asked: list[str] = []

    def absent(name: str) -> NoReturn:
        asked.append(name)
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(triton_kernels, "import_module", absent)
    for module in MODULES:
        monkeypatch.setattr(module.TRITON, "_modules", None)
        monkeypatch.setattr(module.TRITON, "_imports", True)
    return asked, "No module named 'triton'"


@pytest.mark.parametrize("fault", [unknown_gpu, no_triton])
@pytest.mark.parametrize(
    ("what", "kind", "method", "precision"),
    [
        ("batch norm", "bn", "tent", "bf16"),
        ("batch norm", "bn", "poem", "bf16"),
        ("group and layer norm", "gn", "tent", "bf16"),
        ("group and layer norm", "ln", "tent", "bf16"),
        ("statistics of the stream", "bn", "auto", "fp32"),
        ("statistics of the stream", "bn", "auto", "bf16"),
    ],
)
def test_where_kernels_fail_torchs_own_run_and_one_note_says_so(
    what: str,
    kind: str,
    method: str,
    precision: Any,
    fault: Callable[[pytest.MonkeyPatch], tuple[list[str], str]],
    fresh_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked, why = fault(monkeypatch)
    net = make_net(kind, sharpness=10.0).to(DEVICE).to(memory_format=torch.channels_last)
    one, other, without = (poem.adapt(net, method, precision=precision, fast=False) for _ in range(3))
    batches = last_in_memory(stream(DEVICE, 3, size=4))
    with caplog.at_level(logging.WARNING, logger="poem"):
        found = [one(batch) for batch in batches]
        other(batches[0])
    assert len(asked) == 1, "tried once in the process, not for each batch or adapter"
    (note,) = [record.getMessage() for record in caplog.records if why in record.getMessage()]
    assert what in note
    assert "as torch computes it" in note
    without_kernels(monkeypatch)
    for batch, answer in zip(batches, found, strict=True):
        assert torch.equal(answer, without(batch))
    assert one.totals == without.totals


class RootMean(nn.Module):
    """A norm layer of somebody's own: no mean is subtracted, channels come first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        """Divided by the root of the mean square over channels, scaled and shifted."""
        shape = (1, -1, 1, 1)
        x = x * (x.square().mean(1, keepdim=True) + self.eps).rsqrt()
        return x * self.weight.view(shape) + self.bias.view(shape)


class LoudGroups(nn.GroupNorm):
    """A group norm with another forward than torch's."""

    def forward(self, x: Tensor) -> Tensor:
        """Twice what torch computes."""
        return 2 * super().forward(x)


class OwnBatch(nn.BatchNorm2d):
    """A batch norm by another name."""


@pytest.mark.parametrize("method", ["tent", "poem", "source"])
@pytest.mark.parametrize("norm", [RootMean, partial(LoudGroups, 2), OwnBatch], ids=["own", "groups", "batch"])
def test_norm_layers_that_no_kernel_takes_run_as_they_are_and_one_note_names_them(
    norm: Any,
    method: str,
    fresh_kernels: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 10),
    ).eval().to(DEVICE).to(memory_format=torch.channels_last)  # fmt: skip
    batches = last_in_memory(stream(DEVICE, 3, size=4))
    settings: dict[str, Any] = {"precision": "bf16", "fast": False, **({"threshold": 0.99} if method == "poem" else {})}
    with caplog.at_level(logging.WARNING, logger="poem"):
        one, other = (poem.adapt(net, method, **settings) for _ in range(2))
        found = [one(batch) for batch in batches]
        other(batches[0])
    (note,) = [record.getMessage() for record in caplog.records if "norm layers that no kernel" in record.getMessage()]
    assert type(net[1]).__name__ in note
    without_kernels(monkeypatch)
    without = poem.adapt(net, method, **settings)
    for batch, answer in zip(batches, found, strict=True):
        assert torch.equal(answer, without(batch))
    assert (one.totals.updates > 0) == (method != "source")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize(("kind", "module"), [("bn", batch_norm), ("gn", sample_norms)])
def test_odd_shapes_are_answered_as_without_kernels(
    kind: str, module: Any, last: bool, fresh_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a rounding of bf16; every batch is of a new size, and the kernels took some of it."""
    net, asked, own = make_net(kind, sharpness=10.0).to(DEVICE), list[bool](), module.fusable

    def fusable(*given: Any) -> bool:
        asked.append(own(*given))
        return asked[-1]

    monkeypatch.setattr(module, "fusable", fusable)
    sizes = [(2, 9, 7), (3, 8, 11)]
    batches = [torch.rand(count, 3, *size, generator=seeded(count)).to(DEVICE) for count, *size in sizes]
    batches = last_in_memory(batches) if last else batches
    one = poem.adapt(net, "tent", precision="bf16", fast=False, lr=1e-4)
    found = [one(batch) for batch in batches]
    assert any(asked)
    assert one.totals.updates == len(sizes)
    without_kernels(monkeypatch)
    without = poem.adapt(net, "tent", precision="bf16", fast=False, lr=1e-4)
    for batch, answer in zip(batches, found, strict=True):
        expected = without(batch)
        assert (answer - expected).abs().max() < 0.1 * expected.std(), "bf16 has three digits"


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU, which has no kernels")
def test_on_a_cpu_no_note_names_layers_without_kernels(caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), RootMean(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    with caplog.at_level(logging.WARNING, logger="poem"):
        poem.adapt(net, "tent", precision="bf16")
    assert "kernel" not in caplog.text
