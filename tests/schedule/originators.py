"""Programs of the originators' own code, recorded once, and our schedules in the same words."""

import json
from pathlib import Path

import pytest

_SECTIONS = json.loads((Path(__file__).parent / "originators_orders.json").read_text())


def recorded(section):
    """Parameters ``num_ranks, num_micro_batches, programs``; each program is a list of actions."""
    return [
        pytest.param(
            case["num_ranks"],
            case["num_micro_batches"],
            [program.split() for program in case["programs"]],
            id=f"p{case['num_ranks']}-m{case['num_micro_batches']}",
        )
        for case in _SECTIONS[section]["cases"]
    ]


def actions(schedule):
    """The actions of each rank; an overlapped pair is one, as PyTorch writes it."""
    return [_of_rank(program, schedule.pairs_of(rank)) for rank, program in enumerate(schedule.programs)]


def _of_rank(program, pairs):
    return [
        f"({op};{program[place + 1]})OVERLAP_F_B" if place in pairs else str(op)
        for place, op in enumerate(program)
        if place - 1 not in pairs
    ]
