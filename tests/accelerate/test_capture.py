"""A recorded loop is the same function as the plain one: answers, state, books, errors.

On the CPU a tape stands in for CUDA graphs, so that the order of segments and endings, the addresses and the draws are
checked to the bit everywhere; with a GPU the same facts are checked on the real thing. The whole contract runs on
recordings with `POEM_TEST_FAST=1 pytest tests/test_contract.py`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import tape
import torch
import toys
from nets import make_net
from test_contract import Case, assert_same_answers, assert_same_state
from torch import Tensor, nn
from toys import stream

import poem
import poem.accelerate.capture
import poem.engine.loop
from poem.parts import SAM, EntropyBelow, Everyone, FromBatch, PLPDAbove, RunningMean, Source
from poem.parts.base import Memory, Outputs
from poem.parts.parameters import Parameters
from poem.parts.recovery import Recovery
from poem.parts.selection import Select
from poem.recipes.recipe import Rule

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
METHODS = ("source", "tent", "eata", "sar", "deyo", "roid", "rdumb", "poem", "poem-official", "sar+poem", "deyo+poem-i")


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where loops are recorded: on tapes, or as CUDA graphs. A recording keeps batches whole, and so do we here."""
    monkeypatch.setattr(poem.accelerate.selected_rows, "BACKWARD_RATIO", torch.inf)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(request.param == "cuda" or before, warn_only=True)
    with tape.installed() if request.param == "cpu" else nullcontext():
        yield str(request.param)
    torch.use_deterministic_algorithms(before, warn_only=True)


def pair(method: str, kind: str, device: str, **changes: Any) -> tuple[poem.Adapter, poem.Adapter]:
    """A plain adapter and a recording one, each on its own copy of a net."""
    case = Case(method, kind)
    return tuple(case.adapter(case.net().to(device), fast=fast, **changes) for fast in (False, True))  # type: ignore[return-value]


def recorded(adapter: poem.Adapter) -> bool:
    """Whether the last batch was a replay."""
    return bool(adapter._captures._loops) and not adapter.last.notes


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize("method", METHODS)
def test_answers_state_and_books_are_the_plain_loops(method: str, kind: str, device: str) -> None:
    plain, fast = pair(method, kind, device)
    for batch in stream(device):
        torch.testing.assert_close(fast(batch), plain(batch), atol=0 if device == "cpu" else 1e-5, rtol=0)
        assert torch.equal(plain.last.selected, fast.last.selected)
        assert torch.equal(plain.last.newly_reliable, fast.last.newly_reliable)
        assert (plain.last.taught, plain.last.skipped, plain.last.reset) == (
            fast.last.taught, fast.last.skipped, fast.last.reset,
        )  # fmt: skip
    assert recorded(fast)
    assert plain.totals == fast.totals
    if device == "cpu":
        assert_same_state(plain.state_dict(), fast.state_dict())


def test_every_way_out_of_the_loop_is_taken(device: str) -> None:
    # Batches that end at the first outputs, after one update and after two, through one recording.
    plain, fast = pair("poem", "gn", device, threshold=0.3)
    rounds = []
    for batch in stream(device, 16, size=3):
        assert_near([fast(batch)], [plain(batch)], device)
        assert fast.last.rounds == plain.last.rounds
        rounds.append(fast.last.rounds)
    assert len(fast._captures._loops) == 1
    assert set(rounds[1:]) == {0, 1, 2}


@pytest.mark.parametrize("radius", [0.05, 0.5])
def test_a_step_that_coasts_coasts_in_a_recording_too(radius: float, device: str) -> None:
    # Single images: some teach, some do not, some only until the second look.
    step = SAM(radius, momentum_coast=True)
    plain, fast = pair("sar", "gn", device, threshold=0.3, step=step)
    still, _ = pair("sar", "gn", device, threshold=0.3, step=SAM(radius))
    skipped, lost = [], 0
    for batch in stream(device, 24, size=1):
        assert_near([fast(batch)], [plain(batch)], device)
        still(batch)
        skipped.append(plain.last.skipped is not None)
        lost += bool(plain.last.selected.any()) and skipped[-1]
    assert recorded(fast)
    assert (lost > 0) == (radius == 0.5)
    assert 0 < sum(skipped) < len(skipped)
    assert plain.totals == fast.totals
    if device == "cpu":
        assert_same_state(plain.state_dict(), fast.state_dict())
    one, other = (adapter.state_dict()["tensors"] for adapter in (plain, still))
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_what_a_batch_left_behind_is_not_written_by_the_next(device: str) -> None:
    _, fast = pair("poem", "bn", device)
    first, second, third = stream(device, 3)
    fast(first)
    answer, last, state = fast(second), fast.last, fast.state_dict()
    before = answer.clone(), last.entropy.first.clone(), last.loss, last.taught, copy.deepcopy(state)
    moving = dict(fast._state.moving)
    kept = {key: tensor.clone() for key, tensor in moving.items()}
    fast(third)
    assert torch.equal(answer, before[0])
    assert torch.equal(last.entropy.first, before[1])
    assert (last.loss, last.taught) == before[2:4]
    assert_same_state(state, before[4])
    assert all(torch.equal(moving[key], kept[key]) for key in kept)


def test_short_batches_other_sizes_and_frozen_calls_go_between(device: str) -> None:
    plain, fast = pair("deyo+poem", "bn", device)
    batches = stream(device)
    for batch in (batches[0], batches[1], batches[2][:3], batches[3], batches[4][:3], batches[5]):
        assert_near([fast(batch)], [plain(batch)], device)
        with plain.frozen(), fast.frozen():
            before = fast.state_dict()
            assert_near([fast(batch)], [plain(batch)], device)
            assert_same_state(fast.state_dict(), before)
    assert len(fast._captures._loops) == 4  # two sizes, each learning and frozen
    assert plain.totals == fast.totals


def test_reset_and_a_loaded_state_reach_the_recording(device: str) -> None:
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


def test_another_batch_size_after_a_reset_is_another_recording(device: str) -> None:
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


def test_importance_measured_later_reaches_the_recording(device: str) -> None:
    plain, fast = pair("eata", "bn", device, source_data=None)
    batches = stream(device)
    for adapter in (plain, fast):
        for batch in batches[:3]:
            adapter(batch)
        adapter.prepare([batches[0]])
    assert_near([fast(batch) for batch in batches[3:]], [plain(batch) for batch in batches[3:]], device)
    assert recorded(fast)


def test_the_callers_autocast_and_switches_are_part_of_a_recording(device: str) -> None:
    plain, fast = pair("tent", "bn", device)
    for count, batch in enumerate(stream(device, 8)):
        with torch.autocast(device, torch.bfloat16, enabled=count % 2 == 0):
            assert_near([fast(batch)], [plain(batch)], device)
    assert len(fast._captures._loops) == 2
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = not before
    try:
        fast(batch)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert len(fast._captures._loops) == 3


def test_unloading_gives_the_recordings_back(device: str) -> None:
    _, fast = pair("tent", "bn", device)
    for batch in stream(device, 3):
        fast(batch)
    assert fast._captures._loops
    fast.unload()
    assert not fast._captures._loops


def test_a_part_that_reads_inside_another_is_found() -> None:
    assert not (EntropyBelow(0.4) & PLPDAbove(0.2)).on_host
    assert (EntropyBelow(0.4) & Rolls()).on_host
    assert poem.recipe("lame").on_host is not None
    assert poem.recipe("poem").on_host is None


def test_an_answer_is_the_callers_to_write_into(device: str) -> None:
    for adapter in pair("tent", "bn", device):
        for batch in stream(device, 3):
            answer = adapter(batch)
            kept = adapter.last.first_logits.clone()
            answer.fill_(0)
            assert torch.equal(adapter.last.first_logits, kept)


def test_broken_images_leave_no_trace(device: str) -> None:
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
    # Recordings read the model's memory: values written there count at once, other memory is recorded anew.
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


def test_auto_waits_for_a_shape_that_keeps_coming(device: str) -> None:
    case = Case("tent", "bn")
    adapter = case.adapter(case.net().to(device), fast="auto")
    for count, batch in enumerate(stream(device, poem.accelerate.capture.EAGER_FIRST + 2), 1):
        adapter(batch)
        assert bool(adapter._captures._loops) == (count > poem.accelerate.capture.EAGER_FIRST)


def test_shapes_that_are_not_used_go_first(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poem.accelerate.capture, "SHAPES", 2)
    _, fast = pair("tent", "bn", device)
    batch = stream(device, 1)[0]
    for size in (8, 8, 7, 6, 5):
        fast(batch[:size])
    assert [key[0][0] for key in fast._captures._loops] == [6, 5]


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
    """Whoever is not black."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among & (outputs.batch.images.mean((1, 2, 3)) > 0.1)


@dataclass(frozen=True, repr=False)
class Rolls(Select):
    """Says that it cannot be recorded."""

    @property
    def on_host(self) -> bool:
        return True

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
     ({"recover": Rolling()}, "draws chance outside Batch.once")],
)  # fmt: skip
def test_what_cannot_be_recorded_runs_plainly_and_says_why(
    changes: dict[str, Any], reason: str, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = pair("tent", "bn", device, **changes)
    batches = stream(device, 4)
    assert_near([fast(batch) for batch in batches], [plain(batch) for batch in batches], device)
    assert reason in fast.last.notes[-1]
    assert sum("runs eagerly" in message for message in caplog.messages) == 1
    good, _ = pair("poem", "bn", device)  # and the next one is recorded as if nothing had been
    healthy = Case("poem", "bn").adapter(Case("poem", "bn").net().to(device), fast=True)
    assert_near([healthy(batch) for batch in batches], [good(batch) for batch in batches], device)
    assert recorded(healthy)


@pytest.mark.parametrize("method", ["memo", "cotta", "lame"])
def test_methods_that_decide_on_the_host_say_so(method: str, device: str) -> None:
    _, fast = pair(method, "bn", device)
    fast(stream(device, 1)[0][:2])
    assert "on the host" in fast.last.notes[-1]


def test_hooks_are_not_silenced(device: str) -> None:
    case, heard = Case("tent", "bn"), list[int]()
    net: Any = case.net().to(device)
    adapter = case.adapter(net, fast=True)
    batches = stream(device, 3)
    adapter(batches[0])
    adapter(batches[1])
    assert recorded(adapter)
    net.fc.register_forward_hook(lambda *_: heard.append(1))
    adapter(batches[2])
    assert heard
    assert "hooks" in adapter.last.notes[-1]


def test_on_a_cpu_only_those_who_ask_are_told(caplog: pytest.LogCaptureFixture) -> None:
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
def test_the_host_waits_once_per_round(method: str, rounds: int) -> None:
    _, fast = pair(method, "bn", "cuda")
    for number, batch in enumerate(stream("cuda")):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn" if number > 1 else "default")
            fast(batch)
            torch.cuda.set_sync_debug_mode("default")
        assert sum("synchroniz" in str(each.message) for each in heard) <= rounds


# Less work -----------------------------------------------------------------------------------------------------------


def test_layers_below_all_that_moves_run_once_per_batch() -> None:
    ran: list[str] = []
    net = make_net("bn", sharpness=10.0)
    adapter = poem.adapt(net, "poem", lr=0.02, fast=False)
    batches = stream("cpu", 3)
    adapter(batches[0])
    for name in ("conv1", "layer1.0.conv1"):
        module: Any = net.get_submodule(name)
        module._conv_forward = _counted(module._conv_forward, name, ran)
    adapter(batches[1])  # the model was changed: which layers may be cached is seen anew
    ran.clear()
    adapter(batches[2])
    looks = adapter.last.rounds + 1
    assert looks > 1
    assert ran.count("conv1") == 1
    assert ran.count("layer1.0.conv1") == looks


def _counted(call: Any, name: str, ran: list[str]) -> Any:
    def counted(*args: Any) -> Any:
        ran.append(name)
        return call(*args)

    return counted


class InPlace(nn.Module):
    """Writes into what its first layer said."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("gn", sharpness=6.0)

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.net
        x = torch.relu(net.norm1(net.conv1(x).relu_().mul_(0.5)))
        logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
        return logits


def test_a_layer_whose_answer_is_written_into_is_asked_again() -> None:
    adapters = [poem.adapt(InPlace(), "poem", lr=0.02, threshold=0.6, fast=False) for _ in range(2)]
    adapters[1]._acceleration.prefix_cache._modules = []  # never
    batches = stream("cpu", 4)
    assert_same_answers(*[[adapter(batch) for batch in batches] for adapter in adapters])
    assert adapters[0].totals.updates > 0


def test_a_layer_that_runs_twice_is_asked_twice() -> None:
    class Twice(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            net: Any = self.net
            x = torch.relu(net.norm1(net.conv1(x) + net.conv1(x.flip(-1) ** 2)))
            logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
            return logits

    adapters = [poem.adapt(Twice(), "poem", lr=0.02, threshold=0.6, fast=False) for _ in range(2)]
    adapters[1]._acceleration.prefix_cache._modules = []
    assert_same_answers(*[[adapter(batch) for batch in stream("cpu", 3)] for adapter in adapters])
    assert adapters[0].totals.updates > 0


def test_a_forward_that_the_user_set_is_left_alone() -> None:
    net: Any = make_net("gn", sharpness=6.0)
    adapter = poem.adapt(net, "poem", lr=0.02, threshold=0.6, fast=False)
    first, second = stream("cpu", 2)
    adapter(first)
    mine = net.conv1.forward = lambda x: type(net.conv1).forward(net.conv1, x)
    adapter(second)
    assert net.conv1.forward is mine


def test_a_sparse_buffer_is_no_trouble(device: str) -> None:
    case = Case("tent", "bn")
    net = case.net().to(device)
    net.register_buffer("graph", torch.eye(3, device=device).to_sparse())
    adapter = case.adapter(net, fast=True)
    for batch in stream(device, 3):
        assert adapter(batch).isfinite().all()
    assert recorded(adapter)


def test_averages_over_the_stream_see_every_look() -> None:
    adapters = [poem.adapt(make_net("bn", sharpness=10.0), "poem", lr=0.02, statistics=RunningMean(0.3)) for _ in "ab"]
    adapters[1]._acceleration.prefix_cache._modules = []
    assert_same_answers(*[[adapter(batch) for batch in stream("cpu", 3)] for adapter in adapters])


@pytest.mark.parametrize("method", ["poem", "deyo+poem", "eata", "tent-filtered*"])
@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_a_few_who_teach_go_back_alone(method: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, adapters = Case(method, kind), []
    for few in (torch.inf, 1.0):  # never, always
        monkeypatch.setattr(poem.accelerate.selected_rows, "BACKWARD_RATIO", few)
        adapters.append(case.adapter(fast=False))
        for batch in stream("cpu", 4):
            answer = adapters[-1](batch)
    whole, apart = (adapter.totals for adapter in adapters)
    torch.testing.assert_close(adapters[0](batch), answer := adapters[1](batch), atol=1e-4, rtol=1e-4)
    assert answer.isfinite().all()
    assert whole.backwards_computed == 8 * whole.rounds >= apart.backwards_computed == apart.backwards > 0
    assert (whole.taught, whole.forwards, whole.updates) == (apart.taught, apart.forwards, apart.updates)


class Centred(nn.Module):
    """Takes the batch's mean away: samples meet."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("gn", sharpness=6.0)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x - x.mean(0))
        return logits


def untracked() -> nn.Module:
    """Batch norm that never kept statistics, and so takes the batch's whatever it is told."""
    net = make_net("bn", sharpness=10.0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return net


@pytest.mark.parametrize(("make", "statistics"), [(Centred, FromBatch()), (untracked, Source())])
def test_where_samples_meet_nobody_goes_back_alone(make: Any, statistics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for few in (torch.inf, 1.0):
        monkeypatch.setattr(poem.accelerate.selected_rows, "BACKWARD_RATIO", few)
        adapter = poem.adapt(make(), "poem", lr=0.02, threshold=0.6, fast=False, statistics=statistics)
        answers.append([adapter(batch) for batch in stream("cpu", 3)])
        assert adapter.totals.updates > 0
    assert_same_answers(*answers)


def test_batch_norm_keeps_its_batch_whole() -> None:
    adapter = Case("poem", "bn").adapter(fast=False, threshold=0.2)
    for batch in stream("cpu", 4):
        adapter(batch)
    assert 0 < adapter.totals.taught < 0.4 * adapter.totals.backwards_computed
    assert adapter.totals.backwards_computed == 8 * adapter.totals.rounds


def test_looks_do_not_outlive_their_batch() -> None:
    import gc
    import weakref

    from poem.engine.looking import Looking

    seen: list[Any] = []
    plain = Looking.__call__

    def look(self: Looking, *args: Any, **kwargs: Any) -> Outputs:
        made = plain(self, *args, **kwargs)
        seen.append(weakref.ref(made))
        return made

    adapter = Case("poem", "bn").adapter(fast=False)
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Looking, "__call__", outputs)
            adapter(stream("cpu", 1)[0])
        assert len(seen) > 1
        assert not any(ref() is not None for ref in seen)
    finally:
        gc.enable()


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_half_precision_is_recorded_as_it_runs(method: str, device: str) -> None:
    # On a GPU this is batch norm by our own kernels, in the plain loop and in the recording.
    plain, fast = pair(method, "bn", device, precision="bf16")
    for batch in stream(device):
        assert_near([fast(batch)], [plain(batch)], device)
    assert recorded(fast)
    assert plain.totals == fast.totals


def test_half_precision_casts_frozen_weights_once_and_follows_them() -> None:
    net: Any = make_net("bn", sharpness=10.0)
    adapter = poem.adapt(net, "poem", lr=0.02, precision="bf16", fast=False)
    batches = stream("cpu", 2)
    adapter(batches[0])
    casts = adapter._acceleration.weight_casts
    assert casts is not None
    copies = {id(swap[2]) for swap in casts.swaps}
    assert {name for _, name, _ in casts.swaps} == {"weight", "bias"}  # of the head; norm layers keep single precision
    assert all(swap[2].dtype == torch.bfloat16 for swap in casts.swaps)
    net.fc.weight.data.mul_(0.25)  # which leaves no trace in the tensor's version
    adapter.reset()
    fresh = poem.adapt(copy.deepcopy(net), "poem", lr=0.02, precision="bf16", fast=False)
    assert_same_answers([adapter(batch) for batch in batches], [fresh(batch) for batch in batches])
    assert {id(swap[2]) for swap in casts.swaps} == copies
    seen: list[torch.dtype] = []
    inner = net.conv1._conv_forward

    def watched(x: Tensor, weight: Tensor, bias: Any) -> Any:
        seen.append(weight.dtype)
        return inner(x, weight, bias)

    net.conv1._conv_forward = watched
    adapter(batches[0])
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.rand_like(layer.weight))),
        lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),  # same place, same shape
    ],
    ids=["another weight", "another way to read it"],
)
def test_copies_of_weights_follow_what_stands_in_the_layer(change: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                        nn.Linear(8, 8), nn.Linear(8, 5)).eval()  # fmt: skip
    adapter = poem.adapt(net, "bn", precision="bf16", fast=False)
    batch = stream("cpu", 1)[0]
    before = adapter(batch)
    change(net[4])
    fresh = poem.adapt(copy.deepcopy(net), "bn", precision="bf16", fast=False)
    assert torch.equal(adapter(batch), fresh(batch))
    assert not torch.equal(adapter(batch), before)


def test_unloading_lets_go_of_copied_weights() -> None:
    adapter = poem.adapt(make_net("bn"), "tent", precision="bf16")
    adapter(stream("cpu", 1)[0])
    casts = adapter._acceleration.weight_casts
    assert casts is not None
    assert casts.swaps
    adapter.unload()
    assert not any((casts.swaps, casts._own, casts._copies))


def test_a_recording_knows_what_stands_where(device: str) -> None:
    # A tensor that moves to a place where there was none, or is read otherwise at the same address, is another model.
    net: Any = make_net("bn").to(device)
    adapter = poem.adapt(net, "tent", fast=True)
    known = {adapter._network.capture_key()}
    net.register_buffer("one", torch.rand(4, 4, device=device))
    net.register_buffer("two", None)
    known.add(adapter._network.capture_key())
    net.one, net.two = None, net.one
    known.add(adapter._network.capture_key())
    net.two.data = net.two.data.t()
    known.add(adapter._network.capture_key())
    net._buffers = dict(net._buffers, two=torch.rand(4, 4, device=device))
    known.add(adapter._network.capture_key())
    net.register_buffer("graph", torch.eye(3, device=device).to_sparse())
    known.add(adapter._network.capture_key())
    kept, net.fc.weight.data = net.fc.weight.data, net.fc.weight.data.clone()  # seen beside a sparse one too
    known.add(adapter._network.capture_key())
    assert len(known) == 7
    assert kept is not None


def test_weights_that_move_are_not_cast() -> None:
    adapter = poem.adapt(make_net("ln"), "memo", precision="bf16", mean=(0, 0, 0), std=(1, 1, 1))
    assert adapter._acceleration.weight_casts is not None
    adapter._network.autocast.note("cpu")
    assert adapter._acceleration.weight_casts.swaps == []  # everything moves


def test_the_branchs_own_lesson_goes_back_as_far_as_the_split() -> None:
    net: Any = make_net("bn", sharpness=10.0)
    passed: list[str] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(lambda _: passed.append(name))

        return hook

    net.layer3.register_forward_hook(watch("shallow"))
    net.layer4.register_forward_hook(watch("deep"))
    adapter = poem.adapt(net, "poem", lr=0.02, rounds=1, fast=False, select=Everyone())
    first, second = stream("cpu", 2)
    adapter(first)
    passed.clear()  # the first time the branch's lesson is tried both ways
    adapter(second)
    assert adapter.last.updates == 1
    assert sorted(passed) == ["deep", "deep", "shallow"]  # two lessons, of which one goes all the way


class TokensFirst(nn.Module):
    """A block whose norm layer sees (batch, tokens, width) and whose linear layer (tokens, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + torch.tanh(self.mix(self.norm(tokens).transpose(0, 1)).transpose(0, 1))


class Tokens(nn.Module):
    """Four such blocks: no half of a linear layer's rows is a head's; with a class token there are no halves."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.more = more
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(*[TokensFirst() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = self.blocks(torch.cat([tokens[:, : self.more], tokens], dim=1))
        logits: Tensor = 20 * self.head(self.norm(tokens).mean(1))
        return logits


@pytest.mark.parametrize(
    ("make", "right"), [(Tokens, False), (lambda: Tokens(1), False), (lambda: make_net("ln", sharpness=9.0), True)]
)
def test_half_a_way_back_is_tried_before_it_is_trusted(make: Any, right: bool) -> None:
    half, whole = (
        poem.adapt(make(), "poem", fast=False, lr=0.02, select=Everyone(), split="blocks.3") for _ in range(2)
    )
    whole._acceleration.branch_backward.right = False
    assert half._acceleration.branch_backward.layers
    batches = stream("cpu", 4)
    for batch in batches:
        torch.testing.assert_close(half(batch), whole(batch), atol=1e-4, rtol=0)
    assert half._network.doubles
    assert half._acceleration.branch_backward.right is right
    assert half.totals.updates > 0


def test_a_gradient_of_nothing_proves_nothing() -> None:
    halves = poem.adapt(make_net("bn"), "poem")._acceleration.branch_backward
    halves.gradient(lambda: torch.zeros(3), 1e-3)
    assert halves.untried
    halves.gradient(lambda: torch.ones(3), 1e-3)
    assert halves.right


def test_a_lesson_of_nobody_proves_nothing(device: str) -> None:
    # Two batches that teach nobody come first: the way back of nothing must not be taken for a proof.
    plain, fast = (
        poem.adapt(Tokens().to(device), "poem", fast=fast, lr=0.02, select=Bright(), split="blocks.3")
        for fast in (False, True)
    )
    plain._acceleration.branch_backward.right = False
    for batch in [torch.zeros(8, 3, 16, 16, device=device)] * 3:
        assert_near([fast(batch)], [plain(batch)], device)
    assert fast.totals.taught == 0
    assert fast.last.notes[-1].startswith("not captured yet")
    for batch in stream(device):
        torch.testing.assert_close(fast(batch), plain(batch), atol=1e-4, rtol=0)
    assert fast.totals.updates > 0
    assert fast._acceleration.branch_backward.right is False
    assert recorded(fast)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kind"), [("tent", "bn"), ("poem", "bn"), ("poem", "ln")])
def test_a_compiled_network_says_the_same(method: str, kind: str) -> None:
    case = Case(method, kind)
    plain, compiled = case.adapter(fast=False), case.adapter(fast=False, compile=True)
    for batch in stream("cpu", 3):
        torch.testing.assert_close(compiled(batch), plain(batch), atol=1e-3, rtol=0)
    assert plain.totals.taught == compiled.totals.taught > 0
    heard: list[int] = []
    compiled.model.register_forward_hook(lambda *_: heard.append(1))
    compiled(batch)
    assert heard
    assert "not compiled" in compiled.last.notes[-1]


@dataclass(frozen=True, repr=False)
class FromLayer3(Parameters):
    """The norm layers of the third stage alone."""

    def __call__(self, model: nn.Module, facts: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if name.startswith("layer3") and "norm" in name]


def test_the_higher_a_recipe_begins_the_more_is_kept() -> None:
    net = make_net("bn", sharpness=10.0)
    adapter = poem.adapt(net, "poem", lr=0.02, parameters=FromLayer3(), select=Everyone())
    adapter(stream("cpu", 1)[0])
    kept = set(adapter._acceleration.prefix_cache._modules or [])
    names = {name for name, module in adapter._network.twin.root.named_modules() if module in kept}
    assert {"layer1", "layer2"} <= names
    assert not any(name.startswith(("layer4", "fc")) for name in names)


def assert_near(some: list[Tensor], others: list[Tensor], device: str) -> None:
    """To the bit on tapes, within rounding on a GPU."""
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, atol=0 if device == "cpu" else 1e-5, rtol=0)
