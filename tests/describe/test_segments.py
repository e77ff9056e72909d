"""The partitions `stages: layer:REGEX` and `stages: uniform` equal the partitions of Paddle's own `SegmentLayers`."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.stages.describe.layer import CLASS_NAMES, layer_order, layer_prefix
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.partition import cut_behind, even_shares
from tests.plans import plan_spec

FLEET_DEFAULT = "layer:TransformerLayer|EmptyLayer"
METHODS = (FLEET_DEFAULT, "layer:transformerlayer", "layer:Empty", "layer:.", "layer:^GPT")
SIZES = [*product((1, 3, 4, 8, 9), (0, 1, 2), (0, 2, 3), (1, 2, 3, 4))]


def spec(num_layers, head, tail, pp, stages, *, num_chunks=1, norm="after_tail_empty"):
    model = {"num_layers": num_layers, "empty_layers": {"head": head, "tail": tail}, "final_norm": norm}
    schedule = {"num_micro_batches": 2 * pp * num_chunks}
    if num_chunks > 1:
        schedule |= {"kind": "interleaved", "num_chunks": num_chunks}
    return plan_spec(model=model, topology={"pp": pp}, schedule=schedule, stages=stages)


def ours(plan):
    try:
        return stage_layers(plan)
    except BadPlanAtError:
        return None


def fleets(plan):
    """The same, asked of Paddle; None where it refuses."""
    from paddle import nn
    from paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers import LayerDesc, SegmentLayers

    classes = {word: type(name, (nn.Layer,), {}) for word, name in CLASS_NAMES.items()}
    names = layer_order(plan.model)
    descriptions = [LayerDesc(classes[layer_prefix(name)]) for name in names]
    num_chunks = plan.schedule.num_chunks
    try:
        cutter = SegmentLayers(
            descriptions,
            plan.topology.pp,
            plan.stages,
            num_virtual_pipeline_stage=num_chunks if num_chunks > 1 else None,
        )
        bounds = cutter.do_segment()
    except AssertionError:
        return None
    return tuple(names[first:end] for first, end in pairwise(bounds))


@pytest.mark.needs_paddle
@pytest.mark.parametrize(("method", "num_chunks"), [*product(METHODS, (1, 2, 3)), ("uniform", 1)])
def test_paddle_cuts_alike(method, num_chunks):
    answers = []
    for num_layers, head, tail, pp in SIZES:
        for norm in ("after_tail_empty", "before_tail_empty"):
            plan = spec(num_layers, head, tail, pp, method, num_chunks=num_chunks, norm=norm)
            answers.append(ours(plan))
            assert answers[-1] == fleets(plan), (num_layers, head, tail, pp, norm)
    assert any(answers) == (method != "layer:^GPT" or num_chunks < 3)  # embedding and head are two
    assert method == "uniform" or None in answers


def test_fleets_own_example():
    cut = stage_layers(spec(9, 1, 2, 4, FLEET_DEFAULT))
    assert [sum(name.startswith("layer.") for name in names) for names in cut] == [2, 3, 3, 1]
    assert cut[0][:3] == ("embed", "empty.0", "layer.0")
    assert cut[-1] == ("layer.8", "empty.1", "empty.2", "norm", "head")
    assert cut == stage_layers(spec(9, 1, 2, 4, None))  # and the cut without `stages` counts the same layers


def test_the_norm_goes_where_the_cut_leaves_it():
    cut = stage_layers(spec(2, 0, 2, 2, FLEET_DEFAULT, norm="before_tail_empty"))
    assert cut == (("embed", "layer.0", "layer.1"), ("norm", "empty.0", "empty.1", "head"))
    assert stage_layers(spec(2, 0, 2, 2, FLEET_DEFAULT))[1] == ("empty.0", "empty.1", "norm", "head")


@given(st.lists(st.booleans(), min_size=1, max_size=30).filter(any), st.integers(1, 6))
def test_parts_end_behind_what_they_count(counted, num_parts):
    if sum(counted) < num_parts:
        return
    names = [str(place) for place in range(len(counted))]
    shares = even_shares(sum(counted), num_parts)
    parts = cut_behind(names, counted, shares)
    assert [name for part in parts for name in part] == names
    assert [sum(counted[int(name)] for name in part) for part in parts] == shares
    assert all(counted[int(part[-1])] for part in parts[:-1])


@pytest.mark.parametrize(
    ("stages", "message", "help_text"),
    [
        (
            "layer:TransformerLayer",
            "PP143: `TransformerLayer` matches 3 layers",
            "count 1 more",
        ),
        (
            "layer:Decoder",
            "PP143: `Decoder` matches .* no layer",
            "the classes are GPTEmbedding, TransformerLayer",
        ),
    ],
)
def test_layers_that_do_not_divide(stages, message, help_text):
    plan = spec(3, 0, 0, 2, stages)
    with pytest.raises(BadPlanAtError, match=message) as caught:
        stage_layers(plan)
    assert help_text in caught.value.findings[0].help
    assert caught.value.path == ("stages",)


def test_fewer_layers_than_stages():
    with pytest.raises(BadPlanAtError, match="PP110: 4 layers cannot be cut evenly onto 5 stages"):
        stage_layers(spec(1, 0, 0, 5, "uniform"))
    with pytest.raises(BadPlanAtError, match="PP110: 2 transformer and empty layers"):
        stage_layers(spec(1, 1, 0, 3, None))


def test_dualpipe_v_is_cut_uniformly_as_fleet_does():
    schedule = {"kind": "dualpipe_v", "num_chunks": 2}
    plan = plan_spec(model={"num_layers": 6}, schedule=schedule, stages="uniform")
    assert [len(names) for names in stage_layers(plan)] == [2, 2, 2, 3]
