"""Subjects that consist of facts: typed programs, index maps, random draws. Their graph has no rows."""

from pipeproof.schedule.op_table import build_graph
from pipeproof.verify.declared_facts import Facts
from pipeproof.verify.subject import graph_subject
from tests.zoo.case import Case


def stated(*, num_ranks=1, **facts):
    """A subject without operations; these facts are all that is known."""
    return graph_subject(build_graph([[]] * num_ranks, (), ()), facts=Facts(**facts))


def of_typed(id, mutation, write, kills, **change):
    """A case whose right form is the typed program that ``write`` writes, and whose mutant is ``write(**change)``."""
    return Case(
        id,
        mutation,
        lambda: stated(typed_programs=(write(),)),
        lambda: stated(typed_programs=(write(**change),)),
        kills,
    )
