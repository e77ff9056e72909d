"""Rows of tokens that ranks with experts exchange: any number of them, logged, and faults seen."""

import dataclasses

import pytest

from pipeproof.exec.compare.compare_log import compare_exchanges
from tests.exec.test_reference_bits import FULL, GROUPS, MOE, ZB, lowered

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


TINY = {"moe": {**MOE, "num_experts": 4, "top_k": 1, "num_shared_experts": 0}, "seq_length": 2}


def test_a_rank_to_which_no_token_goes_and_one_from_which_none_leaves():
    """A micro-batch of two tokens for two ranks: some exchanges move nothing, and backwards work with them."""
    from tests.exec.in_memory import compared, run_all

    plan = lowered({"pp": 1, "ep": 2}, {"micro_batch_size": 1}, TINY)
    assert all(step.bitwise for step in compared(plan))
    _, adapters = run_all(plan)
    rows = [
        [sum(row[way] for row in entry.traffic) for way in (0, 1)] for a in adapters for entry in a.log if entry.traffic
    ]
    assert any(sent == 0 for sent, _ in rows)
    assert any(received == 0 for _, received in rows)
    assert any(received > 2 for _, received in rows)


@pytest.mark.parametrize("topology", [{"ep": 2}, {"tp": 2, "experts_over_tp": True}], ids=["ep", "tp"])
def test_experts_of_another_rank_are_seen(monkeypatch, topology):
    """Each rank holds the other's experts: the first forward already has other bits."""
    from pipeproof.stages.common import experts
    from tests.exec.in_memory import compared

    region = experts.ExpertRegion
    plan = lowered(topology, {}, {"moe": MOE, **GROUPS})
    monkeypatch.setattr(experts, "ExpertRegion", lambda ops, rank, *rest, **more: region(ops, 1 - rank, *rest, **more))
    first, _ = compared(plan)
    assert not first.loss_is_bitwise
    assert not any(one.bitwise for one in first.gradients if ".experts." in one.name)


@pytest.fixture(scope="module")
def exchanged():
    """The plan of two stages with one and two layers of experts, and the log of a rank of the second."""
    from tests.exec.in_memory import run_all

    plan = lowered({"ep": 2}, {"kind": "zb_h1"}, {"moe": MOE, "num_layers": 4})
    rank = plan.ranks_of_stage(1)[0]
    _, adapters = run_all(plan)
    return plan.graph, rank, adapters[rank].log


def test_logs_say_how_many_rows_went_where(exchanged):
    graph, rank, log = exchanged
    entries = [entry for entry in log if entry.traffic]
    assert len(entries) == 2 * 4 * 2 * (3 + 2)
    assert len({entry.traffic for entry in entries}) > 10, "counts vary"
    assert all(sum(sent for sent, _ in e.traffic) == 16 * 3 for e in entries if e.dtype == "int64")
    assert list(compare_exchanges(graph, rank, log)) == []


@pytest.mark.parametrize("which", range(5))
def test_rows_that_were_not_announced_are_found(exchanged, which):
    graph, rank, log = exchanged
    unit = [i for i, e in enumerate(log) if e.traffic and e.step == 1 and e.op.startswith(("1F2/", "1I2/"))]
    forward, backward = unit[:6], unit[6:]
    place = [forward[1], forward[2], forward[5], backward[0], backward[3]][which]
    (to_first, from_first), *rest = log[place].traffic
    moved = dataclasses.replace(log[place], traffic=((to_first + 1, from_first), *rest))
    (found,) = compare_exchanges(graph, rank, [*log[:place], moved, *log[place + 1 :]])
    assert found.code == "PP901"
    assert found.message.startswith(f"rank {rank}, step 1, {moved.op}: rows [{to_first + 1}, ")


def test_rows_of_another_size_are_found(exchanged):
    graph, rank, log = exchanged
    place = [i for i, entry in enumerate(log) if entry.traffic][2]
    rows = sum(sent for sent, _ in log[place].traffic)
    shorter = dataclasses.replace(log[place], numel=rows * 15)
    (found,) = compare_exchanges(graph, rank, [*log[:place], shorter, *log[place + 1 :]])
    assert found.message.endswith(f"{rows} rows make {rows * 15} elements, and 48 768")


def test_rows_that_come_again_otherwise_than_announced_are_found():
    """All-to-alls of a layer with experts in one input gradient: counts, two exchanges again, two of gradients."""
    from tests.exec.in_memory import run_all

    plan = lowered({"ep": 2}, ZB, {"moe": MOE}, FULL)
    rank = plan.ranks_of_stage(1)[0]
    log = run_all(plan)[1][rank].log
    places = [i for i, e in enumerate(log) if e.traffic and e.step == 1 and e.op.startswith("1I2/")]
    assert [log[place].dtype for place in places] == ["int64", *["float32"] * 4]
    assert list(compare_exchanges(plan.graph, rank, log)) == []
    for place in places[1:]:
        (to_first, from_first), *rest = log[place].traffic
        moved = dataclasses.replace(log[place], traffic=((to_first + 1, from_first), *rest))
        (found,) = compare_exchanges(plan.graph, rank, [*log[:place], moved, *log[place + 1 :]])
        assert found.message.startswith(f"rank {rank}, step 1, {moved.op}: rows [{to_first + 1}, ")
