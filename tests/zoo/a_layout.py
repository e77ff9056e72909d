"""Family A: layouts, and the transports that must keep them."""

from pipeproof.specs.axis_layout import sharded
from pipeproof.stages.describe.index_map import IndexMap, layout_map, token_map
from pipeproof.stages.describe.typed_ops import ProgramBuilder
from pipeproof.verify.declared_facts import MapUse
from tests.plans import subject
from tests.zoo.case import Case
from tests.zoo.facts import of_typed, stated
from tests.zoo.programs import of_program

SEQUENCE_PARALLEL = {"pp": 2, "tp": 2, "sequence_parallel": True}

PARTIAL_OF_16 = """
    tensor hidden: shape=4x2x2 dtype=float32
    group tp: 0 1
    group tp: 2 3
    rank 0: 0F0 0SLICE_F0{tensor=0 range=0..8} 0SEND_F0!{peer=2 tensor=0 range=0..8}
    rank 1: 0F0 0SLICE_F0{tensor=0 range=8..16} 0SEND_F0!{peer=3 tensor=0 range=8..16}
    rank 2: 1RECV_F0!{peer=0 tensor=0 range=0..8} 1GATHER_F0{group=1 tensor=0 range=0..8} 1F0
    rank 3: 1RECV_F0!{peer=1 tensor=0 range=8..16} 1GATHER_F0{group=1 tensor=0 range=8..16} 1F0
"""

SIZES = {"s": 8, "b": 2, "h": 16, "f": 32, "v": 64, "o": 1}


def embedding_and_first_layer(*, scattered=True):
    """A vocabulary-parallel embedding under sequence parallelism, and the way into the first column-parallel weight."""
    p = ProgramBuilder("embed", {"tp": 2}, SIZES)
    p.constant("tokens", "s b")
    p.parameter("table", "v h", tp="S(v)")
    p.parameter("weight", "h f", tp="S(f)")
    p.pick("rows", "table", "tokens", over="v")
    between = p.reduce_scatter("x", "rows", "tp", "s") if scattered else p.all_reduce("x", "rows", "tp")
    p.all_gather("entered", between, "tp")
    p.result(p.multiply("y", "entered", "weight", over="h"), tp="S(f)")
    return p.build()


def masked_router(*, mask="S(s)"):
    """A router under sequence parallelism, which leaves out the tokens of a padding mask."""
    p = ProgramBuilder("router", {"tp": 2}, SIZES)
    p.input("x", "s b h", tp="S(s)")
    p.constant("mask", "s b", tp=mask)
    p.result(p.apply("masked", "x", "mask"), tp="S(s)")
    return p.build()


def vocabulary_parallel_loss(*, gathered=False):
    """The log of the sum of exponentials over a vocabulary that is cut over TP."""
    p = ProgramBuilder("loss", {"tp": 2}, SIZES)
    p.input("logits", "s b v", tp="S(v)")
    logits = p.all_gather("all_logits", "logits", "tp", to="R") if gathered else "logits"
    p.multiply("addends", p.apply("exp", logits), over="v")
    p.all_reduce("sum_exp", "addends", "tp")
    p.result(p.apply("log_sum", "sum_exp"))
    return p.build()


def chunked_gradient(*, reduced=True):
    """The gradient of the hidden states, computed chunk by chunk from logits that are cut over TP."""
    p = ProgramBuilder("chunked loss", {"tp": 2}, SIZES)
    p.input("grad_logits", "s b v", tp="S(v)")
    p.parameter("weight", "v h", tp="S(v)")
    p.multiply("addends", "grad_logits", "weight", over="v")
    whole = p.all_reduce("grad", "addends", "tp", to="R") if reduced else p.relabel("grad", "addends", "tp", to="R")
    p.result(whole, tp="R")
    return p.build()


def label_smoothing(*, reduced=True):
    """The mean of the log-probabilities over the vocabulary, which is cut over TP."""
    p = ProgramBuilder("smoothing", {"tp": 2}, SIZES)
    p.input("log_probs", "s b v", tp="S(v)")
    p.multiply("addends", "log_probs", over="v")
    p.result(p.all_reduce("mean", "addends", "tp") if reduced else "addends")
    return p.build()


TP = range(2)


def map_use(name, holds, taken_for):
    """Both TP ranks hold a tensor by one map and take it for another."""
    return stated(num_ranks=2, map_uses=(MapUse(name, dict(enumerate(holds)), dict(enumerate(taken_for))),))


BUFFER = (8, 8)
BY_MODEL_DIM = [layout_map(BUFFER, sharded(1), 2, rank) for rank in TP]
BY_EXPERT_DIM = [layout_map(BUFFER, sharded(0), 2, rank) for rank in TP]
TOKENS = [token_map(2, 8, 2, rank) for rank in TP]
WITHOUT_BATCH = [IndexMap.of([(0, rank * 8, 8)]) for rank in TP]

CASES = (
    Case(
        "A1",
        "`partial` on tensors that sequence parallelism shards",
        lambda: subject(topology=SEQUENCE_PARALLEL, transport="full"),
        lambda: subject(topology=SEQUENCE_PARALLEL, transport="partial"),
        kills=("PP201",),
        ran="a loss that is not the reference's",
    ),
    of_program(
        "A2",
        "slices of half the elements, rounded down, of an odd number of elements",
        PARTIAL_OF_16,
        ("shape=4x2x2", "shape=17x1x1"),
        kills=("PP201",),
    ),
    of_typed(
        "A4",
        "the embedding is gathered later without having been scattered",
        embedding_and_first_layer,
        ("PP203",),
        scattered=False,
    ),
    of_typed("A5", "the padding mask is sharded on the first stage only", masked_router, ("PP205",), mask="I"),
    Case(
        "A7",
        "the expert buffer is sharded along the model dim and read as sharded along the experts; both dims are equal",
        lambda: map_use("expert buffer", BY_EXPERT_DIM, BY_EXPERT_DIM),
        lambda: map_use("expert buffer", BY_MODEL_DIM, BY_EXPERT_DIM),
        kills=("PP211",),
    ),
    Case(
        "A8",
        "the global index of a token is its local one plus the rank times the number of local ones",
        lambda: map_use("tokens", TOKENS, TOKENS),
        lambda: map_use("tokens", TOKENS, WITHOUT_BATCH),
        kills=("PP211",),
    ),
    of_typed(
        "A10",
        "gathered logits go into the vocabulary-parallel loss",
        vocabulary_parallel_loss,
        ("PP203",),
        gathered=True,
    ),
    of_typed("A11", "addends are labelled as replicated", chunked_gradient, ("PP204",), reduced=False),
    of_typed(
        "A12",
        "the mean over the local vocabulary is used as the mean over the whole vocabulary",
        label_smoothing,
        ("PP204",),
        reduced=False,
    ),
)
