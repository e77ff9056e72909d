"""The table of channel models, and how cycles are drawn and named."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from pipeproof.comm.backend_rows import Queue
from pipeproof.comm.backends import backend_table
from pipeproof.comm.channel_models import MODELS, QUEUES, ChannelModel, declared_model, message_bytes
from pipeproof.comm.generated_schedule import sample_plan
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.formats.read_schedule import read_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.kinds import SCHEDULE_KINDS
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


def test_bytes_of_messages():
    graph = program(
        "0SEND_F0{peer=1 tensor=0 range=2..7} 0SEND_F1{peer=1 tensor=1 range=0..3} 0SEND_F2{peer=1} "
        "0SEND_F3{peer=1 range=0..8} 0SEND_F4{peer=1 tensor=2 range=1..8} 0SEND_F5{peer=1 tensor=3 range=0..8}",
        "",
        tensors=[tensor(dtype=dtype) for dtype in ("bfloat16", "float64", "bool", "int4")],
    ).graph
    assert message_bytes(graph).tolist() == [10, 24, 0, 0, 7, 8]  # a smaller message takes one byte


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
