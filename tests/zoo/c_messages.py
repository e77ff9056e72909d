"""Family C: shapes, dtypes and metadata."""

from tests.zoo.programs import of_program

ONE_MESSAGE = """
    tensor sent: shape=4x1x2 dtype=bfloat16
    tensor wanted: shape=4x1x2 dtype=bfloat16
    rank 0: 0F0 0SEND_F0!{tensor=0 range=0..8}
    rank 1: 1RECV_F0!{tensor=1 range=0..8} 1F0
"""

IN_FLOAT32 = ONE_MESSAGE.replace("bfloat16", "float32")

VARIABLE_LENGTHS = """
    tensor long: shape=8x1x2 dtype=float32
    tensor short: shape=4x1x2 dtype=float32
    rank 0: 0F0 0SEND_META_F0!{tensor=0} 0SEND_F0!{tensor=0 range=0..16} \
            0F1 0SEND_META_F1!{tensor=1} 0SEND_F1!{tensor=1 range=0..8}
    rank 1: 1RECV_META_F0!{tensor=0} 1RECV_F0!{tensor=0 range=0..16} 1F0 \
            1RECV_META_F1!{tensor=1} 1RECV_F1!{tensor=1 range=0..8} 1F1
"""

SHAPES_IN_TURN = """
    rank 0: 0F0 0SEND_META_F0! 0SEND_F0! 0F1 0SEND_META_F1! 0RECV_META_B0! 0SEND_F1! 0RECV_B0! 0B0 \
            0RECV_META_B1! 0RECV_B1! 0B1
    rank 1: 1RECV_META_F0! 1RECV_F0! 1F0 1B0 1RECV_META_F1! 1SEND_META_B0! 1RECV_F1! 1SEND_B0! 1F1 1B1 \
            1SEND_META_B1! 1SEND_B1!
"""

CASES = (
    of_program(
        "C2",
        "shapes travel with the first micro-batch only, and the second is shorter",
        VARIABLE_LENGTHS,
        ("0F1 0SEND_META_F1!{tensor=1}", "0F1"),
        ("1RECV_META_F1!{tensor=1} 1RECV_F1!{tensor=1 range=0..8}", "1RECV_F1!{tensor=0 range=0..16}"),
        kills=("PP303", "PP313"),
    ),
    of_program(
        "C3",
        "both ranks send their shapes at the same time, one blocking call each",
        SHAPES_IN_TURN,
        ("1RECV_META_F1! 1SEND_META_B0!", "1SEND_META_B0! 1RECV_META_F1!"),
        kills=("PP401",),
        ran="both processes hang",
    ),
    of_program(
        "C4",
        "the receiver computes its shape from the whole sequence, the sender holds half of it (context parallel)",
        ONE_MESSAGE,
        ("wanted: shape=4x1x2", "wanted: shape=8x1x2"),
        ("{tensor=1 range=0..8}", "{tensor=1 range=0..16}"),
        kills=("PP303",),
    ),
    of_program(
        "C5",
        "the receive buffer is created without a dtype and gets the default one",
        ONE_MESSAGE,
        ("wanted: shape=4x1x2 dtype=bfloat16", "wanted: shape=4x1x2 dtype=float32"),
        kills=("PP304",),
    ),
    of_program(
        "C7",
        "the message is shorter than its buffer",
        ONE_MESSAGE,
        ("{tensor=0 range=0..8}", "{tensor=0 range=0..6}"),
        kills=("PP201", "PP303"),
        ran="the end of the receiver's buffer keeps its old contents",
    ),
    of_program(
        "C7.longer",
        "the message is longer than its buffer",
        ONE_MESSAGE,
        ("{tensor=1 range=0..8}", "{tensor=1 range=0..6}"),
        kills=("PP201", "PP303"),
        ran="gloo aborts the receiving process (SIGABRT)",
    ),
    of_program(
        "C7.dtype",
        "a float32 tensor is received as int32",
        IN_FLOAT32,
        ("wanted: shape=4x1x2 dtype=float32", "wanted: shape=4x1x2 dtype=int32"),
        kills=("PP304",),
    ),
)
