"""Ranges of operations in a trace, which exist while a profiler runs."""

import pytest

pytestmark = pytest.mark.needs_torch


def test_operations_have_ranges_under_a_profiler_only():
    from torch.profiler import ProfilerActivity, profile

    from pipeproof.exec.rank.torch.op_timing import op_range

    with op_range("0F0"):
        pass
    with profile(activities=[ProfilerActivity.CPU]) as profiler, op_range("1B2"):
        pass
    names = {event.name for event in profiler.events()}
    assert "pipeproof:1B2" in names
    assert "pipeproof:0F0" not in names
