"""Symbolic models for the gradient rules: programs of a few ranks with facts that no plan file can declare yet."""

import re
from dataclasses import replace

from pipeproof.comm.plan_context import Mesh
from pipeproof.schedule.op_table import build_graph
from pipeproof.stages.describe.gradient_facts import GradientFacts, Loss, LossPath, ParameterGradient
from pipeproof.verify.declared_facts import Facts
from pipeproof.verify.subject import program_subject

SUM = "1/global_tokens"
MEAN = "1/micro_batch_tokens/num_micro_batches/data_ranks"


def model(text, given, **sizes):
    """A subject from one text a rank, or one text for all; ``sizes`` are the mesh's axes, the first the fastest.

    Groups are the mesh's, by axis; in the text ``@dp`` stands for the rank's own.
    """
    mesh = Mesh(tuple(sizes), tuple(sizes.values()))
    groups = [group for axis in mesh.axes for group in mesh.groups(axis)]
    lines = [line.strip() for line in text.strip().splitlines()]
    lines = [lines[rank * len(lines) // mesh.num_ranks] for rank in range(mesh.num_ranks)]
    header = [f"group {group.axis}: {' '.join(map(str, group.ranks))}" for group in groups]
    ranks = [f"rank {rank}: {_with_groups(line, rank, groups)}" for rank, line in enumerate(lines)]
    return replace(program_subject("\n".join(header + ranks)), facts=Facts(gradients=given, mesh=mesh))


def _with_groups(line, rank, groups):
    def own(match):
        return "group=" + str(next(i for i, g in enumerate(groups) if g.axis == match[1] and rank in g.ranks))

    return re.sub(r"@(\w+)", own, line)


def regrouped(subject, axis, *groups):
    """The subject with other ranks in the groups along an axis, and every rank's reductions in its own."""
    new = list(groups)
    all_groups = [replace(g, ranks=new.pop(0)) if g.axis == axis else g for g in subject.graph.groups]
    number = {rank: i for i, g in enumerate(all_groups) if g.axis == axis for rank in g.ranks}
    rows = [
        [
            replace(row, group=number[rank]) if row.group >= 0 and all_groups[row.group].axis == axis else row
            for row in program
        ]
        for rank, program in enumerate(subject.graph.rows())
    ]
    return subject.with_graph(build_graph(rows, subject.graph.tensors, all_groups))


MAIN = Loss("main", 0, SUM)


def facts(*parameters, losses=(MAIN,), **more):
    return GradientFacts(tuple(losses), parameters, **more)


DENSE = ParameterGradient("dense", (0,), sharded_over=("tp",))
NORM = ParameterGradient("norm", (0,), partial_over=("tp",))
BIAS = ParameterGradient("bias", (0,))
EXPERTS = ParameterGradient("experts", (0,), sharded_over=("ep",), partial_over=("tp",))
ROUTER = ParameterGradient("router", (0,), losses=(LossPath("main", ("tp",)), LossPath("aux", ("tp",))))
COUNTS = ParameterGradient("expert_bias", (0,), partial_over=("tp",), losses=(), made_by="forward")
AUX = Loss("aux", 0, "0.01/global_tokens")

MOE_FACTS = facts(DENSE, NORM, BIAS, EXPERTS, ROUTER, COUNTS, losses=(MAIN, AUX))
MOE_TEXT = "0F0 0F1 0B0 0B1 0REDUCE_GRAD:tp{@tp} 0REDUCE_GRAD:cp{@cp} 0REDUCE_GRAD:ep{@ep} 0REDUCE_GRAD:dp{@dp} 0STEP"


def moe(text=MOE_TEXT, given=MOE_FACTS, **sizes):
    """One stage with experts over ep, a router, a norm under sequence parallelism and counts of tokens."""
    return model(text, given, **(sizes or {"tp": 2, "cp": 1, "ep": 2, "dp": 2}))


EMBEDDING = ParameterGradient("embedding", (0, 1), sharded_over=("tp",))
TIED_FACTS = facts(
    EMBEDDING,
    ParameterGradient("first", (0,)),
    ParameterGradient("last", (1,)),
    losses=(Loss("main", 1, SUM), Loss("mtp", 1, "0.3/global_tokens")),
)
TIED_TEXT = """
    0F0 0SEND_F0{@to1} 0F1 0SEND_F1{@to1} 0RECV_B0{@to1} WAIT(0RECV_B0) 0B0 0RECV_B1{@to1} WAIT(0RECV_B1) 0B1 WAIT(0SEND_F0) WAIT(0SEND_F1) 0REDUCE_GRAD:pp{@pp writes=grad[embedding]} 0REDUCE_GRAD:dp{@dp} 0STEP
    1RECV_F0{@to0} WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{@to0} 1RECV_F1{@to0} WAIT(1RECV_F1) 1F1 1B1 1SEND_B1{@to0} WAIT(1SEND_B0) WAIT(1SEND_B1) 1REDUCE_GRAD:pp{@pp writes=grad[embedding]} 1REDUCE_GRAD:dp{@dp} 1STEP
"""  # noqa: E501 - a line a rank


def tied(text=TIED_TEXT, given=TIED_FACTS, dp=2):
    """Two stages with one embedding: rank 0 .. dp - 1 hold the first, the others the last."""
    lines = [line.strip() for line in text.strip().splitlines()]
    lines = [re.sub(r"@to\d", f"peer={(rank + dp) % (2 * dp)}", lines[rank // dp]) for rank in range(2 * dp)]
    return model("\n".join(lines), given, dp=dp, pp=2)


TWO_WAY_TEXT = """
    0F0 0B0 1F1 1B1 0REDUCE_GRAD:pp{@pp writes=grad[first]} 0REDUCE_GRAD:dp{@dp} 1REDUCE_GRAD:pp{@pp writes=grad[last]} 1REDUCE_GRAD:dp{@dp} 0STEP 1STEP
    1F0 1I0 1W0 0F1 0I1 0W1 0REDUCE_GRAD:pp{@pp writes=grad[first]} 0REDUCE_GRAD:dp{@dp} 1REDUCE_GRAD:pp{@pp writes=grad[last]} 1REDUCE_GRAD:dp{@dp} 0STEP 1STEP
"""  # noqa: E501 - a line a rank
TWO_WAY_FACTS = facts(ParameterGradient("first", (0,)), ParameterGradient("last", (1,)), losses=(Loss("main", 1, SUM),))


def two_way(text=TWO_WAY_TEXT, given=TWO_WAY_FACTS):
    """Both ranks of a pipeline hold both stages, each for one of two micro-batches; transfers are left out."""
    return model(text, given, dp=2, pp=2)
