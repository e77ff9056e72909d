"""Family I: races, buffer lifetime and streams."""

from tests.zoo.programs import of_program

DOUBLE_BUFFER = """
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 WAIT(0SEND_F0) WAIT(0SEND_F1)
    rank 1: 1RECV_F0{writes=slot0} 1RECV_F1{writes=slot1} WAIT(1RECV_F0) 1F0{reads=slot0} \
            WAIT(1RECV_F1) 1F1{reads=slot1}
"""

REDUCE_ON_A_SIDE_STREAM = """
    group dp: 0 1
    rank 0: 0F0 0B0{writes=grad} WAIT(0B0){queue=side} 0ALL_REDUCE:dp{group=0 queue=side reads=grad writes=grad} \
            WAIT(0ALL_REDUCE:dp) 0STEP{reads=grad}
    rank 1: 0F0 0B0{writes=grad} WAIT(0B0){queue=side} 0ALL_REDUCE:dp{group=0 queue=side reads=grad writes=grad} \
            WAIT(0ALL_REDUCE:dp) 0STEP{reads=grad}
"""

CORRECTION_ON_A_SIDE_STREAM = """
    rank 0: 0F0{writes=part} WAIT(0F0){queue=side} 1F0{queue=side reads=part writes=lse} \
            2F0{queue=side reads=lse writes=out} WAIT(2F0) 3F0{reads=out}
"""

SCATTER_OF_GRADIENTS = """
    group dp: 0 1
    rank 0: 0F0 0B0{writes=grad} WAIT(0B0){queue=side} 0REDUCE_SCATTER:dp{group=0 queue=side reads=grad writes=shard} \
            WAIT(0REDUCE_SCATTER:dp) 0STEP{reads=shard}
    rank 1: 0F0 0B0{writes=grad} WAIT(0B0){queue=side} 0REDUCE_SCATTER:dp{group=0 queue=side reads=grad writes=shard} \
            WAIT(0REDUCE_SCATTER:dp) 0STEP{reads=shard}
"""

GATHERS_INTO_ONE_BUFFER = """
    group tp: 0 1
    rank 0: 0ALL_GATHER0:tp{group=0 queue=side writes=symmetric} WAIT(0ALL_GATHER0:tp) 0F0{reads=symmetric} \
            WAIT(0F0){queue=side} 0ALL_GATHER1:tp{group=0 queue=side writes=symmetric} WAIT(0ALL_GATHER1:tp) \
            0F1{reads=symmetric} WAIT(0F1){queue=side}
    rank 1: 0ALL_GATHER0:tp{group=0 queue=side writes=symmetric} WAIT(0ALL_GATHER0:tp) 0F0{reads=symmetric} \
            WAIT(0F0){queue=side} 0ALL_GATHER1:tp{group=0 queue=side writes=symmetric} WAIT(0ALL_GATHER1:tp) \
            0F1{reads=symmetric} WAIT(0F1){queue=side}
"""

RELEASE_AFTER_SEND = """
    rank 0: 0F0 0SEND_F0 WAIT(0SEND_F0) FREE(0SEND_F0)
    rank 1: 1RECV_F0! 1F0
"""

EMPTIED_INPUT = """
    rank 0: 0F0{writes=input} 1F0{reads=input writes=output frees=input} 2F0{writes=input} 3F0{reads=input+output}
"""

SENDS_OF_A_STEP = """
    rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 WAIT(0SEND_F0) WAIT(0SEND_F1)
    rank 1: 1RECV_F0! 1F0 1RECV_F1! 1F1
"""

ACTIVATION_OF_ITS_OWN = """
    rank 0: 0F0 0SEND_F0! 0F1 0SEND_F1 0RECV_B0! 0B0 WAIT(0SEND_F1) 0RECV_B1! 0B1
    rank 1: 1RECV_F0!{writes=buffer} 1F0{reads=buffer writes=kept0} 1RECV_F1{writes=buffer} \
            1B0{reads=kept0 writes=grad0} 1SEND_B0!{reads=grad0} WAIT(1RECV_F1) \
            1F1{reads=buffer writes=kept1} 1B1{reads=kept1 writes=grad1} \
            1SEND_B1!{reads=grad1}
"""

SEND_BUFFER = """
    rank 0: 0F0{writes=out} 0SEND_F0{reads=out} WAIT(0SEND_F0) 0F1{writes=out} 0SEND_F1{reads=out} WAIT(0SEND_F1)
    rank 1: 1RECV_F0! 1F0 1RECV_F1! 1F1
"""

CASES = (
    of_program(
        "I3",
        "the index of the two receive slots never advances",
        DOUBLE_BUFFER,
        ("slot1", "slot0"),
        kills=("PP502",),
    ),
    of_program(
        "I3.reverse",
        "the side stream does not wait for the stream that fills its buffer",
        REDUCE_ON_A_SIDE_STREAM,
        (" WAIT(0B0){queue=side}", ""),
        kills=("PP507",),
    ),
    of_program(
        "I4",
        "the wait for the producer is made on the default stream, not on the one that reads",
        REDUCE_ON_A_SIDE_STREAM,
        ("WAIT(0B0){queue=side}", "WAIT(0B0)"),
        kills=("PP507",),
    ),
    of_program(
        "I5",
        "the correction of the softmax sums runs outside the side stream that computes them",
        CORRECTION_ON_A_SIDE_STREAM,
        ("2F0{queue=side reads=lse writes=out} WAIT(2F0)", "2F0{reads=lse writes=out}"),
        kills=("PP507", "PP508"),
    ),
    of_program(
        "I6",
        "the last reduce-scatter of the step is not waited for",
        SCATTER_OF_GRADIENTS,
        (" WAIT(0REDUCE_SCATTER:dp)", ""),
        kills=("PP507", "PP508"),
    ),
    of_program(
        "I9",
        "the second gather into the symmetric buffer does not wait for the readers of the first",
        GATHERS_INTO_ONE_BUFFER,
        (" WAIT(0F0){queue=side}", ""),
        kills=("PP507",),
    ),
    of_program(
        "I10",
        "the output is released while its send still reads it",
        RELEASE_AFTER_SEND,
        ("WAIT(0SEND_F0) FREE(0SEND_F0)", "FREE(0SEND_F0) WAIT(0SEND_F0)"),
        kills=("PP503",),
    ),
    of_program(
        "I11",
        "the input that was replaced by an empty tensor is read without being restored",
        EMPTIED_INPUT,
        (" 2F0{writes=input}", " 2F0"),
        kills=("PP503",),
    ),
    of_program(
        "I11.handles",
        "the handle of a send is stored and never waited for",
        SENDS_OF_A_STEP,
        (" WAIT(0SEND_F1)", ""),
        kills=("PP505",),
    ),
    of_program(
        "I12",
        "the permanent receive buffer is itself the activation that the backward reads",
        ACTIVATION_OF_ITS_OWN,
        (" writes=kept0}", "}"),
        ("{reads=kept0", "{reads=buffer"),
        kills=("PP502",),
    ),
    of_program(
        "I13",
        "the buffer is written again between the send and the wait for it",
        SEND_BUFFER,
        ("WAIT(0SEND_F0) 0F1{writes=out}", "0F1{writes=out} WAIT(0SEND_F0)"),
        kills=("PP501",),
        ran="the receiver gets the second micro-batch's values twice",
    ),
)
