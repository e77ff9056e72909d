"""The words of the rules, put into those of the log: operations as the program issued them, and where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from pipeproof.interop.record.graph import RecordedGraph
from pipeproof.interop.record.log import LoggedCall
from pipeproof.schedule.ops import CHILD_KINDS, TRANSFER_KINDS
from pipeproof.specs.finding import CycleWitness, Finding, OpsWitness, ProgramExcerpt, WitnessOp

_NAMES = "|".join(sorted((str(kind) for kind in TRANSFER_KINDS | CHILD_KINDS), key=len, reverse=True))
_OP = re.compile(rf"(WAIT\()?(?<![\w.])(\d+(?:{_NAMES})\d+)(\))?")


def call_text(call: LoggedCall) -> str:
    """An operation with its peers and tensors."""
    if call.is_message:
        arrow = f"{call.rank}->{call.peer}" if call.op == "send" else f"{call.rank}<-{call.peer}"
        about = f" ({call.mark})" if call.mark is not None else ""
        return f"{call.op} {arrow}{about} of {call.tensors_text}"
    tensors = f" of {call.tensors_text}" if call.tensors_text else ""
    return f"{call.op} on {call.group.title} {list(call.group.ranks)}{tensors}"


def place_text(call: LoggedCall) -> str:
    """`` at train.py:31``: where the user's code issued it; empty where that is not known."""
    return f" at {call.at}" if call.at else ""


def retell(finding: Finding, recorded: RecordedGraph) -> Finding:
    """A rule's finding about the graph, with the names that the log gives its operations."""
    witness = finding.witness
    message = translate(finding.message, recorded.texts)
    if isinstance(witness, OpsWitness | CycleWitness):
        calls = [recorded.calls[op.op_id] for op in witness.ops if op.op_id is not None]
        places = dict.fromkeys(
            f"rank {call.rank} issued {call_text(call)}{place_text(call)}" for call in calls if call.at
        )
        message = "\n".join((message, *places))
        ops = tuple(replace(op, op=translate(op.op, recorded.texts)) for op in witness.ops)
        witness = _with_ops(witness, ops, recorded.texts)
    mend = None if finding.help is None else translate(finding.help, recorded.texts)
    return replace(finding, message=message, help=mend, witness=witness)


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
    """A text with each operation of the graph in words."""

    def said(match: re.Match[str]) -> str:
        words = texts.get(match[2])
        if words is None:
            return match[0]
        return f"wait for {words}" if match[1] else words + (match[3] or "")

    return _OP.sub(said, text)
