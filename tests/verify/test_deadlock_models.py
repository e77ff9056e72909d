"""The table of channel models, and how cycles are drawn and named."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import get_args

import pytest

from pipeproof.comm.backend_rows import Queue
from pipeproof.comm.backends import backend_table
from pipeproof.comm.channel_models import MODELS, QUEUES, ChannelModel, declared_model, message_bytes
from pipeproof.comm.generated_schedule import sample_plan
from pipeproof.diagnostics.finding import CycleWitness, Finding, OpsWitness, ProgramExcerpt, Severity, WitnessOp
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.diagnostics.text_output import cycle_drawing
from pipeproof.schedule.formats.read_schedule import read_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.verify.deadlock.deadlock_rules import chain_text, cycle_witness, models_text, ranks_text
from pipeproof.verify.deadlock.deadlock_verdict import DeadlockChecker, cycle_of, deadlocks
from pipeproof.verify.schedule_verdict import Outcome, check_schedule
from tests.plans import subject
from tests.verify.programs import program, tensor

FILES = Path(__file__).parents[1] / "schedule" / "files"


def test_the_table_holds_every_queue_with_every_completion_strictest_first():
    assert set(QUEUES) == set(get_args(Queue))
    assert {(m.queue, m.completes) for m in MODELS} == set(product(QUEUES, ("rendezvous", "slots", "eager")))
    for place, model in enumerate(MODELS):
        assert not any(later.covers(model) for later in MODELS[place + 1 :])
    assert all(MODELS[0].covers(model) for model in MODELS)
    room = {"rendezvous": (0, None), "slots": (1, None), "eager": (0, 4 * 2**20)}  # the last is NCCL's default
    assert {(m.completes, (m.slots, m.eager_bytes)) for m in MODELS} == set(room.items())
    assert not any(m.host_blocks or m.connections == "lazy" for m in MODELS)


def test_what_covers_what():
    assert all(model.covers(model) for model in MODELS)
    rank = ChannelModel("rank")
    assert rank.covers(ChannelModel("pair"))
    assert not ChannelModel("pair").covers(ChannelModel("direction"))
    assert ChannelModel("pair", "slots", slots=1).covers(ChannelModel("pair", "slots", slots=2))
    assert not ChannelModel("pair", "slots", slots=2).covers(ChannelModel("pair", "slots", slots=1))
    assert not ChannelModel("pair", "slots", slots=1).covers(ChannelModel("pair", "eager", eager_bytes=8))
    assert ChannelModel("pair", "slots", slots=1).covers(ChannelModel("pair", "eager"))
    assert ChannelModel("pair", "eager", eager_bytes=8).covers(ChannelModel("pair", "eager", eager_bytes=9))
    assert not ChannelModel("pair", "eager").covers(ChannelModel("pair", "eager", eager_bytes=9))
    assert ChannelModel("rank", connections="lazy").covers(rank)
    assert not rank.covers(ChannelModel("rank", connections="lazy"))
    assert ChannelModel("rank", host_blocks=True).covers(rank)
    assert not rank.covers(ChannelModel("rank", host_blocks=True))


def test_the_declared_model_is_the_backends_table():
    assert declared_model(backend_table("paddle", "cpu")) == ChannelModel("directed_edge", "rendezvous")
    assert declared_model(backend_table("paddle", "cpu"), "lazy").connections == "lazy"
    buffered = replace(backend_table("paddle", "cpu"), send_completes="slots", host_blocks_on_post=True)
    assert declared_model(buffered) == ChannelModel("directed_edge", "slots", slots=1, host_blocks=True)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (ChannelModel("rank"), "one FIFO per rank at rendezvous"),
        (ChannelModel("directed_edge", "slots", slots=2), "one FIFO per directed edge with 2 slots"),
        (ChannelModel("pair", "eager"), "one FIFO per pair eager"),
        (
            ChannelModel("pair", "eager", eager_bytes=2**20, connections="lazy", host_blocks=True),
            "one FIFO per pair eager up to 1 MiB, connections opened at first use, posts hold the host",
        ),
    ],
)
def test_models_in_words(model, text):
    assert str(model) == text


def test_models_with_the_same_completions_are_named_together():
    failing = [
        ChannelModel("device"),
        ChannelModel("device", "slots", slots=1),
        ChannelModel("rank"),
        ChannelModel("rank", "slots", slots=1),
        ChannelModel("pair"),
    ]
    assert models_text(failing) == (
        "one FIFO per device or rank at rendezvous or with 1 slot; one FIFO per pair at rendezvous"
    )


def test_bytes_of_messages():
    graph = program(
        "0SEND_F0{peer=1 tensor=0 range=2..7} 0SEND_F1{peer=1 tensor=1 range=0..3} 0SEND_F2{peer=1} "
        "0SEND_F3{peer=1 range=0..8} 0SEND_F4{peer=1 tensor=2 range=1..8} 0SEND_F5{peer=1 tensor=3 range=0..8}",
        "",
        tensors=[tensor(dtype=dtype) for dtype in ("bfloat16", "float64", "bool", "int4")],
    ).graph
    assert message_bytes(graph).tolist() == [10, 24, 0, 0, 7, 8]  # what is smaller than a byte takes one


def test_a_large_graph_is_checked_and_its_short_cycle_found(monkeypatch):
    """The large paths (a first part, few rows for the witness) have the results of the small ones."""
    graph = subject(topology={"pp": 4}, schedule={"num_micro_batches": 16}).graph
    declared = ChannelModel("directed_edge")
    small = DeadlockChecker(graph).verdict(declared), cycle_of(graph, MODELS[0])
    monkeypatch.setattr("pipeproof.verify.deadlock.deadlock_verdict._SEARCHED_WHOLE", 32)
    assert DeadlockChecker(graph).verdict(declared) == small[0]
    assert not deadlocks(graph, declared)
    large = cycle_of(graph, MODELS[0])
    assert len(large) == len(small[1])
    assert large[0] < graph.num_ops


def ring(size):
    """Ranks in a ring, each of which sends to the next and waits before it receives from the one before."""
    return program(
        *(
            f"{r}SEND_F0{{peer={(r + 1) % size}}} WAIT({r}SEND_F0) {r}RECV_F0{{peer={(r - 1) % size}}} WAIT({r}RECV_F0)"
            for r in range(size)
        )
    )


def test_a_long_cycle_is_named_by_its_ends_and_drawn_in_part():
    one = ring(9)
    ops = cycle_of(one.graph, ChannelModel("directed_edge"))
    assert len(ops) == 27  # a send, its wait and a receive on each rank
    assert ranks_text(one, ops) == "9 ranks"
    text = chain_text(one, ops)
    assert text.count("waits for") == 6
    assert "... 22 more ..." in text
    drawn = list(cycle_drawing(cycle_witness(one, ops)))
    assert drawn[-1] == "and 3 more ranks"
    assert len(drawn) == 13


def test_a_cycle_is_reported_whole_up_to_six_operations_or_ranks():
    one = program(*(f"{r}F0 {r}F1" for r in range(8)))
    names = [f"{r}F0 (rank {r})" for r in range(8)]
    firsts = [one.graph.rank_ops(r)[0] for r in range(8)]
    assert chain_text(one, firsts[:6]) == " waits for ".join([*names[:6], names[0]])
    shortened = [*names[:3], "... 3 more ...", *names[6:], names[0]]
    assert chain_text(one, firsts) == " waits for ".join(shortened)
    assert ranks_text(one, firsts[:1]) == "rank 0"
    assert ranks_text(one, [*firsts[5::-1], 1]) == "ranks 0, 1, 2, 3, 4, 5"
    assert ranks_text(one, firsts[:7]) == "7 ranks"


def test_a_witness_shows_one_operation_on_either_side_and_gaps_of_up_to_two():
    one = program(" ".join(f"0F{k}" for k in range(10)), " ".join(f"1F{k}" for k in range(8)))
    first, second = one.graph.rank_ops(0), one.graph.rank_ops(1)
    witness = cycle_witness(one, [second[6], first[2], first[7], second[0]])
    assert [(op.rank, op.op) for op in witness.ops] == [(1, "1F6"), (0, "0F2"), (0, "0F7"), (1, "1F0")]
    assert witness.programs == (
        ProgramExcerpt(0, ("..", *(f"0F{k}" for k in range(1, 9)), ".."), (0, 0, 2, 0, 0, 0, 0, 3, 0, 0)),
        ProgramExcerpt(1, ("1F0", "1F1", "..", "1F5", "1F6", "1F7"), (4, 0, 0, 0, 1, 0)),
    )


def test_each_operation_of_the_witness_waits_for_the_next():
    one = ring(2)
    names = [(op.rank, op.op) for op in cycle_witness(one, cycle_of(one.graph, ChannelModel("pair"))).ops]
    for (rank, op), (next_rank, next_op) in pairwise([*names, names[0]]):
        same_rank = rank == next_rank
        meets = op.startswith(f"{rank}SEND") and next_op.startswith(f"{next_rank}RECV")
        assert same_rank or meets, (op, next_op)


def test_the_drawing_puts_numbers_below_operations_and_dots_for_what_is_left_out():
    witness = CycleWitness(
        (WitnessOp(0, "0SEND_F1"), WitnessOp(10, "1SEND_B0")),
        (
            ProgramExcerpt(0, ("..", "0F1", "0SEND_F1", "0RECV_B0"), (0, 0, 1, 0)),
            ProgramExcerpt(10, ("1SEND_B0", ".."), (2, 0)),
        ),
    )
    assert list(cycle_drawing(witness)) == [
        "rank 0:  .. 0F1 0SEND_F1 0RECV_B0",
        "                ^1",
        "rank 10: 1SEND_B0 ..",
        "         ^2",
    ]
    assert list(cycle_drawing(OpsWitness(()))) == list(cycle_drawing(CycleWitness(()))) == []


def verdict(kind, p=4, m=8, **options):
    return check_schedule(sample_plan(kind, p, m, num_chunks=SCHEDULE_KINDS[kind].min_chunks, **options))


def test_gpipe_is_robust():
    found = verdict("gpipe")
    assert (found.outcome, found.failing, found.errors) == (Outcome.ROBUST, (), ())
    assert found.reason == f"no deadlock under any of {len(MODELS)} channel models"


def test_1f1b_is_conditional_and_the_models_are_named():
    found = verdict("1f1b")
    assert found.outcome is Outcome.CONDITIONAL
    assert {model.queue for model in found.failing} == {"device", "rank", "pair"}
    assert f"deadlocks under {len(found.failing)} of {len(MODELS)} channel models: one FIFO per " in found.reason
    assert found.backend in found.reason


@pytest.mark.parametrize("kind", SCHEDULE_KINDS)
def test_every_kind_is_right_on_the_smallest_plan(kind):
    assert verdict(kind).errors == ()


def test_errors_outweigh_all_else():
    wrong = replace(
        verdict("1f1b"), errors=(Finding("PP401", Severity.ERROR, "m"), Finding("PP402", Severity.ERROR, "n"))
    )
    assert wrong.outcome is Outcome.WRONG
    assert wrong.reason == "PP401: m; PP402: n"


def test_the_sample_plan_has_a_layer_for_each_stage_and_unit_costs():
    spec = sample_plan("seq1f1b", 3, 2, num_sequence_splits=3, cost={"forward_us": "1/3"}, variant=None).spec
    assert spec.model.num_layers == 3
    assert spec.model.seq_length % 3 == 0
    assert (str(spec.cost.forward_us), spec.cost.backward_input_us, spec.cost.backward_weight_us) == ("1/3", 1, 1)
    assert spec.schedule.variant is None
    with pytest.raises(PlanFileError):
        sample_plan("1f1b", 0, 2)


@pytest.mark.parametrize("path", sorted(FILES.glob("*_comms.csv")), ids=lambda path: path.stem)
def test_transfers_in_pytorchs_order_are_robust(path):
    """Receives are in the order of their sends: no two transfers cross, under any model."""
    schedule = read_schedule(path.read_text(), str(path), Expected())
    num_ranks = len(schedule.rows)
    num_chunks = sum(map(len, schedule.placement)) // num_ranks
    plan = sample_plan("file", num_ranks, schedule.num_micro_batches, num_chunks=num_chunks, path=str(path))
    assert check_schedule(plan).outcome is Outcome.ROBUST
