"""Ranges of operations in a trace, which exist while a profiler runs."""

import pytest

pytestmark = pytest.mark.needs_torch


def test_operations_have_ranges_under_a_profiler_only():
    from torch.profiler import ProfilerActivity, profile

    from pipeproof.exec.rank.torch.op_timing import op_ranges

    assert op_ranges() is None
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        made = op_ranges()
        assert made is not None
        with made("1B2"):
            pass
    names = {event.name for event in profiler.events()}
    assert "pipeproof:1B2" in names
