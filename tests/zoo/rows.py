"""Small changes of the rows of a subject's graph."""

from pipeproof.schedule.op_table import build_graph


def changed(subject, change):
    """The subject with ``change`` (a row to a row, or to None, which drops it) applied to every row."""
    graph = subject.graph
    rows = [[new for row in rank if (new := change(row)) is not None] for rank in graph.rows()]
    return subject.with_graph(build_graph(rows, graph.tensors, graph.groups))


def without(subject, text):
    """The subject without the rows whose operation has ``text`` in its text form."""
    return changed(subject, lambda row: None if text in str(row.op) else row)
