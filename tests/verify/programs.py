"""Subjects for the rules' tests: small programs from text, mutants of rows, and the codes that all rules find."""

import dataclasses
import re

from pipeproof.diagnostics.finding import Severity
from pipeproof.schedule.op_table import Group, Row, TensorSpec, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.declared_facts import NO_FACTS
from pipeproof.verify.subject import graph_subject

_OP = re.compile(r"([^\s{]+)(?:\{([^}]*)\})?")
_NUMBERS = {"peer", "tensor", "group", "batch"}


def program(*ranks, tensors=(), groups=(), facts=NO_FACTS):
    """A graph alone from one text per rank: ``0F0 0SEND_F0{peer=1 tensor=0 range=0..8} WAIT(0SEND_F0)``."""
    return graph_subject(build_graph([rows(text) for text in ranks], tensors, groups), facts=facts)


def rows(text):
    """The rows of one rank's text."""
    return [_row(match[1], match[2] or "") for match in _OP.finditer(text)]


def _row(op, attributes):
    values = {}
    for name, _, value in (item.partition("=") for item in attributes.split()):
        if name == "range":
            values["start"], values["stop"] = map(int, value.split(".."))
        else:
            values[name] = int(value) if name in _NUMBERS else value
    return Row(parse_op(op), **values)


def tensor(name="hidden", shape=(8,), **changes):
    return dataclasses.replace(TensorSpec(name, tuple(shape), "float32", "invariant", "sbh"[: len(shape)]), **changes)


def group(axis, *ranks):
    return Group(axis, ranks)


def errors(one):
    """The error findings of all rules."""
    return [finding for finding in check_subject(one).findings if finding.severity is Severity.ERROR]


def codes(one):
    return {finding.code for finding in errors(one)}


def finding_of(one, code):
    """The only error finding with this code."""
    (found,) = [finding for finding in errors(one) if finding.code == code]
    return found


def mutated(base, *changes, tensors=None):
    """The base subject with ``changes`` applied to its rows; each edits the lists in place."""
    changed = base.graph.rows()
    for change in changes:
        change(changed)
    return base.with_graph(build_graph(changed, tensors or base.graph.tensors, base.graph.groups))


def place(program_rows, text):
    return next(i for i, row in enumerate(program_rows) if row.op == parse_op(text))


def remove(program_rows, *texts):
    for text in texts:
        del program_rows[place(program_rows, text)]


def swap(program_rows, first, second):
    i, j = place(program_rows, first), place(program_rows, second)
    program_rows[i], program_rows[j] = program_rows[j], program_rows[i]


def double(program_rows, text):
    i = place(program_rows, text)
    program_rows.insert(i, program_rows[i])


def replace_row(program_rows, text, **changes):
    i = place(program_rows, text)
    program_rows[i] = dataclasses.replace(program_rows[i], **changes)


def crossing_waits(rows):
    """Both ranks wait for their send before they come to the receive that the other's needs."""
    for mine, text in ((rows[0], "0SEND_F1"), (rows[1], "1SEND_B0")):
        wait = mine.pop(place(mine, f"WAIT({text})"))
        mine.insert(place(mine, text) + 1, wait)
