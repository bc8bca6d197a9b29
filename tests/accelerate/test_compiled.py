"""A compiled network answers as the plain one, or runs plainly and says why.

Most run what torch traced without generating code, which is exact; two generate it, where there is a C++ compiler.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

import inside
import pytest
import torch
from nets import make_net
from torch import Tensor, nn
from toys import stream

import poem
from poem.accelerate import batch_norm, compiled
from poem.parts import Everyone, PLPDAbove, Repeat

KINDS = ["bn", "gn", "ln"]
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("tent", {}),
    ("poem", {"select": Everyone(), "rounds": 1}),
    ("poem", {"select": Everyone(), "explore": Repeat(2)}),
    ("eata", {"select": Everyone(), "source_data": [torch.full((4, 3, 16, 16), 0.5)]}),
    ("sar", {"select": Everyone()}),
    ("deyo", {"select": Everyone() & PLPDAbove(-2.0)}),
    ("roid", {"mean": (0, 0, 0), "std": (1, 1, 1)}),
]


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was traced runs operation by operation."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")


def pair(kind: str, method: str, *, sharpness: float = 10.0, **more: Any) -> list[poem.Adapter]:
    """A plain adapter and a compiled one."""
    return [
        poem.adapt(make_net(kind, sharpness=sharpness), method, lr=0.02, fast=False, compile=each, **more)
        for each in (False, True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "more"), METHODS, ids=[f"{name}{at}" for at, (name, _) in enumerate(METHODS)])
def test_what_torch_traces_is_the_method(kind: str, method: str, more: dict[str, Any], exact: None) -> None:
    plain, quick = pair(kind, method, **more)
    for batch in stream("cpu", 3):
        torch.testing.assert_close(quick(batch), plain(batch), atol=1e-6, rtol=0)
        assert quick.last.notes == []
    assert plain.totals == quick.totals
    assert quick.totals.updates >= 3
    assert inside.compiled(quick)._made, "something was compiled"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch generates C++, which wants a compiler")
@pytest.mark.parametrize(("method", "kind"), [("tent", "bn"), ("poem", "ln")])
def test_generated_code_answers_the_same(method: str, kind: str) -> None:
    more: dict[str, Any] = {} if method == "tent" else {"select": Everyone(), "rounds": 1}
    plain, quick = pair(kind, method, **more)
    for batch in stream("cpu", 3):
        torch.testing.assert_close(quick(batch), plain(batch), atol=1e-3, rtol=0)
    assert quick.last.notes == []
    assert plain.totals.taught == quick.totals.taught > 0
    assert inside.compiled(quick)._made


@pytest.mark.parametrize(("kind", "names"), [
    ("bn", ["layer1", "layer2", "layer3"]), ("ln", [f"blocks.{at}" for at in range(6)]),
])  # fmt: skip
def test_with_a_branch_what_lies_before_the_split_is_compiled(kind: str, names: list[str]) -> None:
    # Beyond it the branch's backward pass keeps the graph for that of theta, which compiled code may not.
    for method, expected in (("poem", names), ("tent", [""])):
        adapter = pair(kind, method)[1]
        given = dict(zip(inside.network(adapter).modules, dict(adapter.model.named_modules()), strict=True))
        assert [given[module] for module in inside.compiled(adapter).modules] == expected


def test_hooks_are_called_and_the_note_says_that_nothing_was_compiled(exact: None) -> None:
    _, quick = pair("bn", "tent")
    *first, last = stream("cpu", 3)
    for batch in first:
        quick(batch)
    heard: list[int] = []
    quick.model.register_forward_hook(lambda *_: heard.append(1))
    quick(last)
    assert heard
    assert quick.last.notes == ["not compiled: the model has hooks, which a compiled pass would not call"]


class Reads(nn.Module):
    """Reads a value on the host, where torch's trace ends."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("bn", sharpness=10.0)

    def forward(self, x: Tensor) -> Tensor:
        """As the net inside, on images that are not all dark."""
        answer: Tensor = self.net(x) if float(x.max()) > 0 else x.flatten(1)[:, :10]
        return answer


def test_what_torch_cannot_compile_runs_plainly_and_says_why_once(
    exact: None, caplog: pytest.LogCaptureFixture
) -> None:
    plain, quick = (poem.adapt(Reads().eval(), "tent", lr=0.02, fast=False, compile=each) for each in (False, True))
    with caplog.at_level(logging.WARNING, logger="poem"):
        for batch in stream("cpu", 4):
            torch.testing.assert_close(quick(batch), plain(batch), atol=0, rtol=0)
    (note,) = quick.last.notes
    assert note.startswith("not compiled: ")
    assert sum("not compiled" in record.message for record in caplog.records) == 1
    assert plain.totals == quick.totals


def test_an_error_of_the_model_is_the_models_own(exact: None) -> None:
    _, quick = pair("bn", "tent")
    for batch in stream("cpu", 2):
        quick(batch)
    with pytest.raises(ValueError, match="expected 3 channels, got 5"):
        quick(torch.rand(4, 5, 16, 16))


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_our_kernels_inside_a_compiled_pass_are_batch_norm(
    method: str, exact: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(batch_norm, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(batch_norm.kernels(), "SMALL", 0)
    from poem.accelerate import compiled_batch_norm as traced

    normed: list[int] = []
    real = batch_norm.kernels
    monkeypatch.setattr(traced, "kernels", lambda: normed.append(1) or real())  # type: ignore[func-returns-value]
    more: dict[str, Any] = {} if method == "tent" else {"select": Everyone(), "rounds": 1}
    plain, quick = pair("bn", method, sharpness=3.0, precision="bf16", **more)
    for batch in stream("cpu", 2, size=4):
        far = (quick(batch).softmax(1) - plain(batch).softmax(1)).abs().max()
        assert far < 0.02
    assert quick.last.notes == []
    assert plain.totals.taught == quick.totals.taught > 0
    assert normed, "moments and sums were taken by our kernels"


def test_batch_norm_in_a_compiled_pass_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from poem.accelerate import compiled_batch_norm as traced

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rng = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 6, 5, 5, generator=rng) + 3).to(device).requires_grad_()
    drawn = [torch.rand(2, 6, generator=rng).to(device).requires_grad_() for _ in range(2)]
    affine = [(each[0], each[1]) for each in drawn]
    flat = [tensor for each in affine for tensor in each]
    halves = zip(x.chunk(2), affine, strict=True)
    theirs = torch.cat(
        [nn.functional.batch_norm(half, None, None, weight, bias, training=True) for half, (weight, bias) in halves]
    )
    ours = traced.batch_normed(x, affine, 1e-5)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, ours.numel(), device=device).view_as(ours)
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), [x, *flat]),
        torch.autograd.grad((theirs * weights).sum(), [x, *flat]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_only_public_names_of_torch_are_used() -> None:
    from pathlib import Path

    for name in ("compiled.py", "compiled_batch_norm.py"):
        text = Path(compiled.__file__).with_name(name).read_text()
        assert "torch._" not in text
        assert "experimental" not in text
