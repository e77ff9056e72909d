"""Steps of some ranks, compared on their hosts and merged: the same verdict as of all ranks on one host."""

import functools
import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pipeproof.comm.op_graph import index_of, stage_weights
from pipeproof.exec.compare import step_part
from pipeproof.exec.compare.compare_gradients import (
    compare_step,
    gather_sharded_gradients,
    merged_step,
    require_finite_step,
)
from pipeproof.exec.compare.step_losses import NotFiniteError
from pipeproof.exec.compare.step_part import StepPart, compare_part, dp_group
from pipeproof.exec.rank.job_files import StepOutcome
from pipeproof.exec.rank.reference_kind import holds_all_weights
from pipeproof.stages.describe.gradient_facts import routers
from pipeproof.stages.describe.layers.layer_operations import measured_with
from pipeproof.stages.describe.stage_memory import num_shards, shard_range
from tests.plans import subject

MOE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 8, "aux_loss": 0.1, "z_loss": 0.01, "expert_bias_rate": 0.1}}
SHARDED = {"memory": {"shard_optimizer": "dp"}}
MESHES = {
    "pp": {"topology": {"pp": 4}},
    "pp tp": {"topology": {"pp": 2, "tp": 2}},
    "tp dp": {"topology": {"pp": 1, "tp": 2, "dp": 2}},
    "dp outermost": {"topology": {"pp": 2, "dp": 2, "order": ["tp", "cp", "ep", "pp", "dp"]}},
    "cp": {"topology": {"pp": 2, "cp": 2}},
    "ep": {"topology": {"pp": 1, "ep": 2, "dp": 2}, "model": MOE},
    "pp ep": {"topology": {"pp": 2, "ep": 2}, "model": MOE},
    "sharded": {"topology": {"pp": 1, "tp": 2, "dp": 3}, **SHARDED},
    "sharded, replicas": {"topology": {"pp": 1, "ep": 2, "dp": 2}, "model": MOE, **SHARDED},
    "sharded, dp innermost": {"topology": {"pp": 2, "dp": 2, "order": ["dp", "tp", "cp", "ep", "pp"]}, **SHARDED},
    "tied": {"topology": {"pp": 2, "tp": 2}, "model": {"tied_embedding": True}},
    "streams": {"topology": {"pp": 1, "tp": 2}, "model": {"hyper_connections": {"streams": 2}}},
    "copies": {"topology": {"pp": 2, "dp": 2}, "schedule": {"kind": "dualpipe"}},
}


@functools.cache
def planned(mesh):
    return subject(**MESHES[mesh])


def cut(plan, rank, parameter, whole):
    """A rank's shard of a whole gradient."""
    block = whole[tuple(slice(a, b) for a, b in index_of(plan, parameter, rank))]
    if num_shards(plan.spec) == 1:
        return block.copy()
    dp = plan.mesh.coords(rank)["dp"]
    return block.reshape(-1)[slice(*shard_range(block.size, num_shards(plan.spec), dp))].copy()


def faithful(plan, seed):
    """The outcomes of all ranks with the bits of a random reference, the reference, and the unpartitioned model's."""
    rng = np.random.default_rng(seed)
    unit = {p.name: np.float32(10.0 ** rng.integers(-3, 3)) for _, p in stage_weights(plan)}
    whole = {p.name: unit[p.name] * rng.standard_normal(p.shape, np.float32) for _, p in stage_weights(plan)}
    near = {
        name: array + unit[name] * np.float32(1e-6) * rng.standard_normal(array.shape, np.float32)
        for name, array in whole.items()
    }
    own = [StepOutcome(gradients={}, routers={}) for _ in range(plan.mesh.num_ranks)]
    of_reference = {}
    for stage, parameter in stage_weights(plan):
        for rank in plan.ranks_of_weight(stage, parameter.name):
            own[rank].gradients[parameter.name] = cut(plan, rank, parameter, whole[parameter.name])
    for stage, names in enumerate(plan.stages):
        for experts in routers(plan.layers):
            if not any(layer.name in names and experts.startswith(layer.name) for layer in plan.layers):
                continue
            values = {
                f"{kind}/{experts}/{m}/0": np.asarray(rng.random(dtype=np.float32))
                for kind in ("aux", "z")
                for m in (0, 1)
            }
            of_reference |= values | {f"bias/{experts}": rng.random(4).astype(np.float32)}
            for rank in range(plan.mesh.num_ranks):
                if plan.mesh.coords(rank)["pp"] in plan.holders[stage]:
                    own[rank].routers.update({name: of_reference[name].copy() for name in (*values, f"bias/{experts}")})
    for rank, outcome in enumerate(own):
        if plan.mesh.coords(rank)["pp"] in plan.holders[-1]:
            outcome.loss = np.float32(rng.random())
    loss = expected_loss(plan, own)
    ordered = StepOutcome(loss, whole, of_reference)
    return own, ordered, StepOutcome(loss + np.float32(1e-6), near, of_reference)


def expected_loss(plan, own):
    """Sum over the axes in their order, those of copies first."""
    total = None
    for dp in range(plan.mesh.size("dp")):
        of_dp = None
        for ep in range(plan.mesh.size("ep")):
            of_ep = None
            for cp in range(plan.mesh.size("cp")):
                of_cp = None
                for pp in plan.holders[-1]:
                    loss = own[plan.mesh.rank({"tp": 0, "dp": dp, "ep": ep, "cp": cp, "pp": pp})].loss
                    of_cp = loss if of_cp is None else of_cp + loss
                of_ep = of_cp if of_ep is None else of_ep + of_cp
            of_dp = of_ep if of_dp is None else of_dp + of_ep
        total = of_dp if total is None else total + of_dp
    return total


def md5(array):
    return hashlib.md5(np.ascontiguousarray(array).tobytes()).hexdigest()


def expected_gradients(plan, own, ordered, unpartitioned):
    """The comparison written without parts: every gradient gathered, then compared as a whole."""
    joined = gather_sharded_gradients(plan, [outcome.gradients for outcome in own])
    for stage, parameter in stage_weights(plan):
        name, gathered, by_index, shards = parameter.name, np.empty(parameter.shape, np.float32), {}, []
        for rank in plan.ranks_of_weight(stage, name):
            index = index_of(plan, parameter, rank)
            gathered[tuple(slice(a, b) for a, b in index)] = joined[rank][name]
            by_index.setdefault(index, set()).add(md5(joined[rank][name]))
            shards.append((rank, md5(joined[rank][name]), index))
        a, b, c = gathered.astype(float), ordered.gradients[name].astype(float), unpartitioned.gradients
        scale = max(np.abs(c[other].astype(float)).max() for other in (name, *measured_with(name)))
        yield {
            "stage": stage,
            "name": name,
            "md5": md5(gathered),
            "reference_md5": md5(ordered.gradients[name]),
            "max_rel_diff": finite(np.abs(a - b).max() / np.abs(b).max()),
            "unpartitioned_max_rel_diff": finite(np.abs(a - c[name].astype(float)).max() / scale),
            "replicas_agree": all(len(found) == 1 for found in by_index.values()),
            "shards": shards,
        }


def finite(ratio):
    return float(ratio) if np.isfinite(ratio) else math.inf


def through_json(part):
    adapter = TypeAdapter(StepPart)
    return adapter.validate_json(adapter.dump_json(part))


def split(plan, hosts, own, ordered, unpartitioned):
    """One part for each host: ``hosts`` has the host of each rank."""
    return [
        through_json(
            compare_part(
                plan, 0, {rank: own[rank] for rank, at in enumerate(hosts) if at == host}, ordered, unpartitioned
            )
        )
        for host in sorted(set(hosts))
    ]


def flip(array):
    """Change the last bit of one element."""
    array.reshape(-1)[:1].view(np.uint32)[0] ^= 1


def same_arrays(a, b):
    return a.keys() == b.keys() and all(
        (x.dtype, x.tobytes()) == (b[name].dtype, b[name].tobytes()) for name, x in a.items()
    )


@st.composite
def runs(draw):
    """A plan, the outcomes of a step with some wrong shards, and the host of each rank."""
    mesh = draw(st.sampled_from(sorted(MESHES)))
    plan = planned(mesh).plan
    own, ordered, unpartitioned = faithful(plan, draw(st.integers(0, 3)))
    shards = [
        (rank, name) for rank, outcome in enumerate(own) for name, array in outcome.gradients.items() if array.size
    ]
    wrong = draw(st.lists(st.sampled_from(shards), unique=True, max_size=3))
    for rank, name in wrong:
        kind = draw(st.sampled_from(["bit", "nan", "far"]))
        array = own[rank].gradients[name]
        if kind == "bit":
            flip(array)
        else:
            array.reshape(-1)[-1] = np.nan if kind == "nan" else 1e9
    num_hosts = draw(st.integers(1, 4))
    hosts = draw(st.lists(st.integers(0, num_hosts - 1), min_size=len(own), max_size=len(own)))
    return plan, own, ordered, unpartitioned, wrong, hosts


@settings(max_examples=150, deadline=None)
@given(run=runs())
def test_parts_of_any_hosts_give_the_comparison_of_all_ranks(run):
    plan, own, ordered, unpartitioned, wrong, hosts = run
    whole = compare_step(plan, 0, own, ordered, unpartitioned)
    merged = merged_step(plan, split(plan, hosts, own, ordered, unpartitioned))
    assert whole.loss.tobytes() == merged.loss.tobytes() == ordered.loss.tobytes()
    assert (whole.bitwise, merged.bitwise) == (not wrong, not wrong)
    assert (whole.routers is None) == (merged.routers is None)
    if whole.routers is not None:
        assert same_arrays(whole.routers.of_run, merged.routers.of_run)
        assert whole.routers.differing == merged.routers.differing == ()
    everything = zip(
        expected_gradients(plan, own, ordered, unpartitioned), whole.gradients, merged.gradients, strict=True
    )
    for expected, of_all, gradient in everything:
        shards = expected.pop("shards")
        assert {key: getattr(of_all, key) for key in expected} == expected
        assert [(shard.rank, shard.md5, shard.index, shard.elements) for shard in of_all.shards] == [
            (*shard, None) for shard in shards
        ]
        is_split = gradient.md5 is None
        assert {key: getattr(gradient, key) for key in expected if key != "md5"} == {
            key: value for key, value in expected.items() if key != "md5"
        }
        assert is_split or gradient.md5 == expected["md5"]
        assert gradient.bitwise == of_all.bitwise
        if is_split:
            assert expected["md5"] != expected["reference_md5"]
            assert len({hosts[shard.rank] for shard in gradient.shards}) > 1
        for shard, before in zip(gradient.shards, of_all.shards, strict=True):
            array = own[shard.rank].gradients[gradient.name]
            is_joined = len({hosts[rank] for rank in dp_group(plan, shard.rank)}) == 1
            if num_shards(plan.spec) > 1 and not is_joined:
                assert shard.elements[1] - shard.elements[0] == array.size
                assert (shard.md5, shard.index) == (md5(array), before.index)
            else:
                assert shard == before
        wrong_ranks = {rank for rank, name in wrong if name == gradient.name}
        found = {shard.rank for shard in gradient.differing}
        joined = {
            member
            for rank in wrong_ranks
            if num_shards(plan.spec) > 1 and len({hosts[r] for r in dp_group(plan, rank)}) == 1
            for member in dp_group(plan, rank)
        }
        assert found == wrong_ranks | joined


def test_differences_are_in_units_of_the_weights_that_they_are_measured_with():
    plan = planned("streams").plan
    own, ordered, unpartitioned = faithful(plan, 0)
    step = merged_step(plan, split(plan, [0, 1], own, ordered, unpartitioned))
    expected = list(expected_gradients(plan, own, ordered, unpartitioned))
    assert any(measured_with(gradient["name"]) for gradient in expected)
    assert [gradient.unpartitioned_max_rel_diff for gradient in step.gradients] == [
        gradient["unpartitioned_max_rel_diff"] for gradient in expected
    ]


@pytest.mark.parametrize("mesh", ["pp tp", "sharded", "ep", "dp outermost"])
@pytest.mark.parametrize("rank", [0, -1])
def test_one_bit_on_one_host_is_found_with_its_rank(mesh, rank):
    plan = planned(mesh).plan
    own, ordered, unpartitioned = faithful(plan, 0)
    rank %= len(own)
    name = next(iter(own[rank].gradients))
    flip(own[rank].gradients[name])
    step = merged_step(plan, split(plan, range(len(own)), own, ordered, unpartitioned))
    (wrong,) = [gradient for gradient in step.gradients if not gradient.bitwise]
    assert (wrong.name, [shard.rank for shard in wrong.differing]) == (name, [rank])


def test_a_replica_on_another_host_that_differs_is_found():
    """The last replica makes up the gathered gradient, which is right; the first one is on the other host."""
    plan = planned("dp outermost").plan
    own, ordered, unpartitioned = faithful(plan, 0)
    hosts = [plan.mesh.coords(rank)["dp"] for rank in range(4)]
    flip(own[0].gradients["embed.weight"])
    step = merged_step(plan, split(plan, hosts, own, ordered, unpartitioned))
    (wrong,) = [gradient for gradient in step.gradients if not gradient.bitwise]
    assert (wrong.name, wrong.replicas_agree, wrong.md5) == ("embed.weight", False, wrong.reference_md5)
    assert wrong.max_rel_diff == 0.0


def test_a_loss_on_one_host_is_found():
    plan = planned("tp dp").plan
    own, ordered, unpartitioned = faithful(plan, 0)
    rank = plan.mesh.rank({**plan.mesh.coords(0), "dp": 1})
    own[rank].loss = own[rank].loss + np.float32(1e-3)
    step = merged_step(plan, split(plan, [plan.mesh.coords(r)["dp"] for r in range(4)], own, ordered, unpartitioned))
    assert not step.loss_is_bitwise
    assert all(gradient.bitwise for gradient in step.gradients)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 0, 1], [3, 2, 1, 0]])
def test_a_router_value_on_one_host_is_found(hosts):
    plan = planned("pp ep").plan
    own, ordered, unpartitioned = faithful(plan, 0)
    name = next(name for name in own[3].routers if name.startswith("bias/"))
    own[3].routers[name][1] += 1
    lost = next(name for name in own[0].routers if name.startswith("aux/"))
    for outcome in own:
        outcome.routers.pop(lost, None)
    step = merged_step(plan, split(plan, hosts, own, ordered, unpartitioned))
    assert step.routers.differing == tuple(sorted([lost, name]))
    whole = compare_step(plan, 0, own, ordered, unpartitioned)
    assert same_arrays(step.routers.of_run, whole.routers.of_run)
    assert list(step.routers.of_run) == list(whole.routers.of_run)


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 0, 1], [3, 2, 1, 0]])
def test_values_that_are_not_finite_are_one_finding_of_all_hosts(hosts):
    one = planned("tp dp")
    own, ordered, unpartitioned = faithful(one.plan, 0)
    require_finite_step(one, split(one.plan, hosts, own, ordered, unpartitioned))
    for rank in (1, 2):
        own[rank].gradients["embed.weight"][0] = np.inf
    own[2].loss, own[2].not_finite = np.float32(np.nan), "0F1"
    parts = split(one.plan, hosts, own, ordered, unpartitioned)
    with pytest.raises(NotFiniteError) as caught:
        require_finite_step(one, parts)
    message = caught.value.findings[0].message
    num_weights = len(list(stage_weights(one.plan)))
    assert message.startswith("step 0: the loss is not a number, on rank 2 first at 0F1; ")
    assert f"gradients that are not finite: 1 of {num_weights}, on ranks 1, 2, embed.weight; the reference's" in message


@pytest.mark.parametrize("mesh", ["tp dp", "sharded", "pp"])
def test_right_shards_are_not_hashed_one_by_one(mesh, monkeypatch):
    """Each region of the reference is hashed once, however many ranks have it, and a whole gradient once."""
    plan = planned(mesh).plan
    own, ordered, unpartitioned = faithful(plan, 0)
    hashed = []
    monkeypatch.setattr(step_part, "md5_of", lambda array: hashed.append(array.size) or md5(array))
    compare_step(plan, 0, own, ordered, unpartitioned)
    size = sum(array.size for array in ordered.gradients.values())
    layers = {"tp dp": 2, "sharded": 3, "pp": 1}[mesh]  # the whole; regions of tp; flat ranges of them
    assert (layers - 1) * size < sum(hashed) <= layers * size


def test_the_reference_is_described_by_its_bits_only_where_hosts_compare_it():
    plan = planned("tp dp").plan
    own, ordered, unpartitioned = faithful(plan, 0)
    (whole,) = split(plan, [0] * 4, own, ordered, unpartitioned)
    assert whole.reference.digest == ""
    one, two = split(plan, [0, 0, 1, 1], own, ordered, unpartitioned)
    assert one.reference == two.reference
    for model in (ordered, unpartitioned):
        spoilt = dict(model.gradients)
        spoilt["head.weight"] = spoilt["head.weight"].copy()
        flip(spoilt["head.weight"])
        models = [replace(each, gradients=spoilt) if each is model else each for each in (ordered, unpartitioned)]
        assert split(plan, [0, 0, 1, 1], own, *models)[1].reference.digest != one.reference.digest


def test_parts_that_are_not_all_ranks_once_are_refused():
    plan = planned("tp dp").plan
    own, ordered, unpartitioned = faithful(plan, 0)
    one, two = split(plan, [0, 0, 1, 1], own, ordered, unpartitioned)
    for parts in ([one], [one, one], [one, two, two]):
        with pytest.raises(ValueError, match="the parts have the ranks"):
            merged_step(plan, parts)
    with pytest.raises(ValueError, match="the parts are of the steps"):
        merged_step(plan, [one, replace(two, step=1)])


@pytest.mark.parametrize("mesh", ["sharded", "pp tp"])
@pytest.mark.parametrize("wrong", [lambda a: a[:-1], lambda a: a.astype(np.float64)])
def test_a_shard_of_another_form_is_refused_on_its_host(mesh, wrong):
    plan = planned(mesh).plan
    own, ordered, unpartitioned = faithful(plan, 0)
    own[1].gradients["head.weight" if mesh == "sharded" else "embed.weight"] = wrong(
        next(iter(own[1].gradients.values()))
    )
    with pytest.raises(ValueError, match="on rank 1: "):
        compare_part(plan, 0, {1: own[1]}, ordered, unpartitioned)


# --- steps without a reference ---


@pytest.mark.parametrize(
    ("mesh", "ranks", "holds"),
    [
        ("pp tp", {0, 1, 2, 3}, True),
        ("pp tp", {0, 1}, False),
        ("pp tp", {0, 2}, False),
        ("tp dp", {0, 1}, False),
        ("cp", {0, 2}, None),
        ("dp outermost", {0, 1}, True),
        ("dp outermost", {0, 2}, False),
        ("ep", {0, 1}, None),
    ],
)
def test_ranks_have_all_weights_if_together_they_have_each_element(mesh, ranks, holds):
    plan = planned(mesh).plan
    covered = True
    for stage, parameter in stage_weights(plan):
        seen = np.zeros(parameter.shape, bool)
        for rank in ranks & {*plan.ranks_of_weight(stage, parameter.name)}:
            seen[tuple(slice(a, b) for a, b in index_of(plan, parameter, rank))] = True
        covered = covered and bool(seen.all())
    assert holds_all_weights(plan, ranks) is covered
    if holds is not None and mesh != "tp dp":
        assert covered is holds


@pytest.mark.parametrize("mesh", ["tp dp", "sharded, replicas"])
def test_without_a_reference_equal_shards_of_all_hosts_are_compared_with_each_other(mesh):
    plan = planned(mesh).plan
    own, *_ = faithful(plan, 0)
    hosts = range(len(own))
    step = merged_step(plan, split(plan, hosts, own, None, None))
    assert not step.is_compared
    assert not step.bitwise
    assert step.agrees(0.0)
    assert step.loss.tobytes() == expected_loss(plan, own).tobytes()
    assert all(gradient.reference_md5 is None and gradient.replicas_agree for gradient in step.gradients)
    name = "layer.0.attn.norm.weight" if "layer.0.attn.norm.weight" in own[0].gradients else "embed.weight"
    flip(own[0].gradients[name])
    step = merged_step(plan, split(plan, hosts, own, None, None))
    assert [gradient.name for gradient in step.gradients if not gradient.replicas_agree] == [name]
    assert not step.agrees(1.0)


def test_a_step_is_compared_only_if_every_host_has_a_reference():
    plan = planned("tp dp").plan
    own, ordered, unpartitioned = faithful(plan, 0)
    one = compare_part(plan, 0, {0: own[0], 1: own[1]}, ordered, unpartitioned)
    two = compare_part(plan, 0, {2: own[2], 3: own[3]}, None, None)
    assert not merged_step(plan, [one, two]).is_compared
