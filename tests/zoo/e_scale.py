"""Family E: how much each token's loss counts in the update."""

import dataclasses

from pipeproof.comm.plan_context import Mesh
from pipeproof.stages.describe.gradient_facts import GradientFacts, Loss, LossPath, ParameterGradient
from pipeproof.verify.declared_facts import Facts
from tests.zoo.case import Case
from tests.zoo.programs import edited, program

MEAN = "1/micro_batch_tokens/num_micro_batches/data_ranks"
WEIGHT = ParameterGradient("weight", (0,))
PLAIN = GradientFacts((Loss("main", 0, MEAN),), (WEIGHT,))

ACCUMULATION = """
    rank 0: 0F0{scale=1/micro_batch_tokens} 0B0 0F1{scale=1/micro_batch_tokens} 0B1 \
            0SCALE_GRAD{scale=1/num_micro_batches} 0STEP
"""

EXPERTS = GradientFacts(
    (Loss("main", 0, MEAN),),
    (ParameterGradient("dense", (0,)), ParameterGradient("expert", (0,), sharded_over=("ep",))),
    even_tokens=True,
)
EXPERT_MESH = Mesh(("ep", "dp"), (2, 2))
EXPERT_TEXT = "group ep: 0 1\ngroup ep: 2 3\ngroup dp: 0 2\ngroup dp: 1 3\n" + "\n".join(
    f"rank {rank}: 0F0{{scale=1/micro_batch_tokens}} 0B0 "
    f"0REDUCE_GRAD:ep{{reduction=avg writes=grad[dense] group={rank // 2}}} "
    f"0REDUCE_GRAD:dp{{reduction=avg writes=grad[dense] group={2 + rank % 2}}} "
    f"0REDUCE_GRAD:dp{{reduction=avg scale=1/ep writes=grad[expert] group={2 + rank % 2}}} 0STEP"
    for rank in range(4)
)

CONTEXT = GradientFacts((Loss("main", 0, "1/global_tokens"),), (WEIGHT,), even_tokens=True)
CONTEXT_MESH = Mesh(("cp", "dp"), (2, 2))
CONTEXT_TEXT = "group cp: 0 1\ngroup cp: 2 3\ngroup dp: 0 2\ngroup dp: 1 3\n" + "\n".join(
    f"rank {rank}: 0F0{{scale=1/rank_tokens}} 0B0 0REDUCE_GRAD:cp{{reduction=sum group={rank // 2}}} "
    f"0REDUCE_GRAD:dp{{reduction=sum group={2 + rank % 2}}} 0SCALE_GRAD{{scale=1/dp/cp}} 0STEP"
    for rank in range(4)
)

AUXILIARY = GradientFacts(
    (Loss("main", 0, "1/global_tokens"), Loss("aux", 0, "0.01/global_tokens")),
    (ParameterGradient("router", (0,), losses=(LossPath("main"), LossPath("aux"))),),
    even_tokens=True,
)
AUXILIARY_TEXT = """
    group tp: 0 1
    rank 0: 0F0{scale=1/global_tokens,aux:0.01/global_tokens} 0B0 0STEP
    rank 1: 0F0{scale=1/global_tokens,aux:0.01/global_tokens} 0B0 0STEP
"""

EVALUATION = "rank 0: 0F0{scale=1/global_tokens} 0F1{scale=1/global_tokens}"


def with_gradients(text, facts, mesh=None):
    """A program whose losses and parameters are known."""
    return dataclasses.replace(program(text), facts=Facts(gradients=facts, mesh=mesh))


def of_scale(id, mutation, text, facts, *changes, kills, mesh=None):
    """A case of a program with gradient facts, whose mutant is the same program with changes of its text."""
    return Case(
        id,
        mutation,
        lambda: with_gradients(text, facts, mesh),
        lambda: with_gradients(edited(text, *changes), facts, mesh),
        kills,
    )


CASES = (
    of_scale(
        "E2",
        "the accumulated gradient is scaled after each micro-batch",
        ACCUMULATION,
        PLAIN,
        ("0B0 0F1", "0B0 0SCALE_GRAD{scale=1/num_micro_batches} 0F1"),
        kills=("PP606",),
    ),
    of_scale(
        "E3",
        "the sum over the micro-batches is not divided by their number",
        ACCUMULATION,
        PLAIN,
        (" 0SCALE_GRAD{scale=1/num_micro_batches}", ""),
        kills=("PP606",),
    ),
    of_scale(
        "E5",
        "expert gradients are averaged over their data-parallel ranks only, though they hold the tokens of all",
        EXPERT_TEXT,
        EXPERTS,
        ("{reduction=avg scale=1/ep writes=grad[expert]", "{reduction=avg writes=grad[expert]"),
        mesh=EXPERT_MESH,
        kills=("PP606",),
    ),
    of_scale(
        "E6",
        "the divisor of the gradients lacks the context-parallel ranks",
        CONTEXT_TEXT,
        CONTEXT,
        ("scale=1/dp/cp", "scale=1/dp"),
        mesh=CONTEXT_MESH,
        kills=("PP606",),
    ),
    of_scale(
        "E7",
        "the auxiliary loss is multiplied by the number of TP ranks",
        AUXILIARY_TEXT,
        AUXILIARY,
        ("aux:0.01/global_tokens", "aux:0.01*tp/global_tokens"),
        kills=("PP607",),
    ),
    of_scale(
        "E8",
        "the result of the function that adds the auxiliary loss is thrown away",
        AUXILIARY_TEXT,
        AUXILIARY,
        ("aux:0.01/global_tokens", "aux:0"),
        kills=("PP607",),
    ),
    of_scale(
        "E10",
        "the loss function that divides by the number of micro-batches for training is used for validation",
        EVALUATION,
        CONTEXT,
        ("scale=1/global_tokens", "scale=1/global_tokens/num_micro_batches"),
        kills=("PP609",),
    ),
)
