"""Correct subjects that are close to a bug of the zoo: no rule may call any of them an error."""

from tests.plans import subject
from tests.zoo.b_order import STEADY_1F1B
from tests.zoo.i_races import SEND_BUFFER
from tests.zoo.programs import program

RECEIVE_POSTED_FIRST = """
    rank 0: 0F0 0SEND_F0! 0F1 0RECV_B0 0SEND_F1! WAIT(0RECV_B0) 0B0 0RECV_B1! 0B1
    rank 1: 1RECV_F0! 1F0 1B0 1RECV_F1! 1SEND_B0! 1F1 1B1 1SEND_B1!
"""
"""``irecv X; send Y; wait X`` against ``recv Y; send X``."""

EVEN_RANKS_SEND_FIRST = """
    rank 0: 0F0 0SEND_F0! 0F1 0SEND_F1! 0RECV_B0! 0B0 0RECV_B1! 0B1
    rank 1: 1RECV_F0! 1F0 1B0 1RECV_F1! 1SEND_B0! 1F1 1B1 1SEND_B1!
"""

LOSS_ON_RANK_0 = """
    rank 0: 0F0 0SEND_F0! 3RECV_F0! 3F0 3B0 3SEND_B0! 0RECV_B0! 0B0
    rank 1: 1RECV_F0! 1F0 2F0 2SEND_F0! 2RECV_B0! 2B0 1B0 1SEND_B0!
"""
"""A V: rank 1 hands stage 1's output to its own stage 2, and the last stage is on the first rank."""

ONE_STAGE_WITH_EXPERTS = """
    group ep: 0 1
    group ep: 2 3
    rank 0: 0F0 0SEND_F0!{peer=2}
    rank 1: 0F0 0SEND_F0!{peer=3}
    rank 2: 1RECV_F0!{peer=0} 1F0 1F0/0.ALL_TO_ALL:ep{group=1 range=0..64} 1F0/1.ALL_TO_ALL:ep{group=1 range=0..64}
    rank 3: 1RECV_F0!{peer=1} 1F0 1F0/0.ALL_TO_ALL:ep{group=1 range=0..64} 1F0/1.ALL_TO_ALL:ep{group=1 range=0..64}
"""

ACCUMULATES_IN_ANOTHER_ORDER = "rank 0: 0F0 0F1 0F2 0B2 0B0 0B1"
"""J7: the sum of the micro-batches' gradients differs in its last bits, and is right."""

ACCEPTED = {
    "partial between replicated tensors": lambda: subject(topology={"pp": 2, "tp": 2}, transport="partial"),
    "sequence parallelism with full": lambda: subject(topology={"pp": 2, "tp": 2, "sequence_parallel": True}),
    "even ranks send first, odd ones receive first": lambda: program(EVEN_RANKS_SEND_FIRST),
    "crossing messages in one group": lambda: program(STEADY_1F1B),
    "a receive posted before the send that it crosses": lambda: program(RECEIVE_POSTED_FIRST),
    "the loss on rank 0": lambda: program(LOSS_ON_RANK_0),
    "a stage without experts next to one with experts": lambda: program(ONE_STAGE_WITH_EXPERTS),
    "a buffer used again after the wait for it": lambda: program(SEND_BUFFER),
    "gradients added in another order (J7)": lambda: program(ACCUMULATES_IN_ANOTHER_ORDER),
}
