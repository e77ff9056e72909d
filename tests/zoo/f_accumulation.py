"""Family F: accumulation over micro-batches, and split backwards."""

from tests.plans import subject
from tests.zoo.case import Case
from tests.zoo.e_scale import PLAIN, of_scale
from tests.zoo.programs import of_program
from tests.zoo.rows import without

TWO_MICRO_BATCHES = """
    rank 0: 0F0{scale=1/micro_batch_tokens} 0I0 0W0 0F1{scale=1/micro_batch_tokens} 0I1 0W1 \
            0SCALE_GRAD{scale=1/num_micro_batches} 0STEP
"""

TUPLE = """
    tensor hidden: shape=4x1x2 dtype=float32 member=hidden
    tensor residual: shape=4x1x2 dtype=float32 member=residual
    rank 0: 0F0 0SEND_F0!{tensor=0 range=0..8} 0SEND_F0!{tensor=1 range=0..8}
    rank 1: 1RECV_F0!{tensor=0 range=0..8} 1RECV_F0!{tensor=1 range=0..8} 1F0
"""

CASES = (
    of_scale(
        "F2",
        "a hook adds the gradient of the last micro-batch, and an explicit call adds it again",
        TWO_MICRO_BATCHES,
        PLAIN,
        ("0W1", "0W1 0W1"),
        kills=("PP122", "PP605"),
    ),
    of_scale(
        "F3",
        "the gradient is copied into its buffer, not added to it",
        TWO_MICRO_BATCHES,
        PLAIN,
        ("0W0", "0W0{reduction=overwrite}"),
        ("0W1", "0W1{reduction=overwrite}"),
        kills=("PP605",),
    ),
    of_program(
        "F8",
        "the list of outputs is replaced by its first tensor",
        TUPLE,
        (" 0SEND_F0!{tensor=1 range=0..8}", ""),
        kills=("PP301", "PP402"),
    ),
    Case(
        "F9",
        "the split backward bypasses the hooks that reduce over the data-parallel ranks",
        lambda: subject(topology={"dp": 2}),
        lambda: without(subject(topology={"dp": 2}), "REDUCE_GRAD:dp"),
        kills=("PP601",),
    ),
)
