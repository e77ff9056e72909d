"""Family L: models that are not a chain: skips, states of earlier layers, encoders with ranks of their own."""

import dataclasses

from pipeproof.schedule.op_table import build_graph
from pipeproof.specs.axis_layout import sharded
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.gradient_facts import GradientFacts, Loss, ParameterGradient
from pipeproof.stages.describe.index_map import IndexMap, layout_map
from pipeproof.verify.declared_facts import Facts
from pipeproof.verify.subject import make_subject
from tests.zoo.a_layout import map_use
from tests.zoo.case import Case
from tests.zoo.e_scale import of_scale
from tests.zoo.programs import of_program, program

LAYERS = ("down", "middle", "inner", "up")


def of_layers(*edges):
    """Four layers on four stages, each with an output for the next one, and these edges past it."""
    layers = [{"name": name, "out": [{"shape": ["b", 4]}] if name != LAYERS[-1] else []} for name in LAYERS]
    return make_subject(
        plan_from_dict(
            {
                "pipeproof": 1,
                "model": {"kind": "layers", "layers": layers},
                "edges": [{"shape": ["b", 8], **edge} for edge in edges],
                "topology": {"pp": len(LAYERS)},
                "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2},
                "loss": {"normalization": "mean_of_micro_batches"},
            }
        )
    )


def of_edges(id, mutation, *edges, runs, kills):
    """A case of a plan with edges, whose mutant runs the programs of a plan with the edges ``runs``."""
    return Case(
        id,
        mutation,
        lambda: of_layers(*edges),
        lambda: of_layers(*edges).with_graph(of_layers(*runs).graph),
        kills,
    )


SKIP = {"name": "skip", "producer": "down", "consumers": ["up"], "route": "direct"}
BLOCK = {"name": "block", "producer": "down", "consumers": ["inner", "up"], "route": "direct"}
INDICES = {"name": "indices", "producer": "middle", "consumers": ["up"], "dtype": "int64"}
INDEXER = {"name": "indexer", "producer": "middle", "consumers": ["up"]}
AUXILIARY = [{"name": f"of_{name}", "producer": name, "consumers": ["up"]} for name in ("down", "inner")]

SAMPLES = (8,)
HALVES = [layout_map(SAMPLES, sharded(0), 2, rank) for rank in range(2)]
EVERY_SECOND = [IndexMap.of([(i, 2 * i + rank, 1) for i in range(4)]) for rank in range(2)]

ENCODERS = GradientFacts((Loss("main", 1, "1/global_tokens"),), (ParameterGradient("encoder", (0,)),))
TWO_ENCODERS = """
    group dp: 0 1
    rank 0: 0F0 0SEND_F0!{peer=2} 0RECV_B0!{peer=2} 0B0 \
            0REDUCE_GRAD:dp{group=0 reduction=sum writes=grad[encoder]} 0STEP
    rank 1: 0F1 0SEND_F1!{peer=2} 0RECV_B1!{peer=2} 0B1 \
            0REDUCE_GRAD:dp{group=0 reduction=sum writes=grad[encoder]} 0STEP
    rank 2: 1RECV_F0!{peer=0} 1F0{scale=1/global_tokens} 1B0 1SEND_B0!{peer=0} \
            1RECV_F1!{peer=1} 1F1{scale=1/global_tokens} 1B1 1SEND_B1!{peer=1} 1STEP
"""

LOSS_SCALE = """
    rank 0: 0F0 0SEND_F0! 0RECV_B0! 0B0 0SCALE_GRAD{scale=1/8} 0STEP
    rank 1: 1RECV_F0! 1F0{scale=8/global_tokens} 1B0 1SEND_B0! 1SCALE_GRAD{scale=1/8} 1STEP
"""

LEADER = """
    group tp: 1 2
    rank 0: 0F0 0SEND_F0!{peer=1} 0RECV_B0!{peer=1} 0B0 0F1 0SEND_F1!{peer=1} 0RECV_B1!{peer=1} 0B1
    rank 1: 1RECV_F0!{peer=0} 1BROADCAST0:tp{group=0} 1F0 1B0 1SEND_B0!{peer=0} \
            1RECV_F1!{peer=0} 1BROADCAST1:tp{group=0} 1F1 1B1 1SEND_B1!{peer=0}
    rank 2: 1BROADCAST0:tp{group=0} 1BROADCAST1:tp{group=0}
"""

GROUPS = """
    group pp: 0 2
    group pp: 1 3
    rank 0: 0F0 0SEND_F0!{peer=2}
    rank 1: 0F0 0SEND_F0!{peer=3}
    rank 2: 1RECV_F0!{peer=0} 1F0
    rank 3: 1RECV_F0!{peer=1} 1F0
"""


def repeated(subject, text):
    """The subject with each row of this text twice."""
    graph = subject.graph
    rows = [[row for row in rank for _ in range(1 + (str(row.op) == text))] for rank in graph.rows()]
    return subject.with_graph(build_graph(rows, graph.tensors, graph.groups))


def making(*orders):
    """The programs on two pipelines, whose ranks make the groups of their embeddings in these orders."""
    return dataclasses.replace(program(GROUPS), facts=Facts(group_creation=orders))


CASES = (
    of_edges(
        "L1",
        "each stage receives from the stage before it only",
        SKIP,
        runs=(),
        kills=("PP125",),
    ),
    Case(
        "L2",
        "the stage of a cached block runs its backward once more for the gradient of the block's second user",
        lambda: of_layers(BLOCK),
        lambda: repeated(of_layers(BLOCK), "0B1"),
        kills=("PP122",),
    ),
    Case(
        "L3",
        "each module samples by its own rank: the encoder takes every second sample, the language model reads halves",
        lambda: map_use("samples", HALVES, HALVES),
        lambda: map_use("samples", EVERY_SECOND, HALVES),
        kills=("PP211",),
    ),
    of_scale(
        "L4",
        "the encoder's gradients are averaged over its ranks, though the loss has divided by all tokens",
        TWO_ENCODERS,
        ENCODERS,
        ("reduction=sum", "reduction=avg"),
        kills=("PP606",),
    ),
    of_scale(
        "L5",
        "the encoder's own setting divides its gradients by the tokens once more",
        TWO_ENCODERS,
        ENCODERS,
        ("writes=grad[encoder]} 0STEP", "writes=grad[encoder]} 0SCALE_GRAD{scale=1/global_tokens} 0STEP"),
        kills=("PP606",),
    ),
    of_scale(
        "L6",
        "after an overflow in the encoder its loss scale is half of the language model's",
        LOSS_SCALE,
        ENCODERS,
        ("0SCALE_GRAD{scale=1/8}", "0SCALE_GRAD{scale=1/4}"),
        kills=("PP606",),
    ),
    of_program(
        "L7",
        "the leader of a group broadcasts its tensor only if a flag of its own is set; the members always wait",
        LEADER,
        (" 1BROADCAST1:tp{group=0} 1F1 1B1 1SEND_B1!{peer=0}", " 1F1 1B1 1SEND_B1!{peer=0}"),
        kills=("PP306", "PP402"),
    ),
    Case(
        "L8",
        "each rank makes the group of its own pipeline first",
        lambda: making(*((0, 1),) * 4),
        lambda: making((0, 1), (1, 0), (0, 1), (1, 0)),
        kills=("PP310",),
    ),
    of_edges(
        "L9",
        "the gradient of the indexer's state is not sent back to its producer",
        INDEXER,
        runs=({**INDEXER, "gradient": False},),
        kills=("PP125",),
    ),
    of_edges(
        "L10",
        "the boundaries carry the hidden states only, though later layers read what an early layer chose (its indices)",
        INDICES,
        runs=(),
        kills=("PP125",),
    ),
    of_edges(
        "L11",
        "the last stage gets the auxiliary states of its own rank's layers; earlier stages drop theirs",
        *AUXILIARY,
        runs=AUXILIARY[1:],
        kills=("PP125",),
    ),
)
