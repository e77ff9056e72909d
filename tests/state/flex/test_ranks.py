"""Real ranks over gloo: Paddle's files there, read by us and by Paddle itself."""

import hashlib

import pytest

from pipeproof.state.checkpoint import tensor_md5s
from pipeproof.state.flex.flex_metadata import open_flex
from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.read_state import find_state, read_rank_state, read_whole
from pipeproof.state.state_layout import shards_of_rank, whole_state
from tests.state.flex.paddle_checkpoints import names_by_key, require_equal, whole_tensors
from tests.state.flex.ranks import in_ranks, moe_plan, shard_of, values_of

pytestmark = pytest.mark.needs_paddle
FOUR, SHARES, TWO = {"pp": 2, "dp": 2}, {"dp": 4}, {"dp": 2}
STEP = "step-00000002"


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Results of four ranks that saved a state, and loaded it with Paddle on another topology; and for shares."""
    root = tmp_path_factory.mktemp("four")
    found = in_ranks(
        4,
        ["save", str(root), FOUR],
        ["load", str(root / STEP), {"tp": 2, "pp": 2}],
        ["save", str(root / "shares"), SHARES],
        ["load", str(root / "shares" / STEP), FOUR],
    )
    return root / STEP, found


@pytest.fixture(scope="module")
def two(tmp_path_factory, four):
    """The same for two ranks, and experiments."""
    root = tmp_path_factory.mktemp("two")
    return root / STEP, in_ranks(
        2,
        ["save", str(root), TWO],
        ["load", str(root / STEP), {"tp": 2}],
        ["load", str(four[0]), TWO],
        ["flattened", str(root / "matrix"), [4, 6], 13],
        ["flattened", str(root / "experts"), [2, 2, 4], 10],
        ["leave_early", str(root / "early")],
        ["load_without_gpu", str(root / "gpu")],
    )


@pytest.mark.slow(but=["two"])
@pytest.mark.parametrize("ranks", ["four", "two"])
def test_what_ranks_save_is_whole_for_us_with_our_index_and_with_paddles_metadata_alone(request, ranks):
    directory, _ = request.getfixturevalue(ranks)
    plan = moe_plan(**(FOUR if ranks == "four" else TWO)).plan
    values = values_of(plan)
    require_equal(whole_tensors(open_checkpoint(directory)), values)
    require_equal(whole_tensors(open_flex(directory)), values)
    found = {name: one.content.tobytes() for name, one in read_whole(find_state(directory)).items()}
    assert found == {name: value.tobytes() for name, value in values.items()}


def test_the_shards_in_the_index_are_those_of_the_plan_each_in_one_file(four):
    index = find_state(four[0]).index
    plan = moe_plan(**FOUR).plan
    wanted = {piece.shard for rank in range(4) for piece in shards_of_rank(plan, rank)}
    held = [shard for file in index.files for shard in file.shards]
    assert len(held) == len(wanted)
    assert set(held) == wanted
    assert all(hashlib.sha256((four[0] / one.name).read_bytes()).hexdigest() == one.sha256 for one in index.files)
    assert len({len(file.shards) for file in index.files} - {0}) >= 1
    assert not list(four[0].parent.glob(".step*"))


@pytest.mark.slow
def test_paddle_merges_it_to_the_tensors_that_we_open(two):
    from paddle.distributed import load_merged_state_dict

    keys = names_by_key(open_flex(two[0]))
    merged = load_merged_state_dict(str(two[0]), safetensors=True)
    values = values_of(moe_plan(**TWO).plan)
    assert {keys[key]: tensor._md5sum() for key, tensor in merged.items()} == {
        name: hashlib.md5(value.tobytes()).hexdigest() for name, value in values.items()
    }


def test_what_paddle_loads_on_other_topologies_is_what_each_rank_has_there(four, two):
    assert [loaded for _, loaded, *_ in four[1]] == [[], [], [], []]
    assert [found[1:3] for found in two[1]] == [[[], []], [[], []]]


def test_paddle_mixes_up_moments_of_experts_where_a_share_begins_and_ends_in_rows_of_one_number(four, two):
    wrong = {name for *_, loaded in four[1] for name in loaded}
    tensors = whole_state(moe_plan(**FOUR).plan)
    assert wrong == {name for name, one in tensors.items() if one.kind == "moment" and "experts.down" in name}
    directory = four[0].parent / "shares" / STEP
    require_equal(whole_tensors(open_checkpoint(directory)), values_of(moe_plan(**SHARES).plan))
    of_matrix, of_experts = zip(*(found[3:5] for found in two[1]), strict=True)
    assert of_matrix == (0, 0)
    assert min(of_experts) > 0


def test_what_each_rank_of_another_topology_reads_is_its_shard(four):
    at = moe_plan(tp=2, dp=2)
    values = values_of(at.plan)
    for rank in range(4):
        found = read_rank_state(find_state(four[0]), at.plan, rank)
        for piece in shards_of_rank(at.plan, rank):
            expected = shard_of(values[piece.shard.tensor], piece.shard)
            assert found[piece.weight, piece.slot].content.tobytes() == expected.tobytes()


def test_paddle_comes_back_from_saving_before_the_others_have_written(two):
    assert two[1][0][5]


def test_paddle_loads_across_ranks_on_gpus_alone(two):
    assert [found[6] for found in two[1]] == ["No available device found."] * 2


def test_fleets_optimizers_save_what_ours_computes(tmp_path):
    """AdamW, and its two sharded forms: V1 has whole moments on each rank, V2 ranges of elements."""
    for kind in ("adamw", "v1", "v2"):
        expected, again = (result for (result,) in in_ranks(2, ["fleet", str(tmp_path / kind), kind]))
        assert tensor_md5s(open_checkpoint(tmp_path / kind)) == expected == again
    places = {kind: open_checkpoint(tmp_path / kind).shards["optimizer/moment1/0.weight"] for kind in ("v1", "v2")}
    assert [held.shard.flat for held in places["v1"]] == [None]
    assert sorted(held.shard.flat for held in places["v2"]) == [(0, 512), (512, 560)]
