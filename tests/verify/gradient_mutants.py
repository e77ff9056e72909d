"""Changes of rows that touch gradients, and the findings of the rules."""

import dataclasses

from pipeproof.schedule.ops import COMPUTE_KINDS
from pipeproof.verify.gradients.diagnose import diagnose
from tests.plans import subject
from tests.verify.programs import errors


def own(one):
    return {problem.cause.value for problem in diagnose(one)}


def only(one, code):
    """The one finding of all rules, which has this code."""
    (found,) = errors(one)
    assert found.code == code
    return found


def plan(**topology):
    return subject(topology={"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True, **topology})


def drop(*parts):
    """Remove the rows whose text has one of ``parts``, on every rank."""

    def change(rows):
        for program in rows:
            program[:] = [row for row in program if not any(part in str(row.op) for part in parts)]

    return change


def double(part):
    def change(rows):
        for program in rows:
            program[:] = [one for row in program for one in [row] * (1 + (part in str(row.op)))]

    return change


def changed(part, **values):
    """Change the rows whose text has ``part`` (``=`` in front: the row of just that text).

    Collectives below a computation stay as they are.
    """

    def is_meant(op):
        return part in f"={op}=" and (op.target is None or op.target.kind not in COMPUTE_KINDS)

    def change(rows):
        for program in rows:
            program[:] = [dataclasses.replace(row, **values) if is_meant(row.op) else row for row in program]

    return change


def moved(part, before):
    """Moves the rows with ``part`` in front of the row ``before``, on every rank that has both."""

    def change(rows):
        for program in rows:
            if any(str(row.op) == before for row in program):
                taken = [row for row in program if part in str(row.op)]
                program[:] = [row for row in program if part not in str(row.op)]
                place = next(i for i, row in enumerate(program) if str(row.op) == before)
                program[place:place] = taken

    return change
