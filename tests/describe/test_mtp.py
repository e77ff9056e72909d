"""Description of multi-token prediction: layers, boundaries, collectives, work and memory."""

from math import prod

import pytest

from pipeproof.comm.lower import lower
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.mtp_streams import mtp_streams_after, mtp_streams_into
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, layer_work
from pipeproof.stages.describe.stage_memory import Lifetime
from pipeproof.verify.check_plan import check_subject
from tests.plans import plan_spec, subject
from tests.verify.gradient_mutants import changed, own
from tests.verify.programs import errors, mutated

SP = {"tp": 2, "sequence_parallel": True}
ITEM = 4


def spec(mtp, **sections):
    model = {**({"mtp": mtp} if mtp else {}), **sections.pop("model", {})}
    return plan_spec(model=model, **sections)


@pytest.mark.parametrize("order", ["sbh", "bsh"])
@pytest.mark.parametrize(("again", "streams"), [(False, (3, 3, 3)), (True, (1, 2, 3))])
def test_mtp_streams_cross_as_rows_of_one_tensor(order, again, streams):
    stages = [["embed", *(f"layer.{i}" for i in range(4))], ["mtp.0"], ["mtp.1"], ["norm", "head"]]
    mtp = {"num_modules": 2, "magic_send": again}
    plan = spec(mtp, topology={**SP, "pp": 4}, stages=stages, model={"activation_order": order})
    for edge, number in zip(lower(plan).edges, streams, strict=True):
        (tensor,) = edge.members(0)
        assert dict(zip(tensor.dims, tensor.shape, strict=True)) == {"s": 8, "b": 2 * number, "h": 16}
        assert tensor.tp.dim == order.index("s")
    assert mtp_streams_into(plan.model, "mtp.1") == (2 if again else 3)
    assert (mtp_streams_into(plan.model, "embed"), mtp_streams_after(plan.model, ["embed"])) == (0, 1 if again else 3)


def test_without_stages_modules_are_on_the_last():
    assert lower(spec({"num_modules": 2})).stages[1] == ("layer.2", "layer.3", "mtp.0", "mtp.1", "norm", "head")
    behind = {"num_modules": 2, "reads": "after_norm"}
    assert lower(spec(behind)).stages[1] == ("layer.2", "layer.3", "norm", "mtp.0", "mtp.1", "head")


def test_a_module_behind_the_norm_ends_with_its_own_and_may_have_its_own_embedding():
    model = {
        layer.name: layer for layer in describe_gpt(spec({"num_modules": 1, "reads": "after_norm", "embedding": "own"}))
    }
    names = [parameter.name for parameter in model["mtp.0"].parameters]
    assert (names[0], names[-1]) == ("mtp.0.embed.weight", "mtp.0.norm.weight")
    assert model["mtp.0"].borrowed == ()
    assert model["mtp.0"].parameters[0].shape == model["embed"].parameters[0].shape


def test_a_module_is_a_block_behind_what_joins():
    layers = {layer.name: layer for layer in describe_gpt(spec({"num_modules": 1}, topology=SP))}
    block, module = layers["layer.3"], layers["mtp.0"]
    names = [parameter.name.removeprefix("mtp.0.") for parameter in module.parameters]
    assert names[:3] == ["hidden_norm.weight", "embed_norm.weight", "proj.weight"]
    assert names[3:] == [parameter.name.removeprefix("layer.3.") for parameter in block.parameters]
    assert module.parameters[2].shape == (32, 16)
    assert [one.partial_over for one in module.parameters[:3]] == [("tp",)] * 3
    assert len(module.forward_collectives) == len(block.forward_collectives)
    again = {x.name: x for x in describe_gpt(spec({"num_modules": 1, "magic_send": True}, topology=SP))}["mtp.0"]
    assert [one.name for one in again.borrowed] == ["embed.weight"]
    assert len(again.forward_collectives) == len(block.forward_collectives) + 1


GRID = [
    ({"pp": 2, **SP}, {}, {}),
    ({"pp": 2, "tp": 2, "cp": 2}, {}, {}),
    ({"pp": 2, "ep": 2, "dp": 2}, {}, {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 8, "aux_loss": 0.1}}),
    ({"pp": 2}, {"kind": "zb_v", "num_chunks": 2}, {}),
    ({"pp": 2, "dp": 2}, {"kind": "dualpipe"}, {"tied_embedding": True}),
]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("place", range(len(GRID)))
def test_plans_are_proved(place, again):
    topology, schedule, model = GRID[place]
    mtp = {"num_modules": 2, "magic_send": again}
    assert errors(subject(model={"mtp": mtp, **model}, topology=topology, schedule=schedule)) == []


def test_the_weight_of_a_module_is_a_factor_that_rules_know():
    seen = subject(model={"mtp": {"num_modules": 2, "loss_weight": 0.3}}, topology={"pp": 2, "dp": 2})
    right = "1/global_tokens,mtp.0:0.15/global_tokens,mtp.1:0.15/global_tokens"
    assert own(mutated(seen, changed("1F", scale=right))) == set()
    for wrong in (right.replace("mtp.1:0.15", "mtp.1:0.3"), right.replace("mtp.0:0.15", "mtp.0:1")):
        mutant = mutated(seen, changed("1F", scale=wrong))
        assert own(mutant) == {"PP607"}
        (found,) = [one for one in check_subject(mutant).findings if one.code == "PP607"]
        assert f"loss `mtp.{0 if 'mtp.0:1' in wrong else 1}`" in found.message


def test_a_copy_of_the_embedding_that_is_not_summed_is_found():
    seen = subject(model={"mtp": {"num_modules": 1, "magic_send": True}}, topology={"pp": 2})

    def without_sums(rows):
        for program in rows:
            program[:] = [row for row in program if "REDUCE_GRAD:pp" not in str(row.op)]

    assert "PP608" in {one.code for one in check_subject(mutated(seen, without_sums)).findings}


def test_embedding_norm_and_head_work_for_every_lane():
    alone, three = spec(None), spec({"num_modules": 2})
    size = lower(alone).sizes[0]
    for layer in ("norm", "head", "layer.1"):
        ours, base = (
            sum(w.flops for w in layer_work(one, layer, size, ITEM) if w.phase is Phase.FORWARD)
            for one in (three, alone)
        )
        assert ours == base * (1 if layer == "layer.1" else 3)
    module, block = (
        sum(
            w.flops
            for w in layer_work(three, name, size, ITEM)
            if w.phase is Phase.WEIGHT and w.unit is ComputeUnit.MATMUL
        )
        for name in ("mtp.0", "layer.3")
    )
    assert module - block == 2 * size.num_tokens * 32 * 16


@pytest.mark.parametrize(("again", "inputs"), [(False, 2), (True, 1)])
def test_what_a_module_keeps(again, inputs):
    mtp = {"num_modules": 1, "magic_send": again}
    full = spec(mtp, memory={"recompute": "full"})
    lowered = lower(full)
    tokens, module = lowered.sizes[0].num_tokens, [lowered.layer_by_name["mtp.0"]]

    def held(plan, *lives):
        return sum(one.num_bytes for one in stored_activations(plan, module, lowered.sizes[0]) if one.lifetime in lives)

    lives = (Lifetime.TO_INPUT, Lifetime.TO_WEIGHT)
    assert held(full, *lives) == inputs * tokens * 16 * ITEM
    block = stored_activations(spec(mtp), [lowered.layer_by_name["layer.3"]], lowered.sizes[0])
    joined = 2 * 16 * ITEM + 2 * (16 * ITEM + 4) + (8 if again else 0)  # for a token: side by side, two norms, its id
    of_block = sum(one.num_bytes for one in block if one.lifetime in lives)
    assert held(spec(mtp), *lives) == of_block + tokens * joined


def test_a_copied_weight_counts_once_for_a_rank():
    again = {"mtp": {"num_modules": 2, "magic_send": True}, "tied_embedding": True}
    lowered = lower(spec(None, model=again))
    names = [weight.name for weight in lowered.weights_of(1, 1)]
    assert names.count("embed.weight") == 1
    assert prod(lowered.layer_by_name["embed"].parameters[0].shape) == 32 * 16
