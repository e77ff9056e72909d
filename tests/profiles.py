"""Profiles without processes: the log that a run would leave if it took exactly the simulated times."""

import json
from functools import cache

from pipeproof.exec.compare.compare_log import expected_facts
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.sim.simulate import simulate
from tests.plans import plan_file
from tests.plans import subject as subject_of

COST = {"forward_us": [110, 130], "backward_us": [210, 190], "p2p_latency_us": 7, "p2p": "rendezvous"}
"""Different for each stage, in whole microseconds."""
DIGEST = 64 * "0"


def logs_of(subject, *, num_steps=3):
    """By rank, the log of each step of a lowered plan's simulation; transfers are posted when they start."""
    timeline = simulate(subject.plan).timeline
    ends = {(span.rank, span.op): (timeline.us(span.start), timeline.us(span.end)) for span in timeline.spans}
    length = 1000 * (int(timeline.makespan_us) + 1000)
    logs = {}
    for rank in range(subject.graph.num_ranks):
        logs[rank] = []
        for step in range(num_steps):
            for queue, facts in expected_facts(subject.graph, rank, subject.plan.spec.run.dtype).items():
                for op, ranks, numel, dtype in facts:
                    start, end = (int(1000 * us) + step * length for us in ends[rank, op])
                    logs[rank].append(LogEntry(step, queue, op, start, end, ranks, numel, dtype, start))
    return logs


def bare_of(subject):
    """By channel, a bare message of 64 and one of 4096 bytes, in 5 and 9 microseconds."""
    return {str(channel): {64: (5.0,), 4096: (9.0,)} for channel in subject.graph.channels}


def profile_of(subject, **options):
    return measured_profile(subject, DIGEST, logs_of(subject, **options), bare_of(subject), 1)


def profile_text(**sections):
    """The file of such a profile of the base plan with other sections."""
    return json.dumps(profile_of(subject_of(cost=COST, **sections)).to_json(), indent=2)


@cache
def profile_files():
    """Files that examples name: a profile of the base plan, whole and cut short."""
    text = profile_text()
    return {"profiles/measured.json": text, "profiles/cut_short.json": text[: len(text) // 2]}


def plan_with_profile(folder, name="profile.json", *, profile=None, **sections):
    """A plan file in ``folder`` whose times come from a profile next to it."""
    cost = {"profile": name, "p2p": COST["p2p"]}
    if profile is not None:
        (folder / name).write_text(profile)
    return plan_file(folder / "plan.json", **{"cost": cost, **sections})
