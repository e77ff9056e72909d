"""Layers on stages, groups on the mesh, roles, numbers and random draws: who is who."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.comm.plan_context import Mesh
from pipeproof.schedule.op_table import Group, Row, build_graph
from pipeproof.schedule.ops import META_KINDS, TRANSFER_KINDS, parse_op
from pipeproof.verify.check_plan import check_graph, check_subject
from pipeproof.verify.declared_facts import Facts, LayerNumber, RngDraw, RngFacts, RngRegion, Role
from tests.plans import subject
from tests.verify.programs import codes, errors, group, mutated, program


def with_facts(facts, one=None):
    return dataclasses.replace(one or subject(), facts=facts)


V_PLACEMENT = ("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")


# --- layers and roles ---


def numbers(*stages):
    """Facts of layers that compute under these numbers, stage by stage."""
    return tuple(LayerNumber(s, place, n) for s, layers in enumerate(stages) for place, n in enumerate(layers))


def misnumbered(stage, place, number, right, other=""):
    here = f"layer {place} of stage {stage}"
    return f"{here} computes as layer {number} of the model{other}; by its place it is layer {right}"


TWICE = ", as layer {} of stage 0 does"


@pytest.mark.parametrize(
    ("stages", "reported"),
    [
        ([[0, 1, 2], [3]], []),
        # offset = rank * (4 layers / 2 ranks), but the cut is uneven
        ([[0, 1, 2], [2]], [misnumbered(1, 0, 2, 3, TWICE.format(2))]),
        # counted from its own stage
        ([[0, 1], [0, 1]], [misnumbered(1, 0, 0, 2, TWICE.format(0)), misnumbered(1, 1, 1, 3, TWICE.format(1))]),
        ([[0, 1], [2]], ["the stages hold 3 layers, and the model has 4"]),
        ([[1, 0], [2, 3]], [misnumbered(0, 0, 1, 0), misnumbered(0, 1, 0, 1)]),
    ],
)
def test_numbers_of_layers(stages, reported):
    one = with_facts(Facts(num_layers=4, layer_numbers=numbers(*stages)))
    assert [finding.message for finding in errors(one)] == reported
    assert codes(one) == ({"PP117"} if reported else set())


def test_roles_come_from_stages():
    last_rank = Facts(roles=(Role(0, "embedding"), Role(1, "loss")))
    assert codes(with_facts(last_rank)) == set()  # two ranks, two stages
    reported = [finding.message for finding in errors(program(*V_PLACEMENT, facts=last_rank))]
    assert reported == [
        "rank 1 builds the loss, but holds stage 1 and 2; the loss belongs to stage 3",
        "rank 0 holds stage 3 and builds no loss",
    ]
    replicas = subject(topology={"pp": 2, "dp": 2})
    one_missing = Facts(roles=(Role(0, "embedding"), Role(1, "embedding"), Role(2, "loss")))
    assert [f.message for f in errors(with_facts(one_missing, replicas))] == [
        "rank 3 (pp 1, dp 1) holds stage 1 and builds no loss"
    ]


def test_facts_are_part_of_the_digest():
    base = subject()
    facts = Facts(roles=(Role(0, "embedding"), Role(1, "loss")))
    assert check_subject(with_facts(facts, base)).digest != check_subject(base).digest
    graph = program("0F0").graph
    assert check_graph(graph, facts=Facts(num_layers=1)).digest != check_graph(graph).digest


# --- random draws ---

MESH = Mesh(("tp", "dp"), (2, 2))
REGIONS = (RngRegion("hidden", ("dp",)), RngRegion("shard", ("dp", "tp")))


def draws(key):
    """Every rank draws in both regions of two layers for two micro-batches, with ``key(rank, layer, mb, region)``."""
    return tuple(
        RngDraw(rank, layer, micro_batch, region.name, key(rank, layer, micro_batch, region.name), replay=replay)
        for replay in (False, True)
        for rank in range(4)
        for layer in ("layer.0", "layer.1")
        for micro_batch in range(2)
        for region in REGIONS
    )


def right_key(rank, layer, micro_batch, region):
    coords = MESH.coords(rank)
    over = {"hidden": (coords["dp"],), "shard": (coords["dp"], coords["tp"])}[region]
    return f"{layer}/{micro_batch}/{region}/{over}"


def rng(key, regions=REGIONS):
    return program(*["0F0 0F1"] * 4, facts=Facts(rng=RngFacts(MESH, regions, draws(key))))


@pytest.mark.parametrize(
    ("wrong_key", "reported"),
    [
        (
            lambda r, *rest: right_key(r, *rest) + ("!" if (r, *rest) == (1, "layer.0", 0, "hidden") else ""),
            "both hold",
        ),
        (lambda r, layer, m, region: right_key(0, layer, m, region), "draws the same numbers"),  # no rank in the key
        (lambda r, layer, m, region: right_key(r, "layer", m, region), "draws the same numbers"),
        (lambda r, layer, m, region: right_key(r, layer, 0, region), "draws the same numbers"),
        (lambda r, layer, m, region: right_key(r, layer, m, "shard"), "both hold"),
    ],
)
def test_keys_of_draws(wrong_key, reported):
    assert codes(rng(right_key)) == set()
    assert codes(rng(wrong_key)) == {"PP120"}
    assert any(reported in finding.message for finding in errors(rng(wrong_key)))


def test_a_draw_is_the_forward_s_unless_it_is_marked_as_a_replay():
    """A recomputation without a forward repeats nothing."""

    def one_draw(**replay):
        of_ranks = [
            RngDraw(rank, "layer.0", 0, "hidden", f"dp {MESH.coords(rank)['dp']}", **replay) for rank in range(4)
        ]
        return program(*["0F0"] * 4, facts=Facts(rng=RngFacts(MESH, REGIONS, tuple(of_ranks))))

    assert codes(one_draw()) == set()
    assert codes(one_draw(replay=True)) == {"PP119"}


def test_a_replay_repeats_its_forward():
    one = rng(right_key)
    *rest, last = one.facts.rng.draws
    for changed, reported in (
        (dataclasses.replace(last, key="other"), "with the random state `other`, and the forward drew with"),
        (dataclasses.replace(last, micro_batch=7), "the forward drew nothing there"),
    ):
        facts = dataclasses.replace(one.facts, rng=dataclasses.replace(one.facts.rng, draws=(*rest, changed)))
        mutant = dataclasses.replace(one, facts=facts)
        assert codes(mutant) == {"PP119"}
        assert reported in errors(mutant)[0].message


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (RngDraw(0, "layer.0", 0, "attention", "a"), "region 'attention', which is not among"),
        (RngDraw(4, "layer.0", 0, "hidden", "a"), "rank 4, and the mesh has 4 ranks"),
    ],
)
def test_draws_that_cannot_be_are_refused(draw, message):
    with pytest.raises(ValueError, match=message):
        codes(program("0F0", facts=Facts(rng=RngFacts(MESH, REGIONS, (draw,)))))


# --- groups ---

GRID = {"pp": 1, "tp": 2, "dp": 2}


def regrouped(axis, *members):
    """The plan of 2 x 2 ranks with other groups along one axis; every rank uses the one that it is in."""
    base = subject(topology=GRID)
    groups = [g for g in base.graph.groups if g.axis != axis] + [Group(axis, ranks) for ranks in members]
    rows = base.graph.rows()
    for rank, mine in enumerate(rows):
        own = {g.axis: i for i, g in enumerate(groups) if rank in g.ranks}
        for i, row in enumerate(mine):
            if row.group >= 0:
                mine[i] = dataclasses.replace(row, group=own[base.graph.groups[row.group].axis])
    return base.with_graph(build_graph(rows, base.graph.tensors, groups))


@pytest.mark.parametrize(
    ("members", "reported"),
    [
        (((0, 1), (2, 3)), None),
        (((0, 3), (1, 2)), "is not the ranks along tp in their order, which are [0, 1]"),
        (((0, 2), (1, 3)), "is not the ranks along tp in their order, which are [0, 1]"),  # axes permuted
        (((1, 0), (3, 2)), "is not the ranks along tp in their order, which are [0, 1]"),
        (((0, 1, 2, 3),), "has 4 members, and the mesh has 2 ranks along tp: [0, 1]"),
    ],
)
def test_groups_of_a_plan_are_those_of_its_mesh(members, reported):
    one = regrouped("tp", *members)
    if reported is None:
        assert codes(one) == set()
    else:
        assert "PP309" in codes(one)
        found = errors(one)[0]
        assert f"the tp group {list(members[0])} {reported}" in found.message
        assert [op.op for op in found.witness.ops] == ["0F0/0.ALL_REDUCE:tp", "0F0/1.ALL_REDUCE:tp"]


def test_a_layer_that_is_listed_twice_is_in_order():
    one = subject(model={"num_layers": 1}, stages=[["embed", "layer.0", "layer.0"], ["norm", "head"]])
    assert "PP114" not in codes(one)
    assert codes(one)


def test_a_pp_group_may_hold_the_two_owners_of_a_tied_weight():
    base = subject(topology={"pp": 3})
    for ranks, expected in (((0, 2), set()), ((0, 1, 2), set()), ((2, 0), {"PP309"})):
        graph = build_graph(base.graph.rows(), base.graph.tensors, (Group("pp", ranks),))
        assert codes(base.with_graph(graph)) == expected


@pytest.mark.parametrize(
    ("axis", "ranks", "expected"),
    [
        ("tp", ("0F0", "0F0"), set()),
        ("tp", ("0F0", "1F0"), {"PP309"}),
        ("dp", ("0F0 2F0", "0F0 1F0"), {"PP309"}),
        ("pp", ("0F0", "1F0"), set()),
        ("tp", ("0F0", ""), set()),  # the computations of rank 1 are unknown
        ("world", ("0F0", "1F0"), set()),
    ],
)
def test_without_a_mesh_the_members_of_a_group_compute_the_same_stages(axis, ranks, expected):
    assert codes(program(*ranks, groups=(group(axis, 0, 1),))) == expected


def creation(*orders, groups):
    return program(*["0F0"] * len(orders), groups=groups, facts=Facts(group_creation=orders))


SQUARE = (group("tp", 0, 1), group("tp", 2, 3), group("dp", 0, 2), group("dp", 1, 3))


@pytest.mark.parametrize(
    ("orders", "reported"),
    [
        (((0, 2), (0, 3), (1, 2), (1, 3)), None),  # each rank makes its own, all fit into 0 1 2 3
        (((0, 1, 2, 3),) * 4, None),  # every rank makes all, as torch.distributed.new_group asks for
        (((0, 2), (3, 0), (1, 2), (3, 1)), None),  # 3 first: still one order
        (((0, 2), (3, 0), (2, 1), (1, 3)), "the orders do not fit into one"),  # a circle over four ranks
        (((0, 2), (0, 3), (1,), (1, 3)), "rank 2 is a member of group 2 (dp [0, 2]) and makes it never"),
        (((0, 2), (0, 3), (1, 2, 2), (1, 3)), "rank 2 is a member of group 2 (dp [0, 2]) and makes it 2 times"),
    ],
)
def test_groups_are_made_in_one_order(orders, reported):
    one = creation(*orders, groups=SQUARE)
    assert [finding.message[: len(reported or "")] for finding in errors(one)] == (
        [] if reported is None else [reported]
    )
    assert codes(one) == (set() if reported is None else {"PP310"})


@given(st.permutations(range(4)))
def test_any_one_order_will_do(order):
    own = [tuple(i for i in order if rank in SQUARE[i].ranks) for rank in range(4)]
    assert codes(creation(*own, groups=SQUARE)) == set()


@pytest.mark.parametrize(
    ("orders", "message"),
    [(((0,),), "is of 1 ranks, and the graph has 2"), (((0,), (1,)), "rank 1: group 1, but there are 1")],
)
def test_creation_facts_that_cannot_be_are_refused(orders, message):
    one = program("0F0", "0F0", groups=(group("tp", 0, 1),), facts=Facts(group_creation=orders))
    with pytest.raises(ValueError, match=message):
        codes(one)


# --- replicas ---


def cross_peers(rows, kinds=TRANSFER_KINDS):
    """Ranks of stage 0 and 1 exchange with the counterpart of the other replica, consistently on both sides."""
    other = {0: 1, 1: 0, 2: 3, 3: 2}
    for mine in rows:
        for i, row in enumerate(mine):
            if row.op.kind in kinds:
                mine[i] = dataclasses.replace(row, peer=other[row.peer])


def announce_shapes(rows):
    """Stage 0 sends stage 1 the shape of its first activation."""
    for rank in (0, 1):
        rows[rank].insert(0, Row(parse_op("0SEND_META_F0"), peer=rank + 2, tensor=rows[rank][1].tensor))
        rows[rank].append(Row(parse_op("WAIT(0SEND_META_F0)")))
        rows[rank + 2][:0] = [Row(parse_op("1RECV_META_F0"), peer=rank), Row(parse_op("WAIT(1RECV_META_F0)"))]


@pytest.mark.parametrize(("axis", "expected"), [("dp", {"PP311"}), ("ep", {"PP311"}), ("tp", set())])
def test_messages_stay_within_their_replica(axis, expected):
    base = mutated(subject(topology={"pp": 2, axis: 2}), announce_shapes)
    assert codes(base) == set()
    mutant = mutated(base, lambda rows: cross_peers(rows, META_KINDS))
    assert codes(mutant) == expected
    assert expected <= codes(mutated(base, cross_peers))  # the rules on transports may see tensors go astray too
    if expected:
        found = errors(mutant)[0]
        reported = f"0SEND_META_F0 goes from rank 0 (pp 0, {axis} 0) to rank 3 (pp 1, {axis} 1): {axis} differ"
        assert found.message == reported
        assert [(op.rank, op.op) for op in found.witness.ops] == [(0, "0SEND_META_F0"), (3, "1RECV_META_F0")]
