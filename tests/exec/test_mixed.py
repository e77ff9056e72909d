"""Random mixtures of features on any ranks and schedule: every accepted plan has the bits of its reference."""

import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.features import FEATURES, TOPOLOGIES, merged, mixed

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

RANKS = {
    **TOPOLOGIES,
    "pp 3": {"pp": 3},
    "tp 2, SP, ep 2": {"pp": 1, "tp": 2, "sequence_parallel": True, "ep": 2},
    "tp 2, SP, cp 2": {"pp": 1, "tp": 2, "sequence_parallel": True, "cp": 2},
    "ep 2, dp 2": {"pp": 1, "ep": 2, "dp": 2},
    "cp 2, ep 2": {"pp": 1, "cp": 2, "ep": 2},
}
STEPS = {"run": {"steps": 2, "seed": 3}}


def runnable(plan):
    """The lowered plan, or None where a finding refuses it; anything else that is raised fails the test."""
    from pipeproof.exec.rank.executor_support import require_executable

    try:
        report = check(plan_from_dict(plan))
        require_executable(report.subject)
    except PipeproofError:
        return None
    return None if report.errors else report.subject.unfolded().plan


@st.composite
def mixtures(draw):
    """A plan with the drawn features that go together, in the order in which they were drawn."""
    topology, kind = (
        draw(st.sampled_from(list(RANKS))),
        draw(st.sampled_from([kind for kind in SCHEDULE_KINDS if kind not in {"file", "custom"}])),
    )
    data = merged(mixed([], kind=kind), {"topology": RANKS[topology], **STEPS})
    plan = runnable(data)
    assume(plan is not None)
    taken = []
    for name in draw(st.lists(st.sampled_from(list(FEATURES)), unique=True, max_size=7)):
        more = merged(data, FEATURES[name])
        if (lowered := runnable(more)) is not None:
            data, plan = more, lowered
            taken.append(name)
    note(f"{topology}; {kind}; {', '.join(taken)}")
    return plan


@pytest.mark.slow
@settings(max_examples=40, derandomize=True)
@given(plan=mixtures())
def test_mixtures_have_the_bits_of_their_reference(plan):
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    results = compared(plan)
    assert len(results) == 2
    assert all(result.bitwise for result in results)
    assert max(one.unpartitioned_max_rel_diff for one in results[0].gradients) <= parallel_bound(plan.spec)
