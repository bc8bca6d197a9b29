"""A captured loop is the same function as the eager one: answers, state, totals, errors.

On the CPU a tape stands in for CUDA graphs, so that the order of segments and endings, the addresses and the draws are
checked to the bit everywhere; with a GPU the same facts are checked on the real thing. The whole contract runs on
captured loops with `pytest tests/test_contract.py --fast`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import toys
from adapters import capturing
from compare import assert_near, assert_same_state
from inside import branch_backward, capture_key, captured_sizes, moving
from nets import Tokens, make_net
from test_contract import ROWS, Case
from torch import Tensor, nn
from toys import stream

import poem
import poem.accelerate.capture
from poem.parts import SAM, EntropyBelow, PLPDAbove
from poem.parts.base import Memory, Need, Outputs
from poem.parts.parameters import Parameters
from poem.parts.recovery import Recovery
from poem.parts.selection import Select
from poem.recipes.learning_rate import Rule
from poem.recipes.recipe import Recipe

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
METHODS = ("source", "tent", "eata", "sar", "deyo", "roid", "rdumb", "poem", "poem-official", "sar+poem", "deyo+poem-i",
           "come+poem", "zerosiam", "neo", "spa", "cmf+poem", "recap", "rpl",
           "rem")  # fmt: skip


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where loops are captured: on tapes, or as CUDA graphs."""
    with capturing(request.param):
        yield str(request.param)


def pair(method: str, kind: str, device: str, **changes: Any) -> tuple[poem.Adapter, poem.Adapter]:
    """An eager adapter and a capturing one, each on its own copy of a net."""
    case = Case(method, kind)
    return tuple(case.adapter(case.net().to(device), fast=fast, **changes) for fast in (False, True))  # type: ignore[return-value]


def captured(adapter: poem.Adapter) -> bool:
    """Whether the last batch replayed a captured loop."""
    return bool(captured_sizes(adapter)) and not adapter.last.notes


def only_loop(adapter: poem.Adapter) -> Any:
    """The one loop that was captured."""
    (loop,) = adapter._captures._loops.values()
    return loop


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize("method", METHODS)
def test_answers_state_and_totals_are_the_eager_loops(method: str, kind: str, device: str) -> None:
    if kind not in ROWS[method].nets:
        pytest.skip(f"takes {ROWS[method].nets} alone")
    plain, fast = pair(method, kind, device)
    for batch in stream(device):
        torch.testing.assert_close(fast(batch), plain(batch), atol=0 if device == "cpu" else 1e-5, rtol=0)
        assert torch.equal(plain.last.selected, fast.last.selected)
        assert torch.equal(plain.last.newly_reliable, fast.last.newly_reliable)
        assert (plain.last.taught, plain.last.skipped, plain.last.reset) == (
            fast.last.taught, fast.last.skipped, fast.last.reset,
        )  # fmt: skip
    assert captured(fast)
    assert plain.totals == fast.totals
    if device == "cpu":
        assert_same_state(plain.state_dict(), fast.state_dict())


def test_every_end_of_the_loop_is_reached(device: str) -> None:
    # Batches that end at the first outputs, after one update and after two, through one captured loop.
    plain, fast = pair("poem", "gn", device, threshold=0.3)
    rounds = []
    for batch in stream(device, 16, size=3):
        assert_near([fast(batch)], [plain(batch)], device)
        assert fast.last.rounds == plain.last.rounds
        rounds.append(fast.last.rounds)
    assert len(captured_sizes(fast)) == 1
    assert set(rounds[1:]) == {0, 1, 2}


@pytest.mark.parametrize("radius", [0.05, 0.5])
def test_momentum_coast_is_the_same_in_a_captured_loop(radius: float, device: str) -> None:
    # Single images: some are selected, some are not, some only until the perturbation.
    step = SAM(radius, momentum_coast=True)
    plain, fast = pair("sar", "gn", device, threshold=0.3, step=step)
    still, _ = pair("sar", "gn", device, threshold=0.3, step=SAM(radius))
    skipped, lost = [], 0
    for batch in stream(device, 24, size=1):
        assert_near([fast(batch)], [plain(batch)], device)
        still(batch)
        skipped.append(plain.last.skipped is not None)
        lost += bool(plain.last.selected.any()) and skipped[-1]
    assert captured(fast)
    assert (lost > 0) == (radius == 0.5)
    assert 0 < sum(skipped) < len(skipped)
    assert plain.totals == fast.totals
    if device == "cpu":
        assert_same_state(plain.state_dict(), fast.state_dict())
    one, other = (adapter.state_dict()["tensors"] for adapter in (plain, still))
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_tensors_of_a_batch_are_not_overwritten_by_the_next(device: str) -> None:
    _, fast = pair("poem", "bn", device)
    first, second, third = stream(device, 3)
    fast(first)
    answer, last, state = fast(second), fast.last, fast.state_dict()
    before = answer.clone(), last.entropy.first.clone(), last.loss, last.taught, copy.deepcopy(state)
    held = moving(fast)
    kept = {key: tensor.clone() for key, tensor in held.items()}
    fast(third)
    assert torch.equal(answer, before[0])
    assert torch.equal(last.entropy.first, before[1])
    assert (last.loss, last.taught) == before[2:4]
    assert_same_state(state, before[4])
    assert all(torch.equal(held[key], kept[key]) for key in kept)


def test_short_batches_other_sizes_and_frozen_calls_agree(device: str) -> None:
    plain, fast = pair("deyo+poem", "bn", device)
    batches = stream(device)
    for batch in (batches[0], batches[1], batches[2][:3], batches[3], batches[4][:3], batches[5]):
        assert_near([fast(batch)], [plain(batch)], device)
        with plain.frozen(), fast.frozen():
            before = fast.state_dict()
            assert_near([fast(batch)], [plain(batch)], device)
            assert_same_state(fast.state_dict(), before)
    assert len(captured_sizes(fast)) == 4  # two sizes, each learning and frozen
    assert plain.totals == fast.totals


def test_reset_and_a_loaded_state_reach_the_captured_loop(device: str) -> None:
    plain, fast = pair("sar+poem", "ln", device)
    batches = stream(device)
    for adapter in (plain, fast):
        for batch in batches[:3]:
            adapter(batch)
    saved = fast.state_dict()
    expected = [plain(batch) for batch in batches[3:]]
    assert_near([fast(batch) for batch in batches[3:]], expected, device)
    fast.load_state_dict(saved)
    assert_near([fast(batch) for batch in batches[3:]], expected, device)
    plain.reset()
    fast.reset()
    for batch in batches:
        assert_near([fast(batch)], [plain(batch)], device)
        assert plain.state_dict()["classes"] == fast.state_dict()["classes"] == 10


def test_another_batch_size_after_a_reset_is_captured_anew(device: str) -> None:
    plain, fast = (
        Case("roid", "bn").adapter(Case("roid", "bn").net().to(device), fast=f, lr=Rule()) for f in (False, True)
    )
    batches = stream(device)
    for adapter in (plain, fast):
        for batch in batches[:3]:
            adapter(batch)
        adapter.reset()
        adapter(batches[0][:4])  # from now on rates and sums are those of four images
    assert_near([fast(batch) for batch in batches], [plain(batch) for batch in batches], device)


def test_importance_measured_later_reaches_the_captured_loop(device: str) -> None:
    plain, fast = pair("eata", "bn", device, source_data=None)
    batches = stream(device)
    for adapter in (plain, fast):
        for batch in batches[:3]:
            adapter(batch)
        adapter.prepare([batches[0]])
    assert_near([fast(batch) for batch in batches[3:]], [plain(batch) for batch in batches[3:]], device)
    assert captured(fast)


def test_the_callers_autocast_and_switches_are_part_of_the_capture_key(device: str) -> None:
    plain, fast = pair("tent", "bn", device)
    for count, batch in enumerate(stream(device, 8)):
        with torch.autocast(device, torch.bfloat16, enabled=count % 2 == 0):
            assert_near([fast(batch)], [plain(batch)], device)
    assert len(captured_sizes(fast)) == 2
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not before
    try:
        fast(batch)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(captured_sizes(fast)) == 3


def test_unloading_releases_the_captured_loops(device: str) -> None:
    _, fast = pair("tent", "bn", device)
    for batch in stream(device, 3):
        fast(batch)
    assert captured_sizes(fast)
    fast.unload()
    assert not captured_sizes(fast)


def test_a_part_that_runs_on_the_host_is_found_inside_another() -> None:
    assert Recipe(select=EntropyBelow(0.4) & PLPDAbove(0.2)).first_with(Need.HOST) is None
    assert Recipe(select=EntropyBelow(0.4) & Rolls()).first_with(Need.HOST) == Rolls()
    assert poem.recipe("lame").first_with(Need.HOST) is not None
    assert poem.recipe("poem").first_with(Need.HOST) is None


def test_the_caller_may_write_into_an_answer(device: str) -> None:
    for adapter in pair("tent", "bn", device):
        for batch in stream(device, 3):
            answer = adapter(batch)
            kept = adapter.last.first_logits.clone()
            answer.fill_(0)
            assert torch.equal(adapter.last.first_logits, kept)


def test_broken_images_change_no_state(device: str) -> None:
    _, fast = pair("poem", "bn", device)
    first, second, third = stream(device, 3)
    fast(first)
    fast(second)
    before, totals = fast.state_dict(), fast.totals
    broken = third.clone()
    broken[5, 0, 1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf in sample 5"):
        fast(broken)
    assert_same_state(fast.state_dict(), before)
    assert fast.totals == totals


def test_two_adapters_and_new_weights(device: str) -> None:
    # Captured loops read the model's memory: values written there count at once, other memory is captured anew.
    case = Case("poem", "gn")
    net: Any = case.net().to(device)
    one, other = (case.adapter(net, fast=True) for _ in range(2))
    plain = case.adapter(case.net().to(device), fast=False)
    batches = stream(device)
    for batch in batches:
        assert_near([one(batch), other(batch)], [plain(batch)] * 2, device)
    with torch.no_grad():
        net.fc.weight.mul_(0.5)
    fresh = copy.deepcopy(net)
    for adapter in (one, other):
        adapter.reset()
    plain = case.adapter(fresh, fast=False)
    expected = [plain(batch) for batch in batches]
    assert_near([one(batch) for batch in batches], expected, device)
    # Other memory, with other numbers; then the old memory again.
    old = net.fc.weight.data
    net.fc.weight.data = old.clone() * 0.5
    other.reset()
    plain = case.adapter(copy.deepcopy(net), fast=False)
    assert_near([other(batch) for batch in batches], [plain(batch) for batch in batches], device)
    net.fc.weight.data = old
    other.reset()
    assert_near([other(batch) for batch in batches], expected, device)
    # Another layer in the place of one.
    net.fc = nn.Linear(20, 10).to(device)
    one.reset()
    plain = case.adapter(copy.deepcopy(net), fast=False)
    assert_near([one(batch) for batch in batches], [plain(batch) for batch in batches], device)


def test_auto_captures_a_shape_after_some_eager_batches(device: str) -> None:
    case = Case("tent", "bn")
    adapter = case.adapter(case.net().to(device), fast="auto")
    for count, batch in enumerate(stream(device, poem.accelerate.capture.EAGER_FIRST + 2), 1):
        adapter(batch)
        assert bool(captured_sizes(adapter)) == (count > poem.accelerate.capture.EAGER_FIRST)


def test_the_shape_used_longest_ago_is_released_first(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poem.accelerate.capture, "SHAPES", 2)
    _, fast = pair("tent", "bn", device)
    batch = stream(device, 1)[0]
    for size in (8, 8, 7, 6, 5):
        fast(batch[:size])
    assert captured_sizes(fast) == [6, 5]


@dataclass(frozen=True, repr=False)
class Reading(Select):
    """Decides on the host."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among if float(outputs.entropy.mean()) > -1 else ~among


@dataclass(frozen=True, repr=False)
class Indexing(Select):
    """Has a shape that depends on what it sees."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among & (outputs.entropy.detach() <= outputs.entropy.detach()[among].max())


@dataclass(frozen=True, repr=False)
class Bright(Select):
    """Images that are not black."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among & (outputs.batch.images.mean((1, 2, 3)) > 0.1)


@dataclass(frozen=True, repr=False)
class Rolls(Select):
    """Declares that it runs on the host."""

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({Need.HOST})

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among


@dataclass(frozen=True, repr=False)
class Rolling(Recovery):
    """Draws where a replay could not."""

    def pull(self, theta: Tensor, source: Tensor, rng: torch.Generator) -> Tensor:
        return torch.where((torch.rand(theta.numel(), generator=rng) < 0.5).to(theta.device), source, theta)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"select": Reading()}, "not captured: "), ({"select": Indexing()}, "not captured: "),
     ({"recover": Rolling()}, "draws random numbers outside Batch.once")],
)  # fmt: skip
def test_what_cannot_be_captured_runs_eagerly_and_says_why(
    changes: dict[str, Any], reason: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = pair("tent", "bn", device, **changes)
    batches = stream(device, 4)
    assert_near([fast(batch) for batch in batches], [plain(batch) for batch in batches], device)
    assert reason in fast.last.notes[-1]
    assert sum("runs eagerly" in message for message in caplog.messages) == 1
    good, _ = pair("poem", "bn", device)  # and the next one is captured as if nothing had been
    healthy = Case("poem", "bn").adapter(Case("poem", "bn").net().to(device), fast=True)
    assert_near([healthy(batch) for batch in batches], [good(batch) for batch in batches], device)
    assert captured(healthy)


@pytest.mark.parametrize("method", ["memo", "cotta", "lame", "rotta"])
def test_methods_that_decide_on_the_host_say_so(method: str, device: str) -> None:
    _, fast = pair(method, "bn", device)
    fast(stream(device, 1)[0][:2])
    assert "on the host" in fast.last.notes[-1]


def test_hooks_are_called_and_prevent_capture(device: str) -> None:
    case, heard = Case("tent", "bn"), list[int]()
    net: Any = case.net().to(device)
    adapter = case.adapter(net, fast=True)
    batches = stream(device, 3)
    adapter(batches[0])
    adapter(batches[1])
    assert captured(adapter)
    net.fc.register_forward_hook(lambda *_: heard.append(1))
    adapter(batches[2])
    assert heard
    assert "hooks" in adapter.last.notes[-1]


def test_on_a_cpu_a_note_is_made_only_with_fast_true(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    batch = toys.images(4, seed=0)
    for fast, told in ((True, True), ("auto", False), (False, False)):
        adapter = Case("tent", "bn").adapter(fast=fast)
        for _ in range(poem.accelerate.capture.EAGER_FIRST + 2):
            adapter(batch)
            assert bool(adapter.last.notes) == told
    assert not caplog.messages  # a note is enough


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("method", "rounds"), [("tent", 1), ("sar", 1), ("deyo", 1), ("poem", 2), ("deyo+poem", 2)])
def test_the_host_synchronises_once_per_round(method: str, rounds: int) -> None:
    _, fast = pair(method, "bn", "cuda")
    for number, batch in enumerate(stream("cuda")):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if number > 1 else "default")
            fast(batch)
            torch.cuda.set_sync_debug_mode("default")
        assert sum("synchroniz" in str(each.message) for each in heard) <= rounds


def test_a_model_with_a_sparse_buffer_is_captured(device: str) -> None:
    case = Case("tent", "bn")
    net = case.net().to(device)
    net.register_buffer("graph", torch.eye(3, device=device).to_sparse())
    adapter = case.adapter(net, fast=True)
    for batch in stream(device, 3):
        assert adapter(batch).isfinite().all()
    assert captured(adapter)


def test_outputs_do_not_outlive_their_batch() -> None:
    import gc
    import weakref

    from poem.engine.loop import BatchLoop

    seen: list[Any] = []
    plain = BatchLoop.forward

    def forward(self: BatchLoop, *args: Any, **kwargs: Any) -> Outputs:
        made = plain(self, *args, **kwargs)
        seen.append(weakref.ref(made))
        return made

    adapter = Case("poem", "bn").adapter(fast=False)
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchLoop, "forward", forward)
            adapter(stream("cpu", 1)[0])
        assert len(seen) > 1
        assert not any(ref() is not None for ref in seen)
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_half_precision_is_captured_as_it_runs(method: str, device: str) -> None:
    # On a GPU this is batch norm by our own kernels, in the eager loop and in the captured one.
    plain, fast = pair(method, "bn", device, precision="bf16")
    for batch in stream(device):
        assert_near([fast(batch)], [plain(batch)], device)
    assert captured(fast)
    assert plain.totals == fast.totals


def test_the_capture_key_changes_with_every_tensor_of_the_model(device: str) -> None:
    # A tensor that moves to a place where there was none, or is read otherwise at the same address, is another model.
    net: Any = make_net("bn").to(device)
    adapter = poem.adapt(net, "tent", fast=True)
    known = {capture_key(adapter)}
    net.register_buffer("one", torch.rand(4, 4, device=device))
    net.register_buffer("two", None)
    known.add(capture_key(adapter))
    net.one, net.two = None, net.one
    known.add(capture_key(adapter))
    net.two.data = net.two.data.t()
    known.add(capture_key(adapter))
    net._buffers = dict(net._buffers, two=torch.rand(4, 4, device=device))
    known.add(capture_key(adapter))
    net.register_buffer("graph", torch.eye(3, device=device).to_sparse())
    known.add(capture_key(adapter))
    kept, net.fc.weight.data = net.fc.weight.data, net.fc.weight.data.clone()  # seen beside a sparse one too
    known.add(capture_key(adapter))
    assert len(known) == 7
    assert kept is not None


@pytest.mark.parametrize("method", ["deyo", "poem"])
def test_a_model_that_has_changed_is_seen_after_the_first_launch(
    method: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # DeYO draws random numbers in the first stage: those of the launch that was for nothing are drawn again.
    plain, fast = pair(method, "bn", device)
    for batch in stream(device):
        fast(batch), plain(batch)
    assert captured(fast)
    launched, real = [], type(only_loop(fast)).__call__

    def noted(loop: Any, *given: Any) -> Any:
        launched.append(real(loop, *given))
        return launched[-1]

    monkeypatch.setattr(type(only_loop(fast)), "__call__", noted)
    for adapter in (plain, fast):
        weight: Any = adapter.model.get_parameter("fc.weight")
        weight.data = weight.data * 2
    for batch in stream(device):
        assert_near([fast(batch)], [plain(batch)], device)
    assert launched[0] is None
    assert all(each is not None for each in launched[1:])
    assert captured(fast)
    assert plain.totals == fast.totals
    if device == "cpu":
        assert_same_state(plain.state_dict(), fast.state_dict())


class Keeping(nn.Module):
    """A model that keeps what its forward saw, as attention maps are kept; it is called plainly too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.kept = inner, torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x)
        return self.kept


@pytest.mark.parametrize(("fast", "frozen", "captures"), [(True, False, 1), ("auto", False, 1), (True, True, 2)])
def test_a_model_that_keeps_things_and_is_called_plainly_is_captured_once(
    fast: Any, frozen: bool, captures: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poem.accelerate.capture, "EAGER_FIRST", 1)
    made, init = [], poem.accelerate.capture.CapturedLoop.__init__

    def counted(self: Any, *given: Any) -> None:
        made.append(self)
        init(self, *given)

    monkeypatch.setattr(poem.accelerate.capture.CapturedLoop, "__init__", counted)
    nets = [Keeping(make_net("bn")).to(device) for _ in range(2)]
    plain, adapter = (poem.adapt(net, "tent", fast=each) for net, each in zip(nets, (False, fast), strict=True))
    for batch in stream(device, 6):
        for net in nets:
            net(batch)
        assert_near([adapter(batch)], [plain(batch)], device)
        if frozen:
            with adapter.frozen(), plain.frozen():
                assert_near([adapter(batch)], [plain(batch)], device)
    assert len(made) == captures
    assert captured(adapter)


def test_a_model_that_left_the_device_leaves_no_captured_loop(device: str) -> None:
    _, fast = pair("tent", "bn", device)
    for batch in stream(device):
        fast(batch)
    assert captured_sizes(fast)
    fast.model.to("meta") if device == "cpu" else fast.model.to("cpu")
    if device == "cpu":
        with pytest.raises(RuntimeError, match="autocast"):  # nothing can be computed there
            fast(stream("meta", 1)[0])
    else:
        fast(stream("cpu", 1)[0])
    assert not captured_sizes(fast)


def test_weights_that_were_emptied_in_place_are_not_read(device: str) -> None:
    _, fast = pair("tent", "bn", device)
    for batch in stream(device):
        fast(batch)
    loop, weight = only_loop(fast), fast.model.get_parameter("fc.weight")
    assert loop.readable()
    weight.untyped_storage().resize_(0)
    assert not loop.readable()


def test_weights_that_were_replaced_stay_readable(device: str) -> None:
    _, fast = pair("tent", "bn", device)
    for batch in stream(device):
        fast(batch)
    old = fast.model.get_parameter("fc.weight").detach().clone()
    for each in fast.model.parameters():
        each.data = torch.zeros_like(each)
    assert only_loop(fast).readable()
    assert any(torch.equal(each, old) for each in only_loop(fast)._model)


def test_a_batch_without_selected_samples_does_not_decide_the_check(device: str) -> None:
    # Batches without selected samples come first: a gradient of zero must not pass for a check.
    plain, fast = (
        poem.adapt(Tokens().to(device), "poem", fast=fast, lr=0.02, select=Bright(), split="blocks.3")
        for fast in (False, True)
    )
    branch_backward(plain).right = False
    for batch in [torch.zeros(8, 3, 16, 16, device=device)] * 3:
        assert_near([fast(batch)], [plain(batch)], device)
    assert fast.totals.taught == 0
    assert fast.last.notes[-1].startswith("not captured yet")
    for batch in stream(device):
        torch.testing.assert_close(fast(batch), plain(batch), atol=1e-4, rtol=0)
    assert fast.totals.updates > 0
    assert branch_backward(fast).right is False
    assert captured(fast)


@dataclass(frozen=True, repr=False)
class FromLayer3(Parameters):
    """The norm layers of the third stage only."""

    def __call__(self, model: nn.Module, facts: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if name.startswith("layer3") and "norm" in name]
