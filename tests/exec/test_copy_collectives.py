"""Collectives by copies, over an emulated driver whose streams move in random order."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.op_table import Group
from pipeproof.specs.load_plan import plan_from_dict
from tests.exec.test_copy_channels import connected
from tests.plans import plan_dict, subject

pytestmark = pytest.mark.needs_torch


class _NoBackend:
    def reduce(self, tensor, reduction):
        raise AssertionError("a copy is enough")


def _on_every_rank(num_ranks, work):
    """The results of ``work`` for each rank's collectives, in threads."""
    from pipeproof.exec.rank.torch.comm import CopyCollectives, pair_channels

    group = Group("ep", tuple(range(num_ranks)))
    slots = dict.fromkeys(pair_channels([group]), 512)  # some tensors have more pieces than there are slots
    ends = connected(slots, num_ranks)
    found = [None] * num_ranks

    def run(rank):
        found[rank] = work(CopyCollectives(rank, group, _NoBackend(), ends[rank]), rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_collectives_move_what_they_should(monkeypatch, num_ranks, seed):
    import torch

    from tests.exec.emulated_gpu import emulate

    emulate(monkeypatch, seed)
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 50, (num_ranks, num_ranks), generator=draw)  # by sender and receiver; some may be 0
    rows[0, 1] = 0
    sent = [torch.randn(int(rows[rank].sum()), 7, generator=draw) for rank in range(num_ranks)]
    whole = [torch.randn(num_ranks * 60, 5, generator=draw) for _ in range(num_ranks)]

    def work(collectives, rank):
        exchanged = collectives.exchange(sent[rank], rows[rank].tolist(), rows[:, rank].tolist())
        gathered = [collectives.all_gather(whole[rank], dim) for dim in (0, 1)]
        return exchanged, gathered, collectives.reduce_scatter(whole[rank], 0)

    for rank, (exchanged, gathered, scattered) in enumerate(_on_every_rank(num_ranks, work)):
        parts = [sent[other].split(rows[other].tolist())[rank] for other in range(num_ranks)]
        assert torch.equal(exchanged, torch.cat(parts))
        assert all(torch.equal(each, torch.cat(whole, dim)) for dim, each in enumerate(gathered))
        total = whole[0]
        for addend in whole[1:]:
            total = total + addend
        assert torch.equal(scattered, total.chunk(num_ranks)[rank])


@pytest.mark.parametrize("dispatcher", ["all_to_all", "all_gather"])
def test_a_training_has_the_bits_of_one_with_other_collectives(monkeypatch, dispatcher):
    from pipeproof.exec.rank.torch.comm import CopyCollectives, pair_channels
    from tests.exec.emulated_gpu import emulate
    from tests.exec.in_memory import require_logged, run_all

    moe = {"num_experts": 4, "top_k": 2, "ffn_size": 32, "dispatcher": dispatcher}
    plan = subject(
        topology={"pp": 1, "ep": 2},
        schedule={"num_micro_batches": 2},
        model={"moe": moe},
        run={"backend": "torch", "steps": 2},
    ).plan
    groups = plan.graph.groups
    driver = emulate(monkeypatch)
    ends = connected(pair_channels(group for group in groups if group.axis == "ep"))

    def around(world):
        driver.pause = lambda: world.channels.memory.turn.wait(0.001)
        copies = {
            index: CopyCollectives(world.rank, groups[index], each, ends[world.rank])
            if groups[index].axis == "ep"
            else each
            for index, each in world.collectives.items()
        }
        return replace(world, collectives=copies)

    expected, _ = run_all(plan)
    outcomes, adapters = run_all(plan, around=around)
    require_logged(plan, adapters)
    for of_step, expected_of_step in zip(outcomes, expected, strict=True):
        for found, wanted in zip(of_step, expected_of_step, strict=True):
            assert found.loss == wanted.loss
            assert found.gradients
            for name, gradient in wanted.gradients.items():
                assert np.array_equal(found.gradients[name], gradient), name


GPU = {"backend": "torch", "device": "gpu"}
MOE = {"num_experts": 8, "top_k": 2, "ffn_size": 32}


def _plan(ep, run=GPU, **transport):
    return plan_dict(
        run=run, topology={"pp": 2, "ep": ep}, model={"moe": MOE}, transport={"experts": "copy_engine", **transport}
    )


def test_plans_with_copies_between_experts():
    plan_from_dict(_plan(4))
    plan_from_dict(_plan(2, send_recv="copy_engine"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            _plan(2, {"backend": "torch"}),
            "`experts: copy_engine` is for PyTorch on GPUs, and the plan has torch on cpu",
        ),
        (_plan(1), "with one expert-parallel rank no token moves"),
        (_plan(8), "copies of 8 expert-parallel ranks wait on 14 streams of a GPU, and 8 would block"),
        (_plan(4, send_recv="copy_engine"), "copies of 4 expert-parallel ranks and of messages wait on 10 streams"),
    ],
)
def test_plans_that_copies_do_not_fit_are_refused(plan, message):
    with pytest.raises(PlanFileError) as refusal:
        plan_from_dict(plan)
    (finding,) = refusal.value.findings
    assert (finding.code, message in finding.message) == ("PP106", True)
