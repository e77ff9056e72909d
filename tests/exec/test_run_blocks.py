"""Experts over two ranks and grouped queries on real processes; refusals; exchanges between pairs."""

import threading

import pytest

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.launch.run_plan import RunOptions, require_runnable
from pipeproof.schedule.op_table import Group
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.exec.processes import bitwise_report
from tests.exec.test_reference_bits import MLA, MOE
from tests.features import GPT3, QWEN3
from tests.plans import plan_dict

pytestmark = pytest.mark.needs_paddle


@pytest.mark.slow
def test_shards_of_experts_and_the_same_router_on_both_ranks(tmp_path):
    plan = plan_dict(
        model={"num_layers": 2, "moe": MOE, **QWEN3}, topology={"pp": 2, "ep": 2}, schedule={"kind": "zb_h1"},
        run={"steps": 1},
    )  # fmt: skip
    report = bitwise_report(tmp_path, plan)
    (experts,) = (g for g in report["gradients"] if g["name"] == "layer.1.mlp.experts.up.weight")
    assert sorted(shard["index"][0] for shard in experts["shards"]) == [[0, 6], [6, 12]]
    (router,) = (g for g in report["gradients"] if g["name"] == "layer.1.mlp.router.weight")
    assert len({shard["md5"] for shard in router["shards"]}) == 1


def test_parts_of_sequences_and_of_models_match_the_reference_bit_for_bit(tmp_path):
    plan = plan_dict(
        model={"num_layers": 2, **GPT3, **QWEN3}, topology={"cp": 2}, schedule={"kind": "zb_h1"}, run={"steps": 2}
    )
    report = bitwise_report(tmp_path, plan)
    assert report["parallel_bound"] > 0.0
    assert all(one["uncut_max_rel_diff"] <= report["parallel_bound"] for one in report["gradients"])


@pytest.mark.parametrize(
    ("cp", "model", "fact"),
    [
        (1, {"moe": {**MOE, "nodes_per_token": 1}}, "the plan has model.moe.nodes_per_token"),
        (1, {"moe": {**MOE, "dispatch_dtype": "float8"}}, "the plan has model.moe.dispatch_dtype"),
        (2, {"mla": MLA}, "the plan has cp 2 and latent attention"),
        (2, {"moe": {**MOE, "aux_loss": 0.01}}, "the plan has cp 2 and model.moe.aux_loss"),
        (2, {"moe": {**MOE, "z_loss": 0.01}}, "the plan has cp 2 and model.moe.z_loss"),
    ],
)
def test_what_no_run_carries_out_is_refused(cp, model, fact):
    report = check(plan_from_dict(plan_dict(topology={"cp": cp}, model=model)))
    with pytest.raises(PipeproofError) as refused:
        require_runnable(report, RunOptions())
    (finding,) = refused.value.findings
    assert finding.code == "PP909"
    assert fact in finding.message


@pytest.fixture
def two_ends(monkeypatch):
    """Both ends of a pair in threads, and their gathers: ``dist.all_gather`` of two equal shapes."""
    from pipeproof.exec.rank.paddle import comm

    meeting, given, calls = threading.Barrier(2, timeout=30), {}, []

    def all_gather(received, tensor, group):
        rank = threading.current_thread().name
        given[rank] = tensor.clone()
        meeting.wait()
        assert given["0"].shape == given["1"].shape, "gloo gathers equal shapes alone"
        received += [given["0"], given["1"]]
        calls.append(list(tensor.shape))
        meeting.wait()

    monkeypatch.setattr(comm.dist, "all_gather", all_gather)

    def exchanged(work):
        results = {}
        ends = [comm.PairwiseCollectives(rank, Group("ep", (0, 1)), {(0, 1): None}) for rank in (0, 1)]
        threads = [
            threading.Thread(target=lambda r=r: results.update({r: work(r, ends[r])}), name=str(r)) for r in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[0], results[1]], calls

    return exchanged


@pytest.mark.parametrize(
    ("counts", "gathered"),
    [
        (((1, 3), (2, 0)), [3, 3]),  # three rows one way, two the other
        (((0, 2), (0, 1)), [2, 2]),  # rank 0 gets all it has from rank 1, and nothing of its own
        (((4, 0), (0, 5)), []),  # nothing crosses, and nothing is issued
        (((0, 0), (0, 0)), []),
    ],
)
def test_a_pair_exchanges_the_given_numbers_of_rows(two_ends, counts, gathered):
    import paddle

    def rows_of(rank, to):
        return [[100.0 * rank + 10.0 * to + i] * 3 for i in range(counts[rank][to])]

    def work(rank, collectives):
        mine = [*rows_of(rank, 0), *rows_of(rank, 1)]
        tensor = paddle.to_tensor(mine, dtype="float64") if mine else paddle.zeros([0, 3], dtype="float64")
        received = collectives.exchange(tensor, counts[rank], [counts[0][rank], counts[1][rank]])
        assert str(received.dtype) == "paddle.float64"
        assert received.shape[1] == 3
        return received.numpy().tolist()

    results, calls = two_ends(work)
    assert results == [[*rows_of(0, rank), *rows_of(1, rank)] for rank in (0, 1)]
    assert [rows for rows, _ in calls] == gathered
