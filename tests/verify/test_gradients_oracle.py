"""Symbolic coefficients against numbers: both must name the same parameters, on right and on broken programs."""

import dataclasses
from collections import Counter
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.columns import Row
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.verify.gradients.diagnose import diagnose
from pipeproof.verify.gradients.expected_gradients import model_of
from tests.plans import subject
from tests.verify.gradient_models import moe, tied, two_way
from tests.verify.gradient_oracle import Numbers

BASES = {
    "sequence parallel": lambda: subject(
        model={"num_layers": 2},
        topology={"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True},
        schedule={"num_micro_batches": 2},
    ),
    "context parallel": lambda: subject(
        model={"num_layers": 1}, topology={"pp": 1, "cp": 2, "dp": 2, "ep": 2}, schedule={"num_micro_batches": 2}
    ),
    "mean of means": lambda: subject(
        model={"num_layers": 1},
        topology={"pp": 1, "dp": 2},
        schedule={"num_micro_batches": 3},
        loss={"normalization": "mean_of_micro_batches"},
    ),
    "three stages": lambda: subject(
        model={"num_layers": 3, "moe": {"num_experts": 2, "top_k": 1, "ffn_size": 8, "aux_loss": 0.01}},
        topology={"pp": 3, "dp": 2},
        schedule={"kind": "zb_h1", "num_micro_batches": 3},
    ),
    "experts": moe,
    "tied": tied,
    "two ranks for each stage": two_way,
}
SCALES = ("1/2", "2", "1/dp", "dp", "1/num_micro_batches", "num_micro_batches", "1/tp", "ep")
LOSS_SCALES = (
    "1/global_tokens", "1/micro_batch_tokens", "1/micro_batch_tokens/num_micro_batches/data_ranks",
    "2/global_tokens", "main:1/global_tokens,aux:1/global_tokens", "aux:0", "mtp:0.3/global_tokens", "mtp:0.3",
)  # fmt: skip
TRAVELLING = frozenset({OpKind.BACKWARD_INPUT, OpKind.SEND_BACKWARD, OpKind.RECV_BACKWARD})
OF_GRADIENTS = frozenset({OpKind.REDUCE_GRAD, OpKind.ALL_REDUCE})


def named_wrong(one, seed):
    """The names of the parameters that numbers find wrong."""
    model = model_of(one)
    mesh = one.facts.mesh if one.lowered is None else one.plan.mesh
    return Numbers(one.graph.rows(), one.graph.groups, mesh, model.facts, len(model.micro_batches), seed).wrong()


def named_by_rules(one):
    return {problem.parameter for problem in diagnose(one)}


def is_reduction(row):
    return row.op.kind in OF_GRADIENTS and (row.op.target or row.op).kind is OpKind.REDUCE_GRAD


class Change(NamedTuple):
    """A change of one row that touches gradients: on one rank, or on all that have it."""

    what: str
    rank: int
    everywhere: bool
    target: int
    scale: int
    at: int

    def apply(self, rows):
        example = rows[self.rank % len(rows)]
        if self.what == "way":
            self._scale_between(rows)
            return
        kind = {"loss": OpKind.FORWARD, "write": OpKind.BACKWARD, "move": OpKind.BACKWARD, "factor": OpKind.BACKWARD}
        names = [
            str(row.op)
            for row in example
            if (row.op.kind is kind[self.what] if self.what in kind else is_reduction(row))
        ]
        if self.what == "regroup":
            self._regroup(example)
        elif names:
            name = names[self.target % len(names)]
            for program in rows if self.everywhere else [example]:
                place = next((i for i, row in enumerate(program) if str(row.op) == name), None)
                if place is not None:
                    self._change(program, place)

    def _scale_between(self, rows):
        """Rows between stages get a scale: one, all of one stage, or a send and the inverse on its receive."""
        example = rows[self.rank % len(rows)]
        names = [str(row.op) for row in example if row.op.kind in TRAVELLING]
        if not names:
            return
        name = names[self.target % len(names)]
        self._set_scale(rows if self.everywhere else [example], name, SCALES[self.scale % len(SCALES)])
        if self.at % 2 and "SEND_B" in name and not self.everywhere:
            sent = next(row for row in example if str(row.op) == name)
            back = name.replace(f"{sent.op.stage}SEND", f"{sent.op.stage - 1}RECV")
            self._set_scale([rows[sent.peer]], back, SCALES[(self.scale ^ 1) % len(SCALES)])

    def _set_scale(self, programs, name, scale):
        for program in programs:
            program[:] = [dataclasses.replace(row, scale=scale) if str(row.op) == name else row for row in program]

    def _regroup(self, program):
        """One reduction of one rank takes part in the group of another."""
        places = [i for i, row in enumerate(program) if is_reduction(row) and row.group >= 0]
        if places:
            place, other = places[self.target % len(places)], places[self.at % len(places)]
            program[place] = dataclasses.replace(program[place], group=program[other].group)

    def _change(self, program, place):
        row = program[place]
        scales = LOSS_SCALES if self.what == "loss" else SCALES
        scale = scales[self.scale % len(scales)]
        match self.what:
            case "drop":
                del program[place]
            case "double":
                program.insert(place, row)
            case "average":
                program[place] = dataclasses.replace(row, reduction="avg")
            case "scale sum" | "factor" | "loss":
                program[place] = dataclasses.replace(row, scale=scale)
            case "write":
                program[place] = dataclasses.replace(row, reduction="overwrite")
            case "move":
                program.insert(max(place, len(program) - 1 - self.at), program.pop(place))
            case "scale":
                op = parse_op(f"{row.op.stage}SCALE_GRAD")
                program.insert(len(program) - 1 - self.at % 4, Row(op, scale=scale))


WHATS = ("regroup", "drop", "double", "average", "scale sum", "scale", "loss", "write", "move", "factor", "way")
CHANGES = st.builds(
    Change,
    st.sampled_from(WHATS),
    st.integers(0, 7),
    st.booleans(),
    st.integers(0, 30),
    st.integers(0, 7),
    st.integers(0, 7),
)


def unexpected(rows, groups):
    """True if a rank reduces alone on a group of another axis: that hangs, and sums nothing in particular."""
    calls = [Counter(row.group for row in program if is_reduction(row)) for program in rows]
    uneven = {g for g, group in enumerate(groups) if len({calls[rank][g] for rank in group.ranks}) > 1}
    on_others = {row.group for program in rows for row in program if is_reduction(row) and row.group >= 0
                 and row.op.axis != groups[row.group].axis}  # fmt: skip
    return bool(uneven & on_others)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(BASES)), st.lists(CHANGES, max_size=3), st.integers(0, 10**6))
def test_rules_and_numbers_name_the_same_parameters(base, changes, seed):
    one = BASES[base]()
    rows = one.graph.rows()
    for change in changes:
        change.apply(rows)
    one = one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))
    in_numbers = named_wrong(one, seed)
    if in_numbers is not None and not unexpected(rows, one.graph.groups):
        assert named_by_rules(one) - {""} == in_numbers


def test_the_bases_are_right_in_numbers():
    for make in BASES.values():
        assert named_wrong(make(), 7) == set()
        assert diagnose(make()) == ()


def test_numbers_see_a_mistake():
    base = BASES["mean of means"]()
    rows = base.graph.rows()
    Change("factor", 0, everywhere=False, target=0, scale=1, at=0).apply(rows)
    one = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    assert len(named_wrong(one, 7)) == 10
