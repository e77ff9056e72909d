"""Copies of activations to host memory and back: their races, their lifetimes, their price and the memory they save."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.diagnostics.finding import PipeproofError, Severity
from pipeproof.exec.rank.executor_support import require_executable, require_issuable
from pipeproof.schedule.formats.csv_file import csv_text
from pipeproof.schedule.formats.inexpressible import InexpressibleError
from pipeproof.schedule.formats.text_form import format_program
from pipeproof.schedule.ops import COPY_KINDS
from pipeproof.sim.fast_engine import run_fast
from pipeproof.sim.op_durations import copied_bytes, durations_of
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import simulate
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.memory_budget import in_flight
from tests.plans import subject
from tests.verify.programs import codes
from tests.zoo.programs import edited, program

ROUND_TRIPS = """
    rank 0: 0F0 WAIT(0F0){queue=offload} 0OFFLOAD0{queue=offload} 0F1 WAIT(0OFFLOAD0) FREE(0OFFLOAD0) \
            WAIT(0F1){queue=offload} 0OFFLOAD1{queue=offload} WAIT(0OFFLOAD1) FREE(0OFFLOAD1) \
            0RELOAD0{queue=offload} WAIT(0RELOAD0) 0RELOAD1{queue=offload} 0B0 WAIT(0RELOAD1) 0B1 0STEP
"""
"""Two micro-batches, with the second one's copy back behind the first one's backward."""

IN_NAMED_BUFFERS = edited(
    ROUND_TRIPS,
    *((f"{copy}{i}{{queue=offload", f"{copy}{i}{{queue=offload {uses}=host[{i}]")
      for i in (0, 1) for copy, uses in (("0OFFLOAD", "writes"), ("0RELOAD", "reads"))),
)  # fmt: skip

RELOAD, ITS_WAIT = "0RELOAD0{queue=offload} ", "WAIT(0RELOAD0) "


def warnings(one):
    return {finding.code for finding in check_subject(one).findings if finding.severity is Severity.WARNING}


@pytest.mark.parametrize(
    "right",
    [
        ROUND_TRIPS,
        IN_NAMED_BUFFERS,
        edited(ROUND_TRIPS, ("0B0", "0I0 0W0"), ("0B1", "0I1 0W1")),
        edited(ROUND_TRIPS, ("{queue=offload}", "")),
        edited(ROUND_TRIPS, (ITS_WAIT, f"{ITS_WAIT}FREE(0RELOAD0) ")),
        edited(ROUND_TRIPS, (RELOAD, "WAIT(0OFFLOAD0){queue=in} 0RELOAD0{queue=in} ")),
        "rank 0: 0F0.s0 0F0.s1 0OFFLOAD0.s0 FREE(0OFFLOAD0.s0) 0B0.s1 0RELOAD0.s0 0B0.s0 0STEP",
    ],
    ids=["side queue", "named buffers", "zero bubble", "one queue", "host freed", "two queues", "splits"],
)
def test_a_round_trip_is_accepted(right):
    assert codes(program(right)) == warnings(program(right)) == set()


@pytest.mark.parametrize(
    ("text", "changes", "found"),
    [
        (ROUND_TRIPS, [("WAIT(0F0){queue=offload} ", "")], {"PP507"}),
        (ROUND_TRIPS, [("WAIT(0OFFLOAD0) FREE(0OFFLOAD0)", "FREE(0OFFLOAD0) WAIT(0OFFLOAD0)")], {"PP503"}),
        (ROUND_TRIPS, [(ITS_WAIT, "")], {"PP507"}),
        (ROUND_TRIPS, [(RELOAD + ITS_WAIT, ""), ("0B0", f"0B0 {RELOAD}{ITS_WAIT}")], {"PP507"}),
        (ROUND_TRIPS, [(RELOAD, ""), ("WAIT(0F0)", f"{RELOAD}WAIT(0F0)")], {"PP506"}),
        (ROUND_TRIPS, [(RELOAD, "0RELOAD0{queue=in} ")], {"PP507"}),
        (ROUND_TRIPS, [(RELOAD + ITS_WAIT, "")], {"PP503"}),
        (ROUND_TRIPS, [("0OFFLOAD0{queue=offload} ", ""), ("WAIT(0OFFLOAD0) FREE(0OFFLOAD0) ", "")], {"PP515"}),
        (ROUND_TRIPS, [(ITS_WAIT, f"FREE(0RELOAD0) {ITS_WAIT}")], {"PP503"}),
        (IN_NAMED_BUFFERS, [("host[1]", "host[0]")], {"PP509"}),
        ("rank 0: 0OFFLOAD0 0F0 FREE(0OFFLOAD0) 0RELOAD0 0B0", [], {"PP506"}),
        ("rank 0: 0F0 FREE(0OFFLOAD0) 0OFFLOAD0 0RELOAD0 0B0", [], {"PP503"}),
        ("rank 0: 0F0 0OFFLOAD0 FREE(0OFFLOAD0) 0B0 0RELOAD0", [], {"PP506"}),
        ("rank 0: 0F0 0OFFLOAD1 0B0", [], {"PP515"}),
    ],
    ids=[
        "copied while it is computed", "freed while it is copied", "not waited for", "behind the backward",
        "before the offload", "another queue", "never reloaded", "never offloaded", "host memory freed too early",
        "one buffer for two", "before the forward", "freed first", "too late on one queue", "of another micro-batch",
    ],
)  # fmt: skip
def test_a_mistake_with_a_copy_is_found_by_its_rule(text, changes, found):
    assert codes(program(edited(text, *changes))) == found


def test_a_copy_that_frees_nothing_is_reported():
    kept = program(edited(ROUND_TRIPS, (" FREE(0OFFLOAD0)", "")))
    assert (codes(kept), warnings(kept)) == (set(), {"PP516"})


# --- any number of micro-batches, any of them offloaded ---


@st.composite
def round_trips(draw):
    """(rows of a rank's program, micro-batches that are offloaded, size of the pool of host buffers)."""
    num, ahead = draw(st.integers(1, 5)), draw(st.integers(0, 2))
    order = [*range(num)] if draw(st.booleans()) else [*reversed(range(num))]
    offloaded = draw(st.sets(st.integers(0, num - 1), min_size=1))
    reloads = [i for i in order if i in offloaded]
    pool = len(reloads)
    queue = "queue=offload"
    place = {i: k for k, i in enumerate(sorted(offloaded))}
    rows = []
    for i in range(num):
        rows.append(f"0F{i}")
        if i in offloaded:
            copy = f"0OFFLOAD{i}{{{queue} writes=host[{place[i]}]}}"
            rows += [f"WAIT(0F{i}){{{queue}}}", copy, f"WAIT(0OFFLOAD{i})", f"FREE(0OFFLOAD{i})"]
    issued = 0
    for i in order:
        if i in offloaded:
            wanted = min(pool, reloads.index(i) + 1 + ahead)
            rows += [f"0RELOAD{j}{{{queue} reads=host[{place[j]}]}}" for j in reloads[issued:wanted]]
            issued = max(issued, wanted)
            rows.append(f"WAIT(0RELOAD{i})")
        rows.append(f"0B{i}")
    return rows, sorted(offloaded), pool


def one_rank(rows):
    return program("rank 0: " + " ".join([*rows, "0STEP"]))


@given(round_trips(), st.data())
def test_each_row_of_a_round_trip_is_needed(drawn, data):
    """Without a wait there is a race, without a copy a read of missing data, without its own buffer a mix-up."""
    rows, offloaded, pool = drawn
    assert codes(one_rank(rows)) == set()
    i = data.draw(st.sampled_from(offloaded))
    left_out, found = data.draw(
        st.sampled_from(
            [
                ([f"WAIT(0F{i}){{"], {"PP507"}),
                ([f"WAIT(0OFFLOAD{i})"], {"PP503"}),
                ([f"WAIT(0RELOAD{i})"], {"PP507"}),
                ([f"0RELOAD{i}{{", f"WAIT(0RELOAD{i})"], {"PP503"}),
                ([f"0OFFLOAD{i}{{", f"WAIT(0OFFLOAD{i})", f"FREE(0OFFLOAD{i})"], {"PP515"}),
            ]
        )
    )
    mutant = [row for row in rows if not any(row.startswith(text) for text in left_out)]
    assert codes(one_rank(mutant)) == found
    if pool > 1:
        shared = [row.replace("host[1]", "host[0]") for row in rows]
        assert codes(one_rank(shared)) == {"PP509"}


# --- plans ---


def plan(tmp_path, rows, bandwidth=None, **sections):
    """A plan of one rank that runs these rows."""
    path = tmp_path / "program.txt"
    path.write_text(f"rank 0: {' '.join(rows)}\n")
    num = sum(row.startswith("0F") for row in rows)
    schedule = {"kind": "file", "path": str(path), "num_micro_batches": num}
    cost = {"forward_us": 10, "backward_us": 20, **({} if bandwidth is None else {"host_bandwidth": bandwidth})}
    return subject(topology={"pp": 1}, schedule=schedule, cost=cost, **sections)


def sequence(num, *, offload):
    """All forwards, then all backwards; with ``offload`` every micro-batch goes through host memory on one queue."""
    before = ["0F{}", "0OFFLOAD{}", "FREE(0OFFLOAD{})"] if offload else ["0F{}"]
    behind = ["0RELOAD{}", "0B{}"] if offload else ["0B{}"]
    return [text.format(i) for part in (before, behind) for i in range(num) for text in part]


def test_a_copy_takes_its_bytes_over_the_bandwidth_and_nothing_without_one(tmp_path):
    free, priced = (plan(tmp_path, sequence(3, offload=True), bandwidth) for bandwidth in (None, 0.5))
    copies = priced.graph.is_kind(COPY_KINDS).nonzero()[0]
    (num_bytes,) = set(copied_bytes(priced.plan, copies).tolist())
    assert simulate(free.plan).makespan == 3 * 30
    assert simulate(priced.plan).makespan == 3 * 30 + 6 * Fraction(num_bytes, 500)


def test_copies_on_a_side_queue_cost_what_nothing_hides(tmp_path):
    """The copies of all but the last offload and the first reload are as long as the computations next to them."""
    rows = []
    for i in range(4):
        rows += [f"0F{i}", f"WAIT(0F{i}){{queue=side}}", f"0OFFLOAD{i}{{queue=side}}"]
    for i in range(4):
        rows += [f"WAIT(0OFFLOAD{i})", f"FREE(0OFFLOAD{i})"]
    rows += ["0RELOAD0{queue=side}"]
    for i in range(4):
        rows += [f"WAIT(0RELOAD{i})", *([f"0RELOAD{i + 1}{{queue=side}}"] if i < 3 else []), f"0B{i}"]
    probe = plan(tmp_path, rows)
    (num_bytes,) = set(copied_bytes(probe.plan, probe.graph.is_kind(COPY_KINDS).nonzero()[0]).tolist())
    timed = plan(tmp_path, rows, num_bytes / 10_000)  # 10 us for each copy, as long as a forward
    assert codes(timed) == set()
    assert simulate(timed.plan).makespan == 4 * 30 + 2 * 10
    durations = durations_of(timed.plan)
    for completes in ("eager", "rendezvous"):
        model = ChannelModel("directed_edge", completes)
        assert run_fast(timed.graph, durations, model).outcome(timed.graph) == run_model(timed.graph, durations, model)


@given(round_trips())
def test_both_engines_agree_on_copies(tmp_path_factory, drawn):
    one = plan(tmp_path_factory.mktemp("copies"), drawn[0], 0.9)
    durations, model = durations_of(one.plan), ChannelModel("directed_edge", "eager")
    assert run_fast(one.graph, durations, model).outcome(one.graph) == run_model(one.graph, durations, model)


def test_offloaded_activations_leave_the_device(tmp_path):
    kept, offloaded = (plan(tmp_path, sequence(4, offload=offload), 1) for offload in (False, True))
    peaks = [simulate(one.plan).memory[0] for one in (kept, offloaded)]
    (num_bytes,) = set(copied_bytes(offloaded.plan, offloaded.graph.is_kind(COPY_KINDS).nonzero()[0]).tolist())
    assert peaks[0].peak - peaks[1].peak == 3 * num_bytes
    assert [in_flight(one)[0].peak_activations for one in (kept, offloaded)] == [4, 4]
    held_twice = plan(tmp_path, [row for row in sequence(4, offload=True) if "FREE" not in row], 1)
    assert simulate(held_twice.plan).memory[0].peak == peaks[0].peak + num_bytes


def test_a_budget_that_only_offloading_meets(tmp_path):
    budget = {"memory": {"budget_gib": 400 / 2**20}}
    assert codes(plan(tmp_path, sequence(4, offload=False), **budget)) == {"PP701"}
    assert codes(plan(tmp_path, sequence(4, offload=True), **budget)) == set()


def test_a_device_gives_the_bandwidth_unless_the_plan_does(tmp_path):
    rows = sequence(1, offload=True)
    path = tmp_path / "program.txt"
    path.write_text(f"rank 0: {' '.join(rows)}\n")
    schedule = {"kind": "file", "path": str(path), "num_micro_batches": 1}
    given_bandwidths = [
        subject(topology={"pp": 1}, schedule=schedule, cost={"analytic": "h200", **also}).plan.spec.cost.host_bandwidth
        for also in ({}, {"host_bandwidth": 20.0})
    ]
    assert given_bandwidths == [64 * 0.75, 20]


@pytest.mark.parametrize("require", [require_executable, require_issuable])
def test_a_run_copies_nothing_to_the_host(tmp_path, require):
    with pytest.raises(PipeproofError) as caught:
        require(plan(tmp_path, sequence(2, offload=True)))
    (found,) = caught.value.findings
    assert (found.code, "0OFFLOAD0" in found.message) == ("PP909", True)


def test_copies_have_a_text_form_and_no_form_in_pytorch_s_csv():
    graph = program(IN_NAMED_BUFFERS).graph
    assert program(format_program(graph)).graph.rows() == graph.rows()
    with pytest.raises(InexpressibleError):
        csv_text(graph.rows())
