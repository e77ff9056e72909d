"""As-soon-as-possible times of programs equal both engines' times of the lowered plan, operation by operation."""

from hypothesis import given, settings

from pipeproof.comm.lower import lower
from pipeproof.schedule.programs import asap
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from tests.schedule.drawn import generated, plan_of, requests


@given(requests(max_ranks=4, max_chunks=3))
@settings(deadline=None, max_examples=150)
def test_equal_on_both_engines(drawn):
    kind, request = drawn
    schedule = generated(kind, request)
    timed = asap(schedule, request.costs)
    lowered = lower(plan_from_dict(plan_of(kind, request)).spec)
    assert lowered.schedule == schedule
    for engine in ("fast", "simpy"):
        assert_equal(simulate(lowered, engine=engine), timed)


def assert_equal(simulation, timed):
    assert simulation.makespan == timed.makespan
    for rank, figures in enumerate(simulation.figures):
        spans = {span.op: (span.start, span.end) for span, _ in simulation.timeline.compute_spans(rank)}
        times = zip(timed.starts[rank], timed.ends[rank], strict=True)
        assert spans == dict(zip(map(str, timed.programs[rank]), times, strict=True))
        assert figures.busy_us == timed.busy(rank)
        assert figures.span_us == timed.span(rank)
        assert figures.peak_activations == timed.peak(rank)
