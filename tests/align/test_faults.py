"""Faults planted into a real model with tensor and sequence parallelism, and where ``align`` finds them.

More of them, in a model with stages, expert-parallel ranks, an MTP module and a tied weight, are in ``test_planted``.
"""

import json

import pytest

from tests.cli.commands import invoke
from tests.docs.test_schemas import fits, require_fit
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


def recorded(directory, prepare=None, *, values=True, **model):
    """Record two ranks and their reference. ``model`` has further keys of the model."""
    from tests.align.recorded_plan import record, reference_run

    plan = subject(
        topology={"pp": 1, "tp": 2, "sequence_parallel": True},
        model={"num_layers": 2, "num_heads": 4, "vocab_size": 16, **model},
        schedule={"num_micro_batches": 2},
        run={"steps": 2},
    ).plan
    record(plan, reference_run(plan), directory, values=values, prepare=prepare)


@pytest.fixture
def unreduced(monkeypatch):
    """Gradients of norms are not summed over the ranks."""
    from tests.align.planted import missing_norm_reduction

    missing_norm_reduction(monkeypatch)


def located(directory, *options, status=1):
    """The result as JSON."""
    result = invoke("state", "align", directory / "run", directory / "reference", "--format", "json", *options)
    assert result.exit_code == status, result.output
    content = json.loads(result.stdout)
    require_fit("align", content)
    return content


def test_without_a_fault_all_is_equal(tmp_path):
    recorded(tmp_path)
    found = located(tmp_path, status=0)
    assert found["main"] == {"steps": 2, "equal": 2, "first_difference": None}
    boundaries = (
        9 + 8
    )  # embed gives, two layers and norm take and give, head takes and gives; back, but the loss's gradient
    assert found["tensors"]["compared"] == 2 * (2 * boundaries + 2 * 7 + 3)
    assert found["tensors"]["equal"] == found["tensors"]["compared"]
    lines = [json.loads(line) for line in (tmp_path / "reference" / "record.jsonl").read_text().splitlines()]
    for line in lines:
        require_fit("record", line)
    cut = next(line for line in lines if line["kind"] == "tensor")
    assert [shard["index"][0] for shard in cut["shards"]] == [[0, 4], [4, 8]]
    assert not fits("record", {**lines[1], "md5": "0"})
    assert not fits("record", {**lines[0], "format": 2})
    assert not fits("align", {**found, "equal": None})


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.usefixtures("unreduced")
def test_a_missing_reduction_of_norms_with_sequence_parallelism(values, tmp_path):
    recorded(tmp_path, values=values)
    found = located(tmp_path)
    assert found["main"]["first_difference"]["step"] == 1  # the first step's loss says nothing
    first = found["tensors"]["first_difference"]
    assert first["step"] == 0
    assert first["tensor"] == {"kind": "gradient", "layer": "norm", "parameter": "norm.weight"}
    assert first["ranks"] == [0, 1]
    assert first["cause"]["family"] == "missing reduction"
    assert ("their sum is B's" if values else "by MD5s alone") in first["cause"]["evidence"]


def test_heads_that_are_swapped_between_ranks_change_no_activation(tmp_path):
    """Each rank has the other's heads of one layer, their rows of the output product included."""
    taken = {}

    def swap(adapter, arrays, rank):
        (stage,) = adapter._stages.values()
        for name in ("layer.1.attn.qkv.weight", "layer.1.attn.out.weight"):
            weight = stage.parameters[name]
            taken[rank, name] = weight, weight.clone()
            if (1 - rank, name) in taken:
                other, value = taken[1 - rank, name]
                other.set_value(weight)
                weight.set_value(value)

    recorded(tmp_path, swap)
    found = located(tmp_path)
    first = found["tensors"]["first_difference"]
    assert first["step"] == 0
    assert first["tensor"] == {"kind": "gradient", "layer": "layer.1", "parameter": "layer.1.attn.out.weight"}
    assert first["cause"]["family"] == "layout"
    assert "whole slices along dim 0, such as A's 0 which is B's 8" in first["cause"]["evidence"]
    assert first["ranks"] == [0, 1]


AUXILIARY = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "aux_loss": 0.1}


def test_losses_of_routers_are_compared_beside_the_main_one(tmp_path):
    recorded(tmp_path, moe={**AUXILIARY, "z_loss": 0.01})
    found = located(tmp_path, status=0)
    assert found["routers"] == {"steps": 2, "equal": 2, "first_difference": None}
    last = json.loads((tmp_path / "run" / "record.jsonl").read_text().splitlines()[-1])
    require_fit("record", last)
    assert [one["name"] for one in last["others"]] == ["aux", "z"]
    assert all(0 < float(one["loss"]) < 1 for one in last["others"])


def test_an_auxiliary_loss_that_every_rank_puts_in(tmp_path, monkeypatch):
    """The loss itself is right on each rank; its gradient, a sum over ranks, is twice the right one."""
    from pipeproof.stages.paddle import stage

    right = stage.PaddleBalance
    monkeypatch.setattr(
        stage, "PaddleBalance", lambda plan, layers, *, adds_losses: right(plan, layers, adds_losses=True)
    )
    recorded(tmp_path, moe=AUXILIARY)
    found = located(tmp_path)
    assert found["routers"]["first_difference"]["step"] == 1
    first, before = found["tensors"]["first_difference"], found["tensors"]["last_equal_before"]
    assert first["step"] == 0
    assert (first["tensor"]["layer"], first["tensor"]["direction"]) == ("layer.1", "backward")
    assert (before["layer"], before["direction"], before["side"]) == ("layer.1", "backward", "input")


@pytest.mark.usefixtures("unreduced")
def test_what_the_terminal_shows(tmp_path):
    recorded(tmp_path)
    text = invoke("state", "align", tmp_path / "run", tmp_path / "reference").stdout
    assert text.startswith("main_matches=1/2\nfirst_main_diff: step 1, main (loss): A ")
    assert "first tensor that differs, in execution order: step 0, gradient of norm.weight, ranks 0, 1\n" in text
    assert "  cause, a guess: missing reduction: 2 ranks of A hold different tensors; their sum is B's" in text
    assert "  last equal before it: gradient of head.weight\n" in text
    assert text.endswith("different\n")


@pytest.mark.usefixtures("unreduced")
def test_a_tolerance_lets_rounding_pass_and_nothing_more(tmp_path):
    recorded(tmp_path)
    assert located(tmp_path, "--relative", "1e-5")["tensors"]["first_difference"]["step"] == 0
    loose = located(tmp_path, "--relative", "1e9", "--ulps", "1000000")
    assert not loose["equal"]  # ranks that hold other values of one part are never equal
    assert loose["main"]["equal"] == 2
