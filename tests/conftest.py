"""Settings of the whole suite, and the options under which the contract and the references run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

# Tiny nets: threads cost more than they bring, and workers share two cores.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before it is first imported

with suppress(ImportError):  # the tests of a release are run without it
    from hypothesis import settings

    settings.register_profile("poem", deadline=None)  # an example that takes long shows a busy machine, not a mistake
    settings.load_profile("poem")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `adapters.py` reads."""
    group = parser.getgroup("poem", "the contract and the references")
    group.addoption("--fast", action="store_true", help="their adapters capture their loops; on a CPU on tapes")
    group.addoption("--shard", default="0/1", help="run one test in n, the k-th: k/n, for several processes")
    group.addoption("--device", default="cpu", help="where their networks and images are: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    """Hands the options on, before tests are collected."""
    import adapters

    adapters.ASKED.fast, adapters.ASKED.device = config.getoption("--fast"), config.getoption("--device")
    if adapters.ASKED.device != "cpu":  # a pass's width decides the rounding of TF32, coarser than what tests allow
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False


SLOW = re.compile(
    r"test_every_layer_of_every_pass_is_ours\[ln-"
    r"|test_the_notebook_runs_and_holds_no_output"
    r"|test_tent_with_poem_runs_at_224_on_the_doubled_branch\[(tv:vit_b_16|vit_base_patch16_224)\]"
    r"|test_one_update_against_one_forward_in_a_process_of_its_own"
    r"|test_every_layer_of_every_pass_is_ours\[[gl]n-poem\]"
    r"|test_an_adapter_is_the_same_with_lazy_norm_layers\[(batch norm-auto|group norm-poem|group norm-auto)\]"
    r"|test_a_model_that_fails_the_trial_is_never_lazy\[writes, in copies\]"
    r"|test_networks_as_libraries_have_them\[torchvision's bottlenecks\]"
    r"|test_the_sources_statistics_have_kernels_of_their_own"
    r"|test_from_files_to_answers"
    r"|test_every_layer_of_every_pass_is_ours\[gn-tent\]"
    r"|test_sample_norms.py::test_an_adapter_on_kernels_is_as_near_to_full_precision"
    r"|test_blended.py::test_an_adapter_on_kernels_is_as_near_to_full_precision"
    r"|test_memory_stays_flat_over_fifty_thousand"
    r"|test_contract.py::.*clipped_methods:tent"
    r"|test_contract.py::.*\[(rpl|cmf|recap|protected|rem)(\+poem-ii?|\*)/"
    r"|test_report_shows_whole_suites_and_not_parts_of_others"
    r"|test_the_page_and_every_format_hold_them"
    r"|test_a_run_on_the_cpu_leaves_its_file"
    r"|test_train_source_digits_writes_weights_and_a_record"
    r"|test_corrupt.py::test_killed_and_resumed_equals_uninterrupted"
    r"|test_500_batches_with_rollbacks_and_resets_are_repeated_bit_for_bit"
    r"|test_the_branch_of_a_resnet50_costs_its_norm_parameters_only"
    r"|test_every_batch_agrees_with_the_reference\[memo[+*]"
    r"|test_contract.py::.*(\+poem-ii?|\*)/[gl]n\]"
    r"|test_every_batch_agrees_with_the_reference\[.*(\+poem-ii?|\*)-[gl]n\]"
    r"|test_methods_that_leave_images_alone_adapt_on_any_tensor\[.*(\+poem-ii?|\*)"
    r"|test_given_statistics_with_addition_and_relu\[dtype1-"
    r"|test_with_every_cell_of_the_plan_everything_is_answered_and_drawn"
    r"|test_contract.py::.*\[(memo|cotta)(\+poem-ii?|\*)/"
    r"|test_outputs_and_memory_are_those_of_the_part\[two-"
    r"|test_tent_with_poem_runs_at_224_on_the_doubled_branch\[(resnetv2_50d_gn|resnet50_gn|deit_tiny|swin_tiny|tv:densenet)"
    r"|test_guarded_streams_are_those_alone\[digits-(bn-tent|gn-poem)\]"
    r"|test_every_setting_is_repeated\[settings[0347]\]"
    r"|test_a_source_that_collapses_after_clear_images_is_not_believed\[tent"
    r"|test_no_prefix_of_the_stream_exceeds_the_budget\[(50|7)-0.(05|29)\]"
)
"""Tests that show on a slow case what others show on a quick one; `make test-all` runs them."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes this process's share; marks slow ones, before `-m "not slow"` is applied."""
    shard, of = map(int, config.getoption("--shard").split("/"))
    items[:] = items[shard::of]
    for item in items:
        if SLOW.search(item.nodeid):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def losses_are_known() -> None:
    """`poem.adapt` warns once in a process of methods that lost; no test's log depends on whether it was the first."""
    from poem.recipes import known_losses

    known_losses._told.update((name, kind) for name, each in known_losses.LOSSES.items() for kind in each)


@pytest.fixture(scope="module")
def as_asked() -> Iterator[None]:
    """Under `--fast`, what capturing needs."""
    import adapters

    if not adapters.ASKED.fast:
        yield
        return
    with adapters.capturing(adapters.ASKED.device):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The size of the contract, and how much of it this run checked."""
    kept = broken = 0
    for report in [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]:
        if report.nodeid.partition("test_contract.py::test_")[2][:2].isdigit():
            kept, broken = kept + report.passed, broken + report.failed
    if kept or broken:
        from test_contract import CASES, POINTS, ROWS

        size = f"{len(ROWS)} methods, {len(CASES)} with a net x {POINTS} points = {len(CASES) * POINTS}"
        terminalreporter.write_line(f"contract: {size}; in this run {kept} kept, {broken} broken")
