"""Recomputation in backward: the same bits, and less memory between forward and backward."""

import gc
import weakref

import numpy as np
import paddle
import pytest

from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.synthetic import micro_batch
from pipeproof.stages.paddle.stage import PaddleStage
from tests.describe.test_memory import held
from tests.stages.references import make_plan, same_bits
from tests.stages.test_split_backward import MOE, PARTS, STREAMS, Ranks

pytestmark = pytest.mark.needs_paddle

GROUPS = {"num_kv_heads": 2, "head_size": 6}
MLA = {"mla": {"q_rank": 6, "kv_rank": 4, "nope_head_size": 2, "rope_head_size": 4, "value_head_size": 3}}
AGAIN = ["selective", "full"]


MODULES = ["core_attn", "mlp", "moe"]


def make(recompute, **sections):
    """A plan with this ``memory.recompute``; ``modules`` and ``shared`` are selective, of MLPs or shared experts."""
    has_experts = "moe" in sections.get("model", {})
    modules = {"modules": MODULES[: 2 + has_experts], "shared": ["shared_experts"]}.get(recompute)
    memory = {"recompute": recompute} if modules is None else {"recompute": "selective", "recompute_modules": modules}
    return make_plan(memory=memory, **sections)


def allocated():
    """Bytes that tensors hold on the host."""
    gc.collect()
    return paddle.base.core.host_memory_stat_current_value("Allocated", 0)


def gone_back(plan, part):
    """A stage on its ranks after three micro-batches, and its gradients, also of its inputs."""
    ranks = Ranks(plan, part)

    def steps(rank):
        ran = [ranks.forward(rank, index) for index in range(3)]
        waiting = [
            ranks.stages[rank].backward_input(output, ranks.gradient_of(output, index))
            for index, (_, output) in enumerate(ran)
        ]
        for gradients in waiting:
            gradients.accumulate()
        return {f"given {index}": given.grad.numpy() for index, (given, _) in enumerate(ran) if given is not None}

    given = ranks.world.run(steps)
    return ranks, {f"{rank}/{n}": g for rank, own in enumerate(given) for n, g in own.items()} | ranks.gradients()


@pytest.mark.slow(
    but=[
        "model0-2-True-whole",
        "model1-1-False-middle",
        "model2-2-True-middle",
        "model3-2-True-middle",
        "model3-1-False-whole",
        "model4-1-False-middle",
        "model1-2-True-whole",
        "model5-1-False-middle",
    ]
)
@pytest.mark.parametrize("part", ["whole", "middle"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
@pytest.mark.parametrize("model", [{}, GROUPS, MLA, MOE, {**MLA, **MOE, "activation_order": "bsh"}, STREAMS])
def test_gradients_have_the_bits_of_those_without(model, tp, sequence_parallel, part):
    sections = {"model": model, "topology": {"tp": tp, "sequence_parallel": sequence_parallel}}
    _, kept = gone_back(make("none", **sections), part)
    assert all(gradient.any() for name, gradient in kept.items() if ".experts." not in name)
    for recompute in (*AGAIN, "modules", *(["shared"] if "moe" in model else [])):
        _, again = gone_back(make(recompute, **sections), part)
        assert same_bits(again, kept) == []


@pytest.mark.parametrize("model", [{}, MLA, MOE])
def test_a_block_issues_its_forwards_collectives_once_more_and_attentions_core_none(model):
    sections = {"model": model, "topology": {"tp": 2, "sequence_parallel": True}}
    once, blocks = {}, describe_gpt(make("none", **sections))[slice(*PARTS["middle"])]
    for recompute in ("none", *AGAIN):
        ranks, _ = gone_back(make(recompute, **sections), "middle")
        once[recompute] = [one.label for one in ranks.world.ranks[0].issued]
    assert once["selective"] == once["none"]
    forward = [c.label for layer in blocks for c in layer.forward_collectives]
    assert len(once["full"]) == len(once["none"]) + 3 * len(forward)
    assert once["full"][: 3 * len(forward)] == 3 * forward
    last = [c.label for c in blocks[-1].forward_collectives]
    assert once["full"][3 * len(forward) :][: len(last)] == last


@pytest.mark.parametrize("model", [{}, GROUPS, MLA, MOE, STREAMS])
@pytest.mark.usefixtures("few_objects")
def test_what_a_micro_batch_holds_between_its_forward_and_its_backward(model):
    """Bytes of the host's allocator: of two blocks their inputs alone, or all but attention's probabilities."""
    now = {}
    for recompute in ("none", *AGAIN):
        ranks = Ranks(make(recompute, model=model), "middle")
        before = allocated()
        given, output = ranks.forward(0, 0)
        after_forward = allocated()
        gradients = ranks.stages[0].backward_input(output, ranks.gradient_of(output, 0))
        del given, output
        after_input = allocated()
        gradients.accumulate()
        assert allocated() == before
        now[recompute] = after_forward - before, after_input - before
    of_boundary = 4 * 8 * 2 * 16 * ranks.plan.gpt.num_streams
    assert now["full"][0] == 2 * of_boundary + of_boundary  # with the output, which is the next stage's
    core = 4 * 4 * 2 * 8 * 8  # probabilities of four heads, two rows, eight queries and as many keys
    counted = held(make_plan(memory={"attention": "unfused"}, model=model), ("layer.1",), MicroBatchSize(8, 2))
    assert core == sum(one.num_bytes for one in counted if one.name == "attn.core")
    assert now["none"][0] - now["selective"][0] == 2 * core
    assert now["none"][1] == now["selective"][1] == now["full"][1] > now["full"][0], "W needs the same tensors in all"


@pytest.mark.parametrize("model", [{}, MLA, MOE])
@pytest.mark.usefixtures("few_objects")
def test_a_whole_backward_adds_the_weights_of_a_block_before_the_next(model):
    """The bits of a backward in two parts, and nothing is kept when I has ended."""
    _, kept = gone_back(make("full", model=model), "middle")
    ranks = Ranks(make("full", model=model), "middle")
    ranks.stages[0].adds_by_block = True
    before = allocated()
    for index in range(3):
        given, output = ranks.forward(0, index)
        gradients = ranks.stages[0].backward_input(output, ranks.gradient_of(output, index))
        del given, output
        assert index == 0 or allocated() == before, "the first one makes the gradients' buffers"
        gradients.accumulate()
        before = allocated()
    assert same_bits(ranks.gradients(), {name: g for name, g in kept.items() if "given" not in name}) == []


@pytest.mark.usefixtures("few_objects")
def test_a_recomputed_mlp_keeps_nothing_inside():
    """Gate, up and their product of two blocks are gone, and silu(gate), which Paddle keeps too."""
    now = {}
    for recompute in ("selective", "modules"):
        ranks = Ranks(make(recompute), "middle")
        before = allocated()
        given, output = ranks.forward(0, 0)
        now[recompute] = allocated() - before
        gradients = ranks.stages[0].backward_input(output, ranks.gradient_of(output, 0))
        del given, output
        gradients.accumulate()
        assert allocated() == before
    tokens, ffn = 8 * 2, make("none").gpt.ffn_size
    assert now["selective"] - now["modules"] >= 2 * 4 * 4 * tokens * ffn


@pytest.mark.usefixtures("few_objects")
def test_one_block_at_a_time_is_computed_again(monkeypatch):
    ranks = Ranks(make("full"), "middle")
    calls, alive, made = [], [], []
    block = PaddleStage._block

    def watched(self, activation, name, **unit):
        calls.append(name)
        gc.collect()
        alive.append(sum(reference() is not None for reference in made))
        output = block(self, activation, name, **unit)
        made.append(weakref.ref(output))
        return output

    monkeypatch.setattr(PaddleStage, "_block", watched)
    _, output = ranks.forward(0, 0)
    assert calls == ["layer.1", "layer.2"]
    made.clear()
    ranks.stages[0].backward_input(output, ranks.gradient_of(output, 0)).accumulate()
    assert calls[2:] == ["layer.2", "layer.1"]
    assert alive[2:] == [0, 0], "recomputed tensors of a block are freed before the next"
    assert len(made) == 2


@pytest.mark.parametrize("recompute", AGAIN)
@pytest.mark.usefixtures("few_objects")
def test_splits_read_keys_of_earlier_splits_and_all_memory_is_freed(recompute):
    def gradients(which):
        plan = make(which, schedule={"kind": "seq1f1b", "num_sequence_splits": 4})
        stage, batch = PaddleStage(plan, describe_gpt(plan)), micro_batch(plan, 0, 0)
        for weight in stage.parameters.values():
            weight.grad = paddle.zeros_like(weight)
        before = allocated()
        outputs = [stage.forward(None, batch, step=0, index=0, split=split) for split in range(4)]
        there = allocated() - before
        while outputs:
            stage.backward_input(outputs.pop(), None).accumulate()
        assert allocated() == before
        return there, {name: weight.grad.numpy() for name, weight in stage.parameters.items()}

    (most, kept), (there, again) = gradients("none"), gradients(recompute)
    assert there < most
    assert same_bits(again, kept) == []


def test_what_crosses_borders_is_seen_once():
    def seen(which):
        ranks, watch = Ranks(make(which), "middle"), LayerWatch()
        given = ranks.drawn("input", 0, [8, 2, 16])
        given.stop_gradient = False
        output = ranks.stages[0].forward(given, micro_batch(ranks.plan, 0, 0), step=0, index=0, watch=watch)
        ranks.stages[0].backward_input(output, ranks.gradient_of(output, 0)).accumulate()
        return watch.take()

    kept = seen("none")
    assert len(kept) == 2 * 2 * 2
    assert all(np.isfinite(array).all() for array in kept.values())
    for recompute in AGAIN:
        assert same_bits(seen(recompute), kept) == []
