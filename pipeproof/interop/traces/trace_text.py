"""Texts of the rules' findings in the terms of the log: the operations that the program issued, and their locations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from pipeproof.diagnostics.finding import CycleWitness, Finding, OpsWitness, ProgramExcerpt, WitnessOp
from pipeproof.interop.traces.trace_graph import RecordedGraph
from pipeproof.interop.traces.trace_log import LoggedCall
from pipeproof.schedule.ops import CHILD_KINDS, TRANSFER_KINDS

_NAMES = "|".join(sorted((str(kind) for kind in TRANSFER_KINDS | CHILD_KINDS), key=len, reverse=True))
_OP = re.compile(rf"(WAIT\()?(?<![\w.])(\d+(?:{_NAMES})\d+)(\))?")


def call_text(call: LoggedCall) -> str:
    """Return an operation with its peers and tensors."""
    if call.is_message:
        arrow = f"{call.rank}->{call.peer}" if call.op == "send" else f"{call.rank}<-{call.peer}"
        meaning = f" ({call.mark})" if call.mark is not None else ""
        return f"{call.op} {arrow}{meaning} of {call.tensors_text}"
    tensors = f" of {call.tensors_text}" if call.tensors_text else ""
    return f"{call.op} on {call.group.title} {list(call.group.ranks)}{tensors}"


def position_text(call: LoggedCall) -> str:
    """Return the position in the user's code, as `` at train.py:31``; empty if it is unknown."""
    return f" at {call.at}" if call.at else ""


def with_log_names(finding: Finding, recorded: RecordedGraph) -> Finding:
    """Return a rule's finding about the graph with the log's names of its operations."""
    witness = finding.witness
    message = translate(finding.message, recorded.texts)
    if isinstance(witness, OpsWitness | CycleWitness):
        calls = [recorded.calls[op.op_id] for op in witness.ops if op.op_id is not None]
        positions = dict.fromkeys(
            f"rank {call.rank} issued {call_text(call)}{position_text(call)}" for call in calls if call.at
        )
        message = "\n".join((message, *positions))
        ops = tuple(replace(op, op=translate(op.op, recorded.texts)) for op in witness.ops)
        witness = _with_ops(witness, ops, recorded.texts)
    suggested_fix = None if finding.help is None else translate(finding.help, recorded.texts)
    return replace(finding, message=message, help=suggested_fix, witness=witness)


def _with_ops(
    witness: OpsWitness | CycleWitness, ops: tuple[WitnessOp, ...], texts: Mapping[str, str]
) -> OpsWitness | CycleWitness:
    if isinstance(witness, OpsWitness):
        return OpsWitness(ops)
    programs = tuple(
        ProgramExcerpt(program.rank, tuple(translate(op, texts) for op in program.ops), program.numbers)
        for program in witness.programs
    )
    return CycleWitness(ops, programs)


def translate(text: str, texts: Mapping[str, str]) -> str:
    """Replace each operation of the graph in a text by its name in the log."""

    def replacement(match: re.Match[str]) -> str:
        name = texts.get(match[2])
        if name is None:
            return match[0]
        return f"wait for {name}" if match[1] else name + (match[3] or "")

    return _OP.sub(replacement, text)
