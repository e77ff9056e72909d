"""Runs of overlapped pairs that alternate: bits of the run without overlap, logs in the graph's order, failures."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest

from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.executor_support import require_executable, require_issuable
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import OpKind
from tests.plans import subject
from tests.verify.programs import codes, mutated
from tests.verify.test_part_order import segments_in_another_order

pytestmark = pytest.mark.needs_torch

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1}


def subject_of(overlap="pairs", *, pp=2, ep=2, moe=(), topology=(), schedule=(), run=(), model=(), cost=()):
    return subject(
        topology={"pp": pp, "ep": ep, **dict(topology)},
        schedule={"kind": "dualpipe_v", "num_chunks": 2, "num_micro_batches": 4, "overlap": overlap, **dict(schedule)},
        model={"num_layers": 4, "moe": {**MOE, **dict(moe)}, **dict(model)},
        run={"backend": "torch", "steps": 2, "optimizer": "adamw", **dict(run)},
        cost=dict(cost),
    )


def plan_of(*args, **changes):
    return subject_of(*args, **changes).plan.unfolded()


def require_equal(found, expected):
    """Assert that all losses and gradients of all steps and ranks have the same bits."""
    for of_step, expected_of_step in zip(found, expected, strict=True):
        for one, other in zip(of_step, expected_of_step, strict=True):
            assert np.array_equal(one.loss, other.loss)
            assert one.gradients.keys() == other.gradients.keys()
            assert [
                name for name, value in one.gradients.items() if not np.array_equal(value, other.gradients[name])
            ] == []
            assert one.routers.keys() == other.routers.keys()


PLANS = {
    "all-to-all": {},
    "all-gather": {"moe": {"dispatcher": "all_gather"}},
    "one pipeline rank": {"pp": 1, "moe": {"aux_loss": 0.1, "z_loss": 0.01, "expert_bias_rate": 0.01}},
    "bfloat16": {
        "pp": 1, "moe": {"dispatcher": "all_gather"}, "run": {"dtype": "bfloat16", "main_grad_dtype": "float32"},
    },
    "sequence parallel": {"pp": 1, "topology": {"tp": 2, "sequence_parallel": True}},
    "dense block": {"moe": {"dense_layers": 1}},
}  # fmt: skip


ORDERS = ["pairs", {"order": ["F", "B"]}, {"order": ["F", "W", "B"]}]


@pytest.mark.parametrize("overlap", ORDERS, ids=["pairs", "F, B", "F, W, B"])
@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_alternating_pairs_have_the_bits_of_whole_computations(changes, overlap):
    from tests.exec.in_memory import require_logged, run_all

    plan = plan_of(overlap, **changes)
    assert (plan.graph.part_before != NONE).any()
    outcomes, adapters = run_all(plan)
    require_logged(plan, adapters)
    require_equal(outcomes, run_all(plan_of("none", **changes))[0])
    assert not any(thread.name.startswith("alternation of") for thread in threading.enumerate())


def test_the_log_has_the_times_of_parts_and_of_collectives_that_run_next_to_them():
    from tests.exec.in_memory import run_all

    plan = plan_of(pp=1)
    _, adapters = run_all(plan)
    log = [entry for entry in adapters[0].log if entry.step == 0]
    by_text = {entry.op: entry for entry in log}
    dispatch, part = by_text["1F1/1.ALL_TO_ALL:ep"], by_text["1F1/2.PART"]
    assert dispatch.queue == "ep"
    assert part.queue == "compute"
    container = by_text["1F1"]
    between = [
        entry for entry in log if entry.op.startswith("0B0/") and dispatch.start_ns < entry.start_ns < part.start_ns
    ]
    assert between, "the backward ran while the dispatch was under way"
    assert all(entry.start_ns <= entry.end_ns for entry in log)
    assert container.start_ns == container.end_ns <= part.start_ns


def test_the_host_reads_sizes_while_the_other_side_computes(monkeypatch):
    from pipeproof.stages.torch.experts import HostCopy
    from tests.exec.in_memory import run_all

    plan = plan_of(pp=1)
    seen, rank_of, read = [[], []], {}, HostCopy.read

    def prepare(adapter, arrays, rank):
        def enter(step, op_id):
            rank_of[threading.get_ident()] = rank
            seen[rank].append(str(plan.graph.ops[op_id]))

        adapter._enter = enter

    def noted(copy):
        seen[rank_of[threading.get_ident()]].append("read")
        return read(copy)

    monkeypatch.setattr(HostCopy, "read", noted)
    run_all(plan, prepare=prepare)
    for of_rank in seen:
        place = of_rank.index("1F1/1.PART")
        assert of_rank[place : place + 5] == [
            "1F1/1.PART", "0B0/1.PART", "read", "1F1/1.ALL_TO_ALL:ep", "0B0/1.ALL_TO_ALL:ep",
        ]  # fmt: skip


class RecordedStream:
    """A side stream that notes the launches on it, and the launches of the other half meanwhile."""

    def __init__(self, seen):
        self.seen, self.kept = seen, []

    def follow(self):
        self.seen.append("follow")

    @contextmanager
    def launching(self):
        self.seen.append("side {")
        yield
        self.seen.append("}")

    def keep(self, tensor):
        self.kept.append(tensor.shape)


def test_counts_and_dispatch_are_on_the_side_stream_and_nothing_else(monkeypatch):
    from pipeproof.exec.rank.torch.framework import TorchFramework
    from pipeproof.stages.torch import experts
    from tests.exec.in_memory import run_all

    plan = plan_of(pp=1)
    streams = {}

    def stream_of(framework):  # the ranks of the test share a framework
        return streams.setdefault(threading.get_ident(), RecordedStream([]))

    class NotedCopy(experts.HostCopy):
        def __init__(self, tensor):
            stream = streams.get(threading.get_ident())
            if stream is not None:
                stream.seen.append("copy")
            super().__init__(tensor)

    def prepare(adapter, arrays, rank):
        def enter(step, op_id):
            pair = plan.graph.batch[plan.graph.parent[op_id]] if plan.graph.parent[op_id] != NONE else NONE
            if threading.get_ident() in streams and pair != NONE:
                streams[threading.get_ident()].seen.append(str(plan.graph.ops[op_id]))

        adapter._enter = enter

    monkeypatch.setattr(TorchFramework, "side_stream", property(stream_of))
    monkeypatch.setattr(experts, "HostCopy", NotedCopy)
    run_all(plan, prepare=prepare)
    assert len(streams) == plan.mesh.num_ranks
    for stream in streams.values():
        seen = stream.seen
        place = seen.index("1F1/1.PART")
        assert seen[place + 1 : place + 8] == ["follow", "side {", "copy", "}", "1F1/1.ALL_TO_ALL:ep", "side {", "}"]
        assert seen.count("follow") == len(stream.kept)
        assert seen.count("side {") == seen.count("}") == 2 * len(stream.kept)


def test_a_measured_timeline_has_computations_that_last_as_long_as_their_parts():
    from pipeproof.exec.launch.run_report import measured_timeline
    from tests.exec.in_memory import run_all

    of = subject_of(pp=1, run={"steps": 1})
    _, adapters = run_all(of.plan.unfolded())
    timeline = measured_timeline(of, {rank: adapter.log for rank, adapter in enumerate(adapters)})
    by_text = {span.op: span for span in timeline.spans if span.rank == 0}
    for computation in ("0B0", "1F1"):
        parts = [by_text[text] for text in by_text if text.startswith(f"{computation}/") and ":ep" not in text]
        assert by_text[computation].end == max(part.end for part in parts) > by_text[computation].start
    assert 0 < timeline.busy_us(0) <= timeline.makespan_us


def failing(plan, text):
    """Run a plan whose rank 0 fails at an operation."""
    from tests.exec import in_memory

    def prepare(adapter, arrays, rank):
        def enter(step, op_id):
            if rank == 0 and str(plan.graph.ops[op_id]) == text:
                raise ValueError(f"planted at {text}")

        adapter._enter = enter

    with pytest.raises(ValueError, match="planted") as raised:
        in_memory.run_all(plan, prepare=prepare)
    return raised.value


@pytest.mark.parametrize(
    "text",
    ["1F1/2.PART", "0B0/1.PART", "0B0/1.WEIGHTS", "1F1/1.ALL_TO_ALL:ep", "0B0/0.ALL_TO_ALL:ep", "0B0/1.ALL_TO_ALL:ep"],
)
def test_a_failure_of_either_side_is_raised_with_the_place_and_ends_both(text):
    error = failing(plan_of(pp=1), text)
    assert any("1F1" in note and "0B0" in note and text in note for note in error.__notes__)
    assert not any(thread.name.startswith("alternation of") for thread in threading.enumerate())


def test_another_order_on_one_rank_is_refused_and_does_not_run():
    from tests.exec.in_memory import run_all

    right = subject_of()
    wrong = mutated(right, segments_in_another_order)
    assert codes(wrong) == {"PP306"}
    with pytest.raises((AssertionError, RuntimeError)):  # members meet in different collectives
        run_all(wrong.plan)


def test_a_computation_with_other_collectives_than_its_rows_is_reported():
    from pipeproof.exec.rank.machine import ProtocolError
    from tests.exec.in_memory import run_all

    def without_the_last(ranks):
        for rank in (0, 1):
            rows = ranks[rank]
            del rows[next(i for i, row in enumerate(rows) if str(row.op) == "0F3/2.ALL_TO_ALL:ep")]

    with pytest.raises(ProtocolError, match=r"0F3 issues ALL_TO_ALL:ep, and the graph has 3B1/2.PART"):
        run_all(mutated(subject_of(), without_the_last).plan)


def test_paddle_and_rehearsals_are_refused():
    with pytest.raises(PipeproofError, match=r"PP909.*paddle"):
        require_executable(subject_of(run={"backend": "paddle"}))
    with pytest.raises(PipeproofError, match=r"PP909.*rehearsed"):
        require_issuable(subject_of())
    require_executable(subject_of())


def test_plans_without_overlap_have_no_parts():
    graph = lower(subject_of("none").plan.spec).graph
    assert not graph.is_kind(frozenset({OpKind.PART, OpKind.WEIGHTS})).any()
