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
from poem.accelerate import batch_norm, compiled, selected_rows
from poem.parts import EntropyBelow, Everyone, PLPDAbove, Repeat

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

    def __init__(self, kind: str = "bn") -> None:
        super().__init__()
        self.net = make_net(kind, sharpness=10.0)

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


def test_batch_norm_in_a_compiled_pass_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def ran(exact: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each compiled pass that ran."""
    passes: list[int] = []
    real = compiled.CompiledModules._compiled
    monkeypatch.setattr(
        compiled.CompiledModules,
        "_compiled",
        lambda *args: passes.append(1) or real(*args),  # type: ignore[func-returns-value]
    )
    return passes


def test_the_source_runs_plainly_and_is_no_batch_of_the_stream(ran: list[int]) -> None:
    plain, quick = pair("bn", "tent")
    first, second, third = stream("cpu", 3)
    for _ in range(3):
        torch.testing.assert_close(quick.source(first), plain.source(first), atol=0, rtol=0)
    torch.testing.assert_close(quick(first), plain(first), atol=0, rtol=0)
    assert not ran, "the first batch that is answered runs plainly"
    quick(second)
    count = len(ran)
    assert count > 0
    quick.source(third)
    assert len(ran) == count


def test_the_first_batch_after_preparing_runs_plainly(ran: list[int]) -> None:
    _, quick = pair("bn", "eata", select=Everyone(), source_data=[torch.full((4, 3, 16, 16), 0.5)])
    first, second = stream("cpu", 2)
    quick.prepare(first)
    quick(first)
    assert not ran
    quick(second)
    assert ran


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch generates C++, which wants a compiler")
def test_gradients_of_each_sample_are_measured_once_something_is_compiled() -> None:
    # Generated code frees what it saved in its one backward pass; here there is one per sample.
    plain, quick = pair("bn", "tent")
    for batch in stream("cpu", 2):
        plain(batch), quick(batch)
    assert inside.compiled(quick)._made
    torch.testing.assert_close(quick.gradient_norms(batch), plain.gradient_norms(batch), atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_auto_with_its_copies_is_compiled(kind: str, ran: list[int]) -> None:
    plain, quick = pair(kind, "auto")
    for batch in stream("cpu", 3):
        torch.testing.assert_close(quick(batch), plain(batch), atol=1e-5, rtol=0)
    assert quick.last.notes == plain.last.notes
    assert plain.totals == quick.totals
    assert ran


def test_frozen_calls_are_compiled_and_leave_the_state(ran: list[int]) -> None:
    plain, quick = pair("bn", "tent")
    first, second, third = stream("cpu", 3)
    plain(first), quick(first)
    before = inside.moving(quick)["theta"].clone()
    with quick.frozen(), plain.frozen():
        for batch in (second, third):
            torch.testing.assert_close(quick(batch), plain(batch), atol=1e-6, rtol=0)
    assert ran
    torch.testing.assert_close(inside.moving(quick)["theta"], before, atol=0, rtol=0)
    torch.testing.assert_close(quick(second), plain(second), atol=1e-6, rtol=0)


class Writes(nn.Module):
    """Writes into its input and into what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("bn", sharpness=10.0)

    def forward(self, x: Tensor) -> Tensor:
        """As the net inside, on half of what came in."""
        logits: Tensor = self.net(x.mul_(0.5).relu_())
        return logits.mul_(2)


def test_a_network_that_writes_in_place_is_compiled(ran: list[int]) -> None:
    plain, quick = (poem.adapt(Writes().eval(), "tent", lr=0.02, fast=False, compile=each) for each in (False, True))
    for batch in stream("cpu", 4):
        kept = batch.clone()
        torch.testing.assert_close(quick(batch), plain(batch), atol=1e-5, rtol=0)
        assert torch.equal(batch, kept), "the caller's images are not written to"
    assert ran
    assert quick.last.notes == []
    assert plain.totals == quick.totals


def test_what_cannot_be_compiled_is_still_cached_and_selected(exact: None) -> None:
    quick = poem.adapt(Reads("gn").eval(), "tent", select=EntropyBelow(0.999), lr=0.02, fast=False, compile=True)
    plain = poem.adapt(Reads("gn").eval(), "tent", select=EntropyBelow(0.999), lr=0.02, fast=False)
    for batch in stream("cpu", 4):
        plain(batch), quick(batch)
    assert inside.compiled(quick).failed
    assert inside.cached_layers(quick) == inside.cached_layers(plain) != set()
    assert quick.totals.taught == plain.totals.taught > 0


def test_hooks_that_prevent_compiling_leave_the_selected_rows(exact: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selected_rows, "BACKWARD_RATIO", 1.0)
    net = make_net("gn", sharpness=3.0)
    plain, quick = (
        poem.adapt(net, "tent", select=EntropyBelow(0.6), lr=1e-4, fast=False, compile=each) for each in (False, True)
    )
    for adapter in (plain, quick):
        adapter.model.register_forward_hook(lambda *_: None)
        for batch in stream("cpu", 3):
            adapter(batch)
    assert 0 < plain.totals.backwards_computed < 24
    assert quick.totals.backwards_computed == plain.totals.backwards_computed


def test_as_many_shapes_are_kept_as_of_captured_loops(exact: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "SHAPES", 2)
    _, quick = pair("bn", "tent")
    images = torch.cat(stream("cpu", 1, size=9))
    for size in (5, 5, 6, 7, 8, 9, 8):
        quick(images[:size])
    assert [key[1][0][0] for key in inside.compiled(quick)._made] == [9, 8]
    quick.model.register_buffer("other", torch.ones(1))  # another model now
    quick(images[:6])  # its first pass is looked at, and plain
    quick(images[:7])
    assert [key[1][0][0] for key in inside.compiled(quick)._made] == [7]
    assert quick.last.notes == []


def test_only_public_names_of_torch_are_used() -> None:
    from pathlib import Path

    for name in ("compiled.py", "compiled_batch_norm.py"):
        text = Path(compiled.__file__).with_name(name).read_text()
        assert "torch._" not in text
        assert "experimental" not in text
