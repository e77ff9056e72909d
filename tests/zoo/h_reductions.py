"""Family H: reductions that are missing or wrong."""

from pipeproof.stages.describe.typed_ops import ProgramBuilder
from tests.plans import subject
from tests.zoo.case import Case
from tests.zoo.facts import of_typed
from tests.zoo.programs import of_program
from tests.zoo.rows import without

SIZES = {"s": 8, "b": 2, "h": 16, "a": 4, "d": 4, "x": 4, "f": 8, "c": 4, "k": 1}


def norm_under_sequence_parallelism(*, reduced_over=("tp",)):
    """A norm between the blocks, each rank of TP with its own part of the sequence."""
    p = ProgramBuilder("norm", {"tp": 2}, SIZES)
    p.input("x", "s b h", tp="S(s)")
    p.parameter("weight", "h", reduced_over=reduced_over)
    p.result(p.apply("y", "x", "weight", along="h"), tp="S(s)")
    return p.build()


def norm_of_heads(*, reduced_over=("tp",)):
    """The norm of each head's output: one weight for all heads, which are cut over TP, sequence parallel or not."""
    p = ProgramBuilder("out_norm", {"tp": 2}, SIZES)
    p.input("x", "s b a d", tp="S(a)")
    p.parameter("weight", "d", reduced_over=reduced_over)
    p.result(p.apply("y", "x", "weight", along="d"), tp="S(a)")
    return p.build()


def weighted_experts(*, entered=True):
    """Expert outputs, an addend on each TP rank, times the scores of a router that all ranks compute."""
    p = ProgramBuilder("combine", {"tp": 2}, SIZES)
    p.input("outputs", "s b h", tp="P")
    p.input("scores", "s b")
    scores = p.relabel("inner_scores", "scores", "tp", to="R") if entered else "scores"
    p.multiply("weighted", "outputs", scores)
    p.result(p.all_reduce("y", "weighted", "tp"))
    return p.build()


def router(*, reduced_over=("tp",)):
    """A router under sequence parallelism without expert parallelism: each rank routes its part of the sequence."""
    p = ProgramBuilder("router", {"tp": 2, "ep": 1}, SIZES)
    p.input("x", "s b h", tp="S(s)")
    p.parameter("gate", "h x", reduced_over=reduced_over)
    p.result(p.multiply("logits", "x", "gate", over="h"), tp="S(s)")
    return p.build()


def tokens_of_experts(*, reduced=True):
    """Number of tokens of each expert, from which its bias is adapted."""
    p = ProgramBuilder("expert bias", {"tp": 2}, SIZES)
    p.constant("chosen", "s b x", tp="S(s)")
    p.multiply("own_counts", "chosen", over="s b")
    p.result(p.all_reduce("counts", "own_counts", "tp") if reduced else "own_counts")
    return p.build()


LOAD_OF_EXPERTS = """
    group pp: 0 1
    rank 0: 0F0 0SEND_F0! 1ALL_REDUCE0:pp{group=0 range=0..4 reduction=sum}
    rank 1: 1RECV_F0! 1F0 1ALL_REDUCE0:pp{group=0 range=0..4 reduction=sum}
"""

CASES = (
    of_typed(
        "H1",
        "a norm's weight is not marked as sequence parallel",
        norm_under_sequence_parallelism,
        ("PP206",),
        reduced_over=(),
    ),
    Case(
        "H1.graph",
        "the hook that reduces the norms' gradients over TP is never called",
        lambda: subject(topology={"tp": 2, "sequence_parallel": True}),
        lambda: without(subject(topology={"tp": 2, "sequence_parallel": True}), "REDUCE_GRAD:tp"),
        kills=("PP601",),
    ),
    of_typed(
        "H2",
        "gradients of norms are reduced with sequence parallelism only",
        norm_of_heads,
        ("PP206",),
        reduced_over=(),
    ),
    of_typed(
        "H4",
        "the gradient of the scores is partial on each rank and used as the whole",
        weighted_experts,
        ("PP203",),
        entered=False,
    ),
    of_typed(
        "H5",
        "the router's gradient is declared as partial with expert parallelism only",
        router,
        ("PP206",),
        reduced_over=(),
    ),
    of_typed("H6", "the tokens of each expert are not summed over TP", tokens_of_experts, ("PP204",), reduced=False),
    of_program(
        "H8",
        "a stage without experts has an empty list of loads and skips the sum over the stages",
        LOAD_OF_EXPERTS,
        ("0SEND_F0! 1ALL_REDUCE0:pp{group=0 range=0..4 reduction=sum}", "0SEND_F0!"),
        kills=("PP306", "PP402"),
    ),
)
