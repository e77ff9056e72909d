"""I and a later W equal B: bit for bit, with every collective in I and every tensor freed by W."""

import gc
import weakref

import numpy as np
import paddle
import pytest

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import micro_batch
from pipeproof.stages.paddle.stage import PaddleStage
from tests.features import GPT3, QWEN3
from tests.stages.references import make_plan, same_bits
from tests.stages.world import World

pytestmark = pytest.mark.needs_paddle

NUM_MICRO_BATCHES = 3
PARTS = {"whole": (0, 7), "first": (0, 2), "embed": (0, 1), "middle": (2, 4), "norm": (5, 6), "head": (6, 7)}
"""Layers of a stage: of 4 blocks between the embedding and norm and head."""
ALL_PARTS = {**GPT3, **QWEN3, "tied_embedding": False}
MOE = {"moe": {"num_experts": 6, "top_k": 2, "ffn_size": 6, "num_shared_experts": 1, "dense_layers": 1}}
STREAMS = {"hyper_connections": {"streams": 3, "sinkhorn_iterations": 4}}


class Ranks:
    """One stage on all tensor-parallel ranks, with inputs and output gradients that are drawn."""

    def __init__(self, plan, part):
        self.plan = plan
        self.world = World(paddle, tp=plan.topology.tp)
        layers = describe_gpt(plan)[slice(*PARTS[part])]
        self.stages = [PaddleStage(plan, layers, rank, self.world.ranks[rank]) for rank in range(plan.topology.tp)]
        for stage in self.stages:
            for weight in stage.parameters.values():
                weight.grad = paddle.zeros_like(weight)
        self.embeds, self.has_loss = part in ("whole", "first", "embed"), part in ("whole", "head")

    def drawn(self, purpose, index, shape):
        generator = np.random.default_rng([len(purpose), index])
        return paddle.to_tensor(generator.standard_normal(shape).astype(self.plan.run.dtype))

    def forward(self, rank, index):
        """The input, None of a stage that embeds, and the output."""
        model, topology = self.plan.model, self.plan.topology
        length = model.seq_length // (topology.tp if topology.sequence_parallel else 1)
        given = (
            None
            if self.embeds
            else self.drawn("input", index, [length, 2, self.plan.gpt.num_streams * model.hidden_size])
        )
        if given is not None:
            given.stop_gradient = False
        return given, self.stages[rank].forward(given, micro_batch(self.plan, 0, index), step=0, index=index)

    def gradient_of(self, output, index):
        return None if self.has_loss else self.drawn("output", index, output.shape)

    def gradients(self):
        return {
            f"{rank}/{name}": weight.grad.numpy()
            for rank, stage in enumerate(self.stages)
            for name, weight in stage.parameters.items()
        }

    def issued(self):
        """Number of collectives that each rank has issued so far."""
        return [len(rank.issued) for rank in self.world.ranks]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_weight_gradients_that_wait_have_the_bits_of_the_whole_backward(tp, sequence_parallel, dtype, part):
    topology = {"tp": tp, "sequence_parallel": sequence_parallel}
    assert_equal_backwards(make_plan(topology=topology, run={"dtype": dtype}), part)


@pytest.mark.parametrize(
    ("part", "model"),
    [
        *((part, ALL_PARTS) for part in PARTS),
        *((part, model) for part in ("first", "middle") for model in (MOE, STREAMS)),
    ],
)
def test_weight_gradients_of_other_layers_wait_too(part, model):
    """Biases, positions, norms, experts and routers, gates of streams."""
    assert_equal_backwards(make_plan(model=model, topology={"tp": 2, "sequence_parallel": True}), part)


def assert_equal_backwards(plan, part):
    tp, whole, split = plan.topology.tp, Ranks(plan, part), Ranks(plan, part)

    def all_at_once(rank):
        given = []
        for index in range(NUM_MICRO_BATCHES):
            received, output = whole.forward(rank, index)
            whole.stages[rank].backward_input(output, whole.gradient_of(output, index)).accumulate()
            given.append(None if received is None else received.grad.numpy().tobytes())
        return given

    def input_gradients(rank):
        """Input gradients of all micro-batches before any weight gradient, after the last forward."""
        ran = [split.forward(rank, index) for index in range(NUM_MICRO_BATCHES)]
        waiting = []
        for index, (_, output) in enumerate(ran):
            waiting.append(split.stages[rank].backward_input(output, split.gradient_of(output, index)))
        return waiting, [None if received is None else received.grad.numpy().tobytes() for received, _ in ran]

    given = whole.world.run(all_at_once)
    ran = split.world.run(input_gradients)
    assert [inputs for _, inputs in ran] == given
    assert not any(gradient.any() for gradient in split.gradients().values())
    issued = split.issued()
    assert all(issued) == (tp > 1 and part != "norm")
    split.world.run(lambda rank: [gradients.accumulate() for gradients in ran[rank][0]])
    assert split.issued() == issued == whole.issued(), "a weight gradient issued a collective"
    assert all(gradient.any() for gradient in split.gradients().values())
    assert same_bits(split.gradients(), whole.gradients()) == []


@pytest.fixture
def pending():
    """A stage after its input-gradient pass, with the work that waits for W."""
    ranks = Ranks(make_plan(), "whole")
    _, output = ranks.forward(0, 0)
    return ranks, ranks.stages[0].backward_input(output, None)


def test_weight_gradients_compute_no_forward_again(pending, monkeypatch):
    ranks, gradients = pending

    def refuse(*args, **kwargs):
        raise AssertionError("a forward operation")

    monkeypatch.setattr("pipeproof.stages.paddle.weights.paddle.matmul", refuse)
    monkeypatch.setattr("pipeproof.stages.paddle.weights.F.embedding", refuse)
    gradients.accumulate()
    assert all(gradient.any() for gradient in ranks.gradients().values())


def test_what_a_weight_gradient_needs_lives_until_it_is_computed(pending):
    _, gradients = pending
    kept = [weakref.ref(tensor) for use in gradients._uses for tensors in use.args for tensor in tensors]
    gc.collect()
    assert len(kept) == 2 * (1 + 4 * 7 + 1 + 1), "one value and its gradient for each weight"
    assert all(reference() is not None for reference in kept)
    gradients.accumulate()
    gc.collect()
    assert not any(reference() is not None for reference in kept)


def test_a_weight_gradient_frees_each_use_as_it_goes(pending, monkeypatch):
    """W needs less and less: nothing is held until its end."""
    _, gradients = pending
    kept = [weakref.ref(gradient) for use in gradients._uses for gradient in use.args[1]]
    alive, backward = [], paddle.autograd.backward

    def counted(*args):
        alive.append(sum(reference() is not None for reference in kept))
        backward(*args)

    monkeypatch.setattr("pipeproof.stages.paddle.weights.paddle.autograd.backward", counted)
    gradients.accumulate()
    assert alive == list(range(len(kept), 0, -1))


def test_the_input_gradient_frees_what_no_weight_gradient_needs():
    ranks = Ranks(make_plan(), "middle")
    received, output = ranks.forward(0, 0)
    gradients = ranks.stages[0].backward_input(output, ranks.gradient_of(output, 0))
    graph = weakref.ref(output)
    del received, output
    gc.collect()
    assert graph() is None
    gradients.accumulate()
    assert all(gradient.any() for gradient in ranks.gradients().values())


def test_weight_gradients_are_added_once(pending):
    ranks, gradients = pending
    gradients.accumulate()
    once = {name: gradient.copy() for name, gradient in ranks.gradients().items()}
    gradients.accumulate()
    assert same_bits(ranks.gradients(), once) == []


RELEASED = [
    *((part, {"model": model}) for part in ("first", "embed", "middle", "norm") for model in ({}, ALL_PARTS)),
    ("first", {"model": STREAMS}),
    ("middle", {"memory": {"recompute": "selective"}}),
    ("middle", {"memory": {"recompute": "full"}}),
]


@pytest.mark.parametrize(("part", "sections"), RELEASED)
def test_an_output_can_be_given_back_before_the_backward(part, sections):
    """Autograd needs the tensor that was sent, but not its values (``buffers.free_output``)."""
    plan = make_plan(**sections)
    kept, released = Ranks(plan, part), Ranks(plan, part)
    for ranks in (kept, released):
        _, output = ranks.forward(0, 0)
        gradient = ranks.gradient_of(output, 0)
        if ranks is released:
            output._clear_data()
        ranks.stages[0].backward_input(output, gradient).accumulate()
    assert all(gradient.any() for gradient in kept.gradients().values())
    assert same_bits(released.gradients(), kept.gradients()) == []


def test_keys_and_values_are_stored_only_until_the_last_split():
    plan = make_plan(schedule={"kind": "seq1f1b", "num_sequence_splits": 4})
    stage = PaddleStage(plan, describe_gpt(plan))
    batch = micro_batch(plan, 0, 0)
    outputs, read_later = [], []
    for split in range(4):
        outputs.append(stage.forward(None, batch, step=0, index=0, split=split))
        kept = list(stage._sequence_keys._sequences.values())
        read_later += [weakref.ref(tensor) for keys, values in kept for tensor in (*keys, *values)]
        assert len(kept) == (4 if split < 3 else 0), "one entry for each block"
        assert all(len(keys) == len(values) == split + 1 for keys, values in kept)
    assert all(reference() is not None for reference in read_later)
    while outputs:
        stage.backward_input(outputs.pop(), None).accumulate()
    gc.collect()
    assert all(reference() is None for reference in read_later)
