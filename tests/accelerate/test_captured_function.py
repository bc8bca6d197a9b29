"""A function of tensors that is captured gives what the function gives, and only where it can be captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tape
import torch
from torch import Tensor

from poem.accelerate.capture import EAGER_FIRST
from poem.accelerate.captured_function import CapturedFunction

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where functions are captured: on tapes, or as CUDA graphs."""
    if request.param == "cuda":
        yield "cuda"
        return
    with tape.installed():
        yield "cpu"


class Counted:
    """Sums and differences; counts how often Python called it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, one: Tensor, two: Tensor) -> list[Tensor]:
        self.calls += 1
        return [one + two, one - two, (one > two).any()]


def test_a_replay_gives_what_the_function_gives_in_memory_of_its_own(device: str) -> None:
    inner = Counted()
    function = CapturedFunction(inner, fast=True)
    pairs = [(torch.full((3,), float(n), device=device), torch.ones(3, device=device)) for n in range(4)]
    found = [function(*pair) for pair in pairs]
    assert inner.calls == 2  # once eagerly, once captured
    for (one, two), (total, difference, larger) in zip(pairs, found, strict=True):
        torch.testing.assert_close(total, one + two)
        torch.testing.assert_close(difference, one - two)
        assert bool(larger) == bool((one > two).any())


def test_tensors_that_are_led_to_other_memory_are_read_there(device: str) -> None:
    kept = torch.ones(3, device=device)

    def led(one: Tensor) -> list[Tensor]:
        return [sum(each.new_empty(0).set_(each) for each in (one * 2, kept))]  # type: ignore[list-item, call-overload]

    function = CapturedFunction(led, fast=True)
    assert [function(torch.full((3,), n, device=device))[0].tolist() for n in (1.0, 2.0, 4.0)] == [
        [3.0] * 3, [5.0] * 3, [9.0] * 3,
    ]  # fmt: skip
    assert kept.tolist() == [1.0] * 3


def test_each_set_of_shapes_is_captured_by_itself(device: str) -> None:
    inner = Counted()
    function = CapturedFunction(inner, fast=True)
    for rows in (2, 5, 2, 5):
        assert function(torch.ones(rows, device=device), torch.ones(rows, device=device))[0].tolist() == [2.0] * rows
    assert inner.calls == 4


def test_auto_waits_until_shapes_have_come_often_enough(device: str) -> None:
    inner = Counted()
    function = CapturedFunction(inner, fast="auto")
    one = torch.ones(2, device=device)
    for _ in range(EAGER_FIRST):
        function(one, one)
    assert inner.calls == EAGER_FIRST
    for _ in range(5):
        function(one, one)
    assert inner.calls == EAGER_FIRST + 2


def test_what_is_not_to_be_captured_runs_as_it_is(device: str) -> None:
    inner = Counted()
    function = CapturedFunction(inner, fast=False)
    for _ in range(5):
        function(torch.ones(2, device=device), torch.ones(2, device=device))
    assert inner.calls == 5


def test_a_function_that_the_host_reads_in_runs_as_it_is(device: str, caplog: pytest.LogCaptureFixture) -> None:
    def reads(one: Tensor) -> list[Tensor]:
        return [one * float(one.sum())]

    function = CapturedFunction(reads, fast=True)
    with caplog.at_level("WARNING", logger="poem"):
        found = [function(torch.full((2,), float(n), device=device))[0].tolist() for n in range(3)]
    assert found == [[0.0, 0.0], [2.0, 2.0], [8.0, 8.0]]
    assert caplog.text.count("not captured") == 1
