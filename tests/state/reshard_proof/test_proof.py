"""The proof of a reshard: right pairs pass, and any change of a shard or region copy with an effect is found."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import Severity
from pipeproof.state.checkpoint import HeldShard
from pipeproof.state.regions import Region, flat_regions, whole_region
from pipeproof.state.reshard.reshard_proof import prove
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap, identity_map
from tests.state.reshard_proof.plans import DENSE, EXPERTS, TOPOLOGIES, layout, lowered
from tests.work import num_calls

SIDES = {
    (number, experts): layout(topology, EXPERTS if experts else DENSE)
    for number, topology in enumerate(TOPOLOGIES)
    for experts in (False, True)
    if experts or "ep" not in topology
}


def errors(*sides_and_map):
    return [finding for finding in prove(*sides_and_map) if finding.severity is Severity.ERROR]


def codes(*sides_and_map):
    return {finding.code for finding in errors(*sides_and_map)}


def slices(region):
    return tuple(slice(start, stop) for start, stop in zip(region.offsets, region.stops, strict=True))


def held_once(shape, shards):
    """Check element by element that each is in exactly one shard, and that no shard exceeds the tensor."""
    room = [size + 8 for size in shape]
    counts = np.zeros(room, int)
    for part in shards:
        offsets, extents = part.shard.offsets, part.shard.extents
        for region in flat_regions(extents, part.shard.flat or (0, int(np.prod(extents)))):
            counts[slices(region.shifted(offsets))] += 1
    inside = counts[tuple(slice(0, size) for size in shape)]
    return bool((inside == 1).all()) and counts.sum() == inside.sum()


def with_parts(one, name, shards):
    return dataclasses.replace(one, shards={**one.shards, name: tuple(shards)})


@pytest.mark.parametrize("experts", [False, True], ids=["dense, tied", "experts, mtp"])
def test_any_topology_is_made_of_any_other(experts):
    sides = [one for (_, of_experts), one in SIDES.items() if of_experts == experts]
    for source in sides:
        for target in sides:
            assert prove(source, identity_map(source.tensors), target) == ()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_shard_that_is_changed_is_found_unless_all_elements_are_still_held_once(data):
    one = data.draw(st.sampled_from(list(SIDES.values())))
    one = dataclasses.replace(one, plan=None)
    name = data.draw(st.sampled_from(sorted(one.shards)))
    shards = list(one.shards[name])
    number = data.draw(st.integers(0, len(shards) - 1))
    shard, change = shards[number].shard, data.draw(st.sampled_from(["offset", "extent", "flat", "lost", "twice"]))
    if change == "lost":
        del shards[number]
    elif change == "twice":
        shards.append(shards[number])
    elif change == "flat":
        assume(shard.flat is not None)
        start = data.draw(st.integers(0, shard.flat[1] - 1))
        stop = data.draw(st.integers(start + 1, int(np.prod(shard.extents))))
        shards[number] = dataclasses.replace(shards[number], shard=shard.model_copy(update={"flat": (start, stop)}))
    else:
        assume(shard.extents)
        key, dim = f"{change}s", data.draw(st.integers(0, len(shard.extents) - 1))
        numbers = list(getattr(shard, key))
        numbers[dim] = data.draw(st.integers(0 if change == "offset" else 1, one.tensors[name].shape[dim]))
        changed = shard.model_copy(update={key: tuple(numbers)})
        assume(changed.flat is None or changed.flat[1] <= int(np.prod(changed.extents)))
        assume(
            all(
                a + e <= s + 8
                for a, e, s in zip(changed.offsets, changed.extents, one.tensors[name].shape, strict=True)
            )
        )
        shards[number] = dataclasses.replace(shards[number], shard=changed)
    found = errors(with_parts(one, name, shards), identity_map(one.tensors), one)
    assert bool(found) != held_once(one.tensors[name].shape, shards)
    assert all(finding.code == "PP210" and f"`{name}`" in finding.message for finding in found)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_shard_on_another_rank_is_found_unless_that_rank_computes_with_it_too(data):
    one = data.draw(st.sampled_from([one for one in SIDES.values() if one.plan.mesh.num_ranks > 1]))
    name = data.draw(
        st.sampled_from([name for name in sorted(one.shards) if one.tensors[name].kind in ("weight", "moment")])
    )
    shards, plan = list(one.shards[name]), one.plan
    number = data.draw(st.integers(0, len(shards) - 1))
    rank = data.draw(st.integers(0, plan.mesh.num_ranks - 1))
    shards[number] = dataclasses.replace(shards[number], rank=rank)
    weight = one.tensors[name].weight or name
    used = {
        p.name: p for s in plan.stages_of_rank(rank) for la in plan.layers_of(s) for p in (*la.parameters, *la.borrowed)
    }
    fits = weight in used
    if fits:
        coords, shape = plan.mesh.coords(rank), one.tensors[name].shape
        own = [0] * len(shape)
        for axis, placed in (("tp", used[weight].tp), ("ep", used[weight].ep)):
            if placed.dim is not None:
                own[placed.dim] = coords[axis] * shape[placed.dim] // plan.mesh.size(axis)
        fits = tuple(own) == shards[number].shard.offsets
    found = errors(with_parts(one, name, shards), identity_map(one.tensors), one)
    assert bool(found) != fits
    assert all(finding.code in ("PP211", "PP213") and f"rank {rank} of plan" in finding.message for finding in found)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_region_copy_that_is_changed_is_found_unless_it_still_moves_each_element_once(data):
    one = SIDES[1, 1]
    names = [name for name in sorted(one.tensors) if len(one.tensors[name].shape) == 2]
    name = data.draw(st.sampled_from(names))
    shape = one.tensors[name].shape
    right = identity_map(one.tensors)
    cut = data.draw(st.integers(1, shape[1] - 1))
    copy = right.tensors[name].copies[0]
    halves = [
        copy.restricted_to(Region((0, 0), (shape[0], cut))),
        copy.restricted_to(Region((0, cut), (shape[0], shape[1] - cut))),
    ]
    number, key = data.draw(st.integers(0, 1)), data.draw(st.sampled_from(["region", "source_region"]))
    start = data.draw(st.integers(0, shape[1] - 1))
    width = data.draw(st.integers(1, shape[1] - start))
    halves[number] = dataclasses.replace(halves[number], **{key: Region((0, start), (shape[0], width))})
    tensor = dataclasses.replace(right.tensors[name], copies=tuple(halves))
    made, read, fits = np.zeros(shape, int), np.zeros(shape, int), True
    for half in halves:
        made[slices(half.region)] += 1
        read[slices(half.source_region)] += 1
        fits &= half.region.extents == half.source_region.extents
    found = errors(one, StateMap({**right.tensors, name: tensor}), one)
    assert bool(found) != (fits and (made == 1).all() and (read == 1).all())
    assert all(f"`{name}`" in finding.message for finding in found)
    if fits and (made == 1).all() and found:
        assert {finding.code for finding in found} == {"PP215"}


def test_a_missing_shard_is_named_with_its_range_and_how_many_tensors_lack_it():
    one = SIDES[2, 0]
    lacking = {name: tuple(part for part in shards if part.rank != 1) for name, shards in one.shards.items()}
    (found, *_) = errors(dataclasses.replace(one, shards=lacking, name="saved"), identity_map(one.tensors), one)
    assert found.code == "PP210"
    assert found.message == "saved: of `embed.weight` [24, 16] no shard has rows 12..23 (and 17 more tensors)"


def test_a_shard_that_two_ranks_saved_is_named_with_both():
    one = SIDES[2, 0]
    first = one.shards["embed.weight"][0]
    twice = with_parts(one, "embed.weight", (*one.shards["embed.weight"], HeldShard(first.shard, 3, first.file)))
    (found,) = errors(dataclasses.replace(twice, plan=None), identity_map(one.tensors), one)
    assert "rows 0..11 is in 2 shards, rank 0 and rank 3" in found.message


def test_missing_and_unexpected_names_are_reported_with_the_nearest():
    one = SIDES[0, 0]
    tensors, shards = dict(one.tensors), dict(one.shards)
    tensors["layer.0.mlp.gate.wieght"] = tensors.pop("layer.0.mlp.gate.weight")
    shards["layer.0.mlp.gate.wieght"] = shards.pop("layer.0.mlp.gate.weight")
    other = dataclasses.replace(one, tensors=tensors, shards=shards, name="saved", plan=None)
    missing, surplus = errors(other, identity_map(tensors), one)
    assert missing.code == surplus.code == "PP213"
    assert "`layer.0.mlp.gate.weight` (near: `layer.0.mlp.gate.wieght`)" in missing.message
    assert surplus.message == "saved has a tensor that plan does not have: `layer.0.mlp.gate.wieght`"


def test_a_model_of_more_layers_is_one_finding_with_their_number():
    deep = layout(TOPOLOGIES[0], {**DENSE, "num_layers": 12}, name="deep")
    (found,) = errors(SIDES[0, 0], identity_map(SIDES[0, 0].tensors), deep)
    assert found.message.startswith("deep needs 280 tensors that plan does not have: `layer.2.attn_norm.weight`")


def test_other_shapes_and_types_are_named():
    wide = layout(TOPOLOGIES[0], {**DENSE, "ffn_size": 64}, name="wide")
    assert codes(SIDES[0, 0], identity_map(SIDES[0, 0].tensors), wide) == {"PP214"}
    narrow = layout(TOPOLOGIES[0], run={"dtype": "float64"}, name="narrow")
    (found,) = errors(SIDES[0, 0], identity_map(SIDES[0, 0].tensors), narrow)
    assert found.code == "PP214"
    assert "`embed.weight` comes as float32, and float64 is needed" in found.message


def test_a_layer_that_is_saved_by_a_rank_without_it_is_reported():
    plan = lowered({"pp": 2, "tp": 1})
    one = SIDES[1, 0]
    name = "layer.1.mlp.up.weight"
    (part,) = one.shards[name]
    assert part.rank == 1
    shifted = with_parts(dataclasses.replace(one, plan=plan), name, [dataclasses.replace(part, rank=0)])
    (found,) = errors(one, identity_map(one.tensors), shifted)
    assert found.code == "PP213"
    assert found.message == "rank 0 of plan holds `layer.1.mlp.up.weight`, and computes with no layer that has it"


def with_a_copy(**said):
    """The embedding of an untied model read for the head, too, transposed."""
    one = layout(TOPOLOGIES[0], {**DENSE, "tied_embedding": False})
    right = identity_map(one.tensors)
    whole = right.tensors["embed.weight"].copies[0]
    head = dataclasses.replace(whole, region=whole_region((16, 24)), permutation=(1, 0))
    tensors = {**right.tensors, "head.weight": TensorMap("float32", (16, 24), (head,))}
    return one, StateMap(tensors, removed=frozenset({"head.weight"}), **said), one


def test_a_copy_is_a_warning_unless_it_is_reported_to_be_one():
    (found,) = prove(*with_a_copy())
    assert (found.code, found.severity) == ("PP216", Severity.WARNING)
    assert (
        "several tensors read `embed.weight` the whole of it: 2 times, for `embed.weight` and `head.weight`"
        in found.message
    )
    assert prove(*with_a_copy(duplicated=frozenset({"embed.weight"}))) == ()


def test_what_is_dropped_or_removed_is_not_lost():
    one = SIDES[0, 0]
    right = identity_map(one.tensors)
    shape = one.tensors["embed.weight"].shape
    low, high = Region((0, 0), (20, shape[1])), Region((20, 0), (4, shape[1]))
    copies = (right.tensors["embed.weight"].copies[0].restricted_to(low), RegionCopy(high, None, high))
    tensors = {**right.tensors, "embed.weight": TensorMap("float32", shape, copies)}
    (found,) = prove(one, StateMap(tensors), one)
    assert found.code == "PP215"
    assert found.message == "plan: nothing reads `embed.weight` rows 20..23"
    assert prove(one, StateMap(tensors, dropped={"embed.weight": (high,)}), one) == ()


def test_a_large_job_is_proved_by_what_is_alike():
    """Some 50 tensors of each layer are in a few distinct cuts: of twice the ranks they are looked at once."""
    model = {"num_layers": 8, "num_heads": 16, "hidden_size": 64, "ffn_size": 64, "vocab_size": 64}

    def work(dp):
        wide, narrow = ({"pp": pp, "tp": 4, "dp": dp} for pp in (4, 2))
        source, target = layout(wide, model, name="wide"), layout(narrow, model, name="narrow")
        assert sum(map(len, source.shards.values())) > 200 * dp
        assert prove(source, identity_map(source.tensors), target) == ()
        return num_calls(prove, source, identity_map(source.tensors), target)

    assert work(32) < 1.8 * work(16)
