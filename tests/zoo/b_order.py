"""Family B: order, deadlock and participation."""

import dataclasses

from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind
from tests.plans import subject
from tests.zoo.case import Case
from tests.zoo.programs import edited, of_program, program

STEADY_1F1B = """
    rank 0: 0F0 0SEND_F0! 0F1 0SEND_F1{batch=0} 0RECV_B0{batch=0} WAIT(0SEND_F1) WAIT(0RECV_B0) 0B0 0RECV_B1! 0B1
    rank 1: 1RECV_F0! 1F0 1B0 1SEND_B0{batch=0} 1RECV_F1{batch=0} WAIT(1SEND_B0) WAIT(1RECV_F1) 1F1 1B1 1SEND_B1!
"""
TWO_CHUNKS = """
    rank 0: 0F0 0SEND_F0! 0F1 0SEND_F1 2RECV_F0! WAIT(0SEND_F1) 2F0 2SEND_F0! 2RECV_F1! 2F1 2SEND_F1!
    rank 1: 1RECV_F0! 1F0 1SEND_F0 1RECV_F1! WAIT(1SEND_F0) 1F1 3RECV_F0! 3F0 1SEND_F1! 3RECV_F1! 3F1
"""

ODD_RANK_RECEIVES_FIRST = """
    rank 0: 0F0 0SEND_F0! 0F1 2RECV_F0! 2F0 2SEND_F0! 2RECV_B0! 2B0 \
            0SEND_F1! 2SEND_B0! \
            0RECV_B0! 0B0 2RECV_F1! 2F1 2SEND_F1! 2RECV_B1! 2B1 2SEND_B1! 0RECV_B1! 0B1
    rank 1: 1RECV_F0! 1F0 1SEND_F0! 3RECV_F0! 3F0 3B0 3SEND_B0! \
            1RECV_F1! 1RECV_B0! \
            1B0 1SEND_B0! 1F1 1SEND_F1! 3RECV_F1! 3F1 3B1 3SEND_B1! 1RECV_B1! 1B1 1SEND_B1!
"""

SHAPES_THEN_DATA = """
    rank 0: 0F0 0SEND_META_F0!{communicator=pp} 0SEND_F0!{communicator=pp}
    rank 1: 1RECV_META_F0!{communicator=pp} 1RECV_F0!{communicator=pp} 1F0
"""

SHAPES_AND_DATA_BOTH_WAYS = """
    rank 0: 0F0 0SEND_F0! 0F1 0SEND_META_F1! 0SEND_F1! 0RECV_META_B0! 0RECV_B0! 0B0 0RECV_B1! 0B1
    rank 1: 1RECV_F0! 1F0 1B0 1RECV_META_F1! 1RECV_F1! 1SEND_META_B0! 1SEND_B0! 1F1 1B1 1SEND_B1!
"""

FUSED = "1SEND_B0{communicator=group batch=0} 1RECV_F1{communicator=group batch=0} WAIT(1SEND_B0) WAIT(1RECV_F1)"
FUSED_ON_BOTH = (
    """
    rank 0: 0F0 0SEND_F0!{communicator=group} 0F1 \
            0SEND_F1{communicator=group batch=0} 0RECV_B0{communicator=group batch=0} \
            WAIT(0SEND_F1) WAIT(0RECV_B0) 0B0 0RECV_B1!{communicator=group} 0B1
    rank 1: 1RECV_F0!{communicator=group} 1F0 1B0 FUSED 1F1 1B1 1SEND_B1!{communicator=group}
    """
).replace("FUSED", FUSED)

TWO_RECEIVES = """
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 WAIT(0SEND_F0) WAIT(0SEND_F1)
    rank 1: 1RECV_F0 1RECV_F1 WAIT(1RECV_F0) WAIT(1RECV_F1) 1F0 1F1
"""

BARRIER_IN_WARMUP = """
    group pp: 0 1
    rank 0: 0F0 0BARRIER:pp{group=0} 0SEND_F0! 0RECV_B0! 0B0
    rank 1: 0BARRIER:pp{group=0} 1RECV_F0! 1F0 1B0 1SEND_B0!
"""

TWO_EVALUATIONS = """
    group pp: 0 1
    rank 0: 0F0 0SEND_F0! 1BROADCAST0:pp{group=0} 0F1 0SEND_F1! 1BROADCAST1:pp{group=0}
    rank 1: 1RECV_F0! 1F0 1BROADCAST0:pp{group=0} 1RECV_F1! 1F1 1BROADCAST1:pp{group=0}
"""

EVALUATION = """
    rank 0: 0F0 0SEND_F0!{peer=1}
    rank 1: 1RECV_F0!{peer=0} 1F0
"""

FP8_AMAX = """
    group tp: 0 1
    group tp: 2 3
    group pp: 0 1 2 3
    rank 0: 0F0 0ALL_REDUCE0:tp{group=0 range=0..1 reduction=max} 0SEND_F0!{peer=2}
    rank 1: 0F0 0ALL_REDUCE0:tp{group=0 range=0..1 reduction=max} 0SEND_F0!{peer=3}
    rank 2: 1RECV_F0!{peer=0} 1F0
    rank 3: 1RECV_F0!{peer=1} 1F0
"""

BUCKETS = (
    "0ALL_REDUCE:dp{group=0 range=0..64 reduction=sum}",
    "0ALL_REDUCE:dp{group=0 range=0..32 reduction=sum}",
)
TWO_BUCKETS = f"""
    group dp: 0 1
    rank 0: 0F0 0B0 {BUCKETS[0]} {BUCKETS[1]}
    rank 1: 0F0 0B0 {BUCKETS[0]} {BUCKETS[1]}
"""

ENDS_OF_THE_PIPELINE = """
    rank 0: 0F0 0SEND_F0! 0RECV_B0! 0B0
    rank 1: 1RECV_F0! 1F0 1B0 1SEND_B0!
"""


def schedule_of_fewer_micro_batches():
    """The plan's data has four micro-batches; the programs belong to a schedule for three."""
    made_for_three = subject(schedule={"num_micro_batches": 3}).graph
    return subject(schedule={"num_micro_batches": 4}).with_graph(made_for_three)


def on_one_device(text):
    """The programs on a backend whose device carries all communication out in the order in which it is issued."""
    one = program(text)
    return dataclasses.replace(one, backend=dataclasses.replace(one.backend, name="one-device-queue", queue="device"))


TWO_COMMUNICATORS = """
    group tp: 0 1
    group cp: 0 1
    rank 0: 0F0 0ALL_REDUCE0:tp{group=0 queue=a range=0..4 reduction=sum} 0ALL_GATHER0:cp{group=1 queue=b range=0..4} \
            WAIT(0ALL_REDUCE0:tp) WAIT(0ALL_GATHER0:cp)
    rank 1: 0F0 0ALL_REDUCE0:tp{group=0 queue=a range=0..4 reduction=sum} 0ALL_GATHER0:cp{group=1 queue=b range=0..4} \
            WAIT(0ALL_REDUCE0:tp) WAIT(0ALL_GATHER0:cp)
"""
ISSUED_IN_TURN = (
    "0ALL_REDUCE0:tp{group=0 queue=a range=0..4 reduction=sum} 0ALL_GATHER0:cp{group=1 queue=b range=0..4}",
    "0ALL_GATHER0:cp{group=1 queue=b range=0..4} 0ALL_REDUCE0:tp{group=0 queue=a range=0..4 reduction=sum}",
)


def lazily_connected(*, early=False):
    """A plan whose connections open at first use; ``early``: the first rank posts its first receive before all else."""
    one = subject(transport={"connections": "lazy"})
    rows = one.graph.rows()
    if early:
        receive = next(row for row in rows[0] if row.op.kind is OpKind.RECV_BACKWARD)
        rows[0].remove(receive)
        rows[0].insert(0, receive)
    return one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))


CASES = (
    of_program(
        "B1",
        "the forward receive and the backward send of a steady 1F1B are not in one group",
        STEADY_1F1B,
        ("0SEND_F1{batch=0} 0RECV_B0{batch=0} WAIT(0SEND_F1) WAIT(0RECV_B0)", "0SEND_F1! 0RECV_B0!"),
        ("1SEND_B0{batch=0} 1RECV_F1{batch=0} WAIT(1SEND_B0) WAIT(1RECV_F1)", "1SEND_B0! 1RECV_F1!"),
        kills=("PP401",),
        ran="both processes hang",
    ),
    of_program(
        "B2",
        "each rank of an interleaved schedule waits for its own send before it posts its receive",
        TWO_CHUNKS,
        ("0SEND_F1 2RECV_F0! WAIT(0SEND_F1)", "0SEND_F1! 2RECV_F0!"),
        ("1SEND_F0 1RECV_F1! WAIT(1SEND_F0)", "1SEND_F0! 1RECV_F1!"),
        kills=("PP401",),
    ),
    of_program(
        "B3",
        "the odd rank receives first, but takes the two messages in the other order",
        ODD_RANK_RECEIVES_FIRST,
        ("1RECV_F1! 1RECV_B0!", "1RECV_B0! 1RECV_F1!"),
        kills=("PP401",),
    ),
    of_program(
        "B5",
        "one side exchanges shapes on the default communicator, the other on the data's communicator",
        SHAPES_THEN_DATA,
        ("1RECV_META_F0!{communicator=pp}", "1RECV_META_F0!{communicator=world}"),
        kills=("PP301", "PP302", "PP402"),
    ),
    of_program(
        "B6",
        "shape and data are two messages each way, and both sides send both of theirs first",
        SHAPES_AND_DATA_BOTH_WAYS,
        (
            "1RECV_META_F1! 1RECV_F1! 1SEND_META_B0! 1SEND_B0!",
            "1SEND_META_B0! 1SEND_B0! 1RECV_META_F1! 1RECV_F1!",
        ),
        kills=("PP401",),
        ran="both processes hang",
    ),
    of_program(
        "B8",
        "one rank fuses the two transfers on the group's communicator, the other uses the pair's, one by one",
        FUSED_ON_BOTH,
        (FUSED, "1RECV_F1!{communicator=pair} 1SEND_B0!{communicator=pair}"),
        kills=("PP301", "PP302", "PP402"),
    ),
    Case(
        "B9",
        "a receive is posted early on a connection that opens at its first use",
        lazily_connected,
        lambda: lazily_connected(early=True),
        kills=("PP413",),
    ),
    of_program(
        "B10",
        "an executor that sees no edge between two receives of one channel swaps them",
        TWO_RECEIVES,
        ("1RECV_F0 1RECV_F1", "1RECV_F1 1RECV_F0"),
        kills=("PP302",),
        ran="each receive brings the other's tensor",
    ),
    of_program(
        "B11",
        "the barrier is inside the warm-up, which the last rank does not have",
        BARRIER_IN_WARMUP,
        ("0BARRIER:pp{group=0} 1RECV_F0!", "1RECV_F0!"),
        kills=("PP306", "PP402"),
    ),
    of_program(
        "B13",
        "the first rank begins the next evaluation before it has joined the collective that ends this one",
        TWO_EVALUATIONS,
        ("1BROADCAST0:pp{group=0} 0F1 0SEND_F1!", "0F1 0SEND_F1! 1BROADCAST0:pp{group=0}"),
        kills=("PP401",),
    ),
    of_program(
        "B14",
        "only the last rank runs the schedule of an evaluation",
        EVALUATION,
        ("0F0 0SEND_F0!{peer=1}", ""),
        kills=("PP301", "PP402"),
    ),
    of_program(
        "B15",
        "the amax of one stage is reduced over the default group, which has the other stage in it",
        FP8_AMAX,
        ("0ALL_REDUCE0:tp{group=0", "0ALL_REDUCE0:tp{group=2"),
        kills=("PP306", "PP307", "PP402"),
    ),
    of_program(
        "B17",
        "one rank issues the two reductions in the order of its set",
        TWO_BUCKETS,
        (f"rank 1: 0F0 0B0 {BUCKETS[0]} {BUCKETS[1]}", f"rank 1: 0F0 0B0 {BUCKETS[1]} {BUCKETS[0]}"),
        kills=("PP306",),
    ),
    Case(
        "B18",
        "two streams issue the collectives of two communicators, in another order on each rank",
        lambda: on_one_device(TWO_COMMUNICATORS),
        lambda: on_one_device(
            edited(TWO_COMMUNICATORS, ("rank 1: 0F0 " + ISSUED_IN_TURN[0], "rank 1: 0F0 " + ISSUED_IN_TURN[1]))
        ),
        kills=("PP412",),
    ),
    Case(
        "B19",
        "the schedule was made for another number of micro-batches than the data has",
        lambda: subject(schedule={"num_micro_batches": 4}),
        schedule_of_fewer_micro_batches,
        kills=("PP121",),
    ),
    of_program(
        "B21",
        "the first stage waits for a receive that only the other stages have",
        ENDS_OF_THE_PIPELINE,
        ("rank 0: 0F0", "rank 0: WAIT(0RECV_F0) 0F0"),
        kills=("PP402",),
    ),
)
