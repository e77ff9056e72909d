"""All cases together, and the rows of ``bugs.csv`` that they stand for."""

import csv
from pathlib import Path

from pipeproof.diagnostics.finding import Severity
from pipeproof.state.reshard.reshard_codes import PROOF_CODES
from pipeproof.verify.registry import RULES
from tests.zoo import (
    a_layout,
    b_order,
    c_messages,
    d_mapping,
    e_scale,
    f_accumulation,
    g_tied,
    h_reductions,
    i_races,
    j_random,
    k_checkpoints,
    l_edges,
    rule_mutants,
)

FAMILIES = (
    a_layout, b_order, c_messages, d_mapping, e_scale, f_accumulation, g_tied, h_reductions, i_races, j_random,
    k_checkpoints, l_edges,
)  # fmt: skip

with (Path(__file__).parent / "bugs.csv").open(encoding="utf-8", newline="") as _stream:
    BUGS = {row["id"]: row for row in csv.DictReader(_stream)}
"""The bugs that were found in the field, by id."""

CASES = tuple(case for family in FAMILIES for case in family.CASES)

RULE_MUTANTS = rule_mutants.CASES
"""For rules that kill no bug of the zoo alone: a mutant that only they kill."""

ONLY_A_RUN = ("F5", "F6", "J4", "J5", "J6")
"""Wrong mathematics inside one operation: the graph is right, and only values tell."""

ACCEPTED_ROW = "J7"
"""Not a bug: the same sum in another order. It must be accepted."""

ERROR_RULES = tuple(doc.code for doc in (*(rule.doc for rule in RULES), *PROOF_CODES) if doc.severity == Severity.ERROR)


def only_killer(code):
    """The cases that this rule alone kills, all others being on."""
    return [case for case in (*CASES, *RULE_MUTANTS) if case.kills == (code,)]
