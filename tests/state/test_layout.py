"""The shards and writers of a plan equal the results of a search for the first holder."""

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.op_graph import index_of
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.schedule.programs import stages_of
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.gradient_facts import bias_name, moves_biases, routers
from pipeproof.stages.describe.stage_memory import num_shards, shard_range
from pipeproof.state import state_layout as layout
from pipeproof.state.regions import flat_regions, tiling_fault
from pipeproof.state.state_layout import COUNTERS, MOMENTS, files_of, moment_name, shards_of_rank, whole_state
from pipeproof.verify.subject import make_subject
from tests.features import merged, mixed
from tests.state.runs import MOE, plan_of

SHARDED = {"shard_optimizer": "dp"}
ORDERS = [("tp", "cp", "ep", "dp", "pp"), ("pp", "dp", "ep", "cp", "tp"), ("dp", "pp", "tp", "ep", "cp")]
FEATURES = [
    "experts", "biases of experts", "MTP", "MTP, magic send", "tied embedding", "latent attention", "empty layers",
    "hyper-connections", "SGD", "main gradients", "sharded optimizer",
]  # fmt: skip


def searched(plan, rank):
    """The shards of a rank, each with the first of all ranks that hold it, which are searched for."""
    seen = set()
    for stage in stages_of(plan.programs)[plan.mesh.coords(rank)["pp"]]:
        for parameter in plan.weights_of(stage, plan.mesh.coords(rank)["pp"]):
            if parameter.name not in seen:
                seen.add(parameter.name)
                yield from searched_weight(plan, stage, parameter, rank)
        for name in routers(plan.layers_of(stage)) if moves_biases(plan.spec) else ():
            shape = (plan.spec.model.moe.num_experts,)
            yield name, "bias", bias_name(name), shape, (0,), shape, None, plan.ranks_of_stage(stage)[0]


def searched_weight(plan, stage, parameter, rank):
    run, name, shape = plan.spec.run, parameter.name, parameter.shape
    region = index_of(plan, parameter, rank)
    part = tuple(start for start, _ in region), tuple(stop - start for start, stop in region)
    everyone = plan.ranks_of_weight(stage, name)
    holders = [other for other in everyone if index_of(plan, parameter, other) == region]
    yield name, "", name, shape, *part, None, holders[0]
    shares, place, flat = num_shards(plan.spec), plan.mesh.coords(rank)["dp"], None
    if shares > 1:
        flat = shard_range(prod(part[1]), shares, place)
        holders = [other for other in holders if plan.mesh.coords(other)["dp"] == place]
        if flat[0] == flat[1]:
            return
    for slot in MOMENTS[run.optimizer]:
        yield name, slot, moment_name(name, slot), shape, *part, flat, holders[0]
    for slot in COUNTERS[run.optimizer][run.backend]:
        yield name, slot, moment_name(name, slot), (), (), (), None, everyone[0]


@st.composite
def plans(draw):
    features = draw(st.sets(st.sampled_from(FEATURES), max_size=4))
    kind = draw(st.sampled_from(["1f1b", "zb_v", "dualpipe", "dualpipe_v", "chimera", "interleaved"]))
    sizes = {axis: draw(st.sampled_from([1, 1, 2, 3])) for axis in ("tp", "dp", "ep")}
    topology = {**sizes, "cp": draw(st.sampled_from([1, 1, 2])), "order": draw(st.sampled_from(ORDERS))}
    more = {"topology": topology, "model": {"num_heads": 6, "num_kv_heads": 6, "head_size": 4, "ffn_size": 12}}
    more["model"] |= {"vocab_size": 36, "hidden_size": 12}
    if draw(st.booleans()):
        more["run"] = {"backend": "torch"}
    plan = merged(mixed(sorted(features), kind=kind), more)
    if "moe" in plan["model"]:
        plan["model"]["moe"]["ffn_size"] = 6
    try:
        return make_subject(plan_from_dict(plan)).plan
    except PipeproofError:
        return None


@settings(deadline=None, max_examples=30)
@given(plan=plans())
def test_shards_and_writers_are_those_that_a_search_over_all_ranks_finds(plan):
    if plan is None:
        return
    for rank in range(plan.mesh.num_ranks):
        found = [
            (one.weight, one.slot, part.tensor, one.tensor.shape, part.offsets, part.extents, part.flat, one.writer)
            for one in shards_of_rank(plan, rank)
            for part in (one.shard,)
        ]
        assert found == list(searched(plan, rank))


@settings(deadline=None, max_examples=25)
@given(plan=plans())
def test_the_files_of_a_plan_tile_every_tensor_of_its_state(plan):
    if plan is None:
        return
    files, tensors = files_of(plan), whole_state(plan)
    regions = {name: [] for name in tensors}
    for rank in range(plan.mesh.num_ranks):
        mine = [piece.shard for piece in shards_of_rank(plan, rank) if piece.writer == rank]
        assert files[f"rank{rank}.safetensors"] == tuple(mine)
        for one in mine:
            flat = one.flat or (0, prod(one.extents))
            regions[one.tensor] += [region.shifted(one.offsets) for region in flat_regions(one.extents, flat)]
    assert len(files) == plan.mesh.num_ranks
    assert {name: tiling_fault(tensors[name].shape, held) for name, held in regions.items()} == dict.fromkeys(tensors)


def test_a_tensor_says_how_it_is_sharded():
    at = plan_of(topology={"tp": 2, "ep": 2, "dp": 2}, model={"moe": MOE, "num_kv_heads": 2}, memory=SHARDED).plan
    tensors = whole_state(at)
    assert tensors["embed.weight"].cut == {"tp": 0}
    assert tensors["layer.0.mlp.experts.up.weight"].cut == {"tp": 2, "ep": 0}
    assert tensors["optimizer/moment1/layer.0.mlp.experts.up.weight"].cut == {"tp": 2, "ep": 0, "dp": "flat"}
    assert tensors["norm.weight"].cut == {}
    assert tensors["optimizer/beta1_power/norm.weight"].cut == {}
    alone = whole_state(plan_of().plan)
    assert {tuple(one.cut) for one in alone.values()} == {()}
    assert alone["embed.weight"].is_same(tensors["embed.weight"])
    assert not alone["embed.weight"].is_same(tensors["head.weight"])


def num_worked_out(monkeypatch, num_layers, **topology):
    """The number of shards that are computed for the files of a plan, and the number in its files."""
    calls = []
    with monkeypatch.context() as patch:
        patch.setattr(layout, "index_of", lambda *given: calls.append(given) or index_of(*given))
        files = files_of(plan_of(topology=topology, model={"num_layers": num_layers}, memory=SHARDED).plan)
    return len(calls), sum(map(len, files.values()))


def test_the_files_of_a_plan_are_computed_once_for_all_layers_that_are_alike_and_by_no_search(monkeypatch):
    worked_out, held = num_worked_out(monkeypatch, 4, pp=4, tp=2, dp=4)
    assert worked_out < held
    assert num_worked_out(monkeypatch, 16, pp=4, tp=2, dp=4)[0] == worked_out
    for twice in ({"pp": 4, "tp": 4, "dp": 4}, {"pp": 4, "tp": 2, "dp": 8}):
        assert num_worked_out(monkeypatch, 4, **twice)[0] <= 2 * worked_out


def test_files_of_ranks_that_write_no_weight_hold_shares_of_moments_alone():
    files = files_of(plan_of(topology={"tp": 2, "dp": 2}, memory=SHARDED).plan)
    names = [one.tensor for one in files["rank2.safetensors"]]  # dp 1: weights are written at dp 0
    assert names
    assert all(name.startswith("optimizer/moment") for name in names)
