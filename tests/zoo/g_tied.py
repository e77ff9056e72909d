"""Family G: tied weights."""

from pipeproof.stages.describe.gradient_facts import GradientFacts, Loss, ParameterGradient
from tests.zoo.e_scale import of_scale
from tests.zoo.programs import of_program

TIED = GradientFacts((Loss("main", 1, "1/global_tokens"),), (ParameterGradient("embedding", (0, 1)),))
BOTH_STAGES = """
    group pp: 0 1
    rank 0: 0F0 0SEND_F0! 0RECV_B0! 0B0 0REDUCE_GRAD:pp{group=0 reduction=sum writes=grad[embedding]} 0STEP
    rank 1: 1RECV_F0! 1F0{scale=1/global_tokens} 1B0 1SEND_B0! \
            1REDUCE_GRAD:pp{group=0 reduction=sum writes=grad[embedding]} 1STEP
"""

MAIN_GRAD = """
    rank 0: 0SCALE_GRAD{writes=main_grad} 0F0 0B0{reads=main_grad writes=main_grad} 0STEP{reads=main_grad}
"""

CASES = (
    of_program(
        "G2",
        "the accumulator of a tied weight is allocated and not set to zero",
        MAIN_GRAD,
        ("0SCALE_GRAD{writes=main_grad} ", ""),
        kills=("PP506",),
    ),
    of_scale(
        "G4",
        "the copies of a tied weight are not summed over their stages",
        BOTH_STAGES,
        TIED,
        (" 0REDUCE_GRAD:pp{group=0 reduction=sum writes=grad[embedding]}", ""),
        (" 1REDUCE_GRAD:pp{group=0 reduction=sum writes=grad[embedding]}", ""),
        kills=("PP608",),
    ),
)
