"""Examples of rules on what only Python can make: a graph that is not the one its plan is lowered to."""

from __future__ import annotations


def of_small_plan(topology: str, *changes: str) -> str:
    """Python code that makes a small plan of this topology, changes its ``rows`` and leaves it in ``subject``."""
    return "\n".join(
        [
            "from dataclasses import replace",
            "from pipeproof.schedule.build import build_graph",
            "from pipeproof.schedule.optable import Row",
            "from pipeproof.schedule.ops import parse_op",
            "from pipeproof.specs.load import plan_from_dict",
            "from pipeproof.verify.subject import make_subject",
            "",
            "model = {'kind': 'gpt', 'num_layers': 2, 'hidden_size': 16, 'num_heads': 4, 'ffn_size': 32}",
            "model |= {'vocab_size': 32, 'seq_length': 8}",
            "schedule = {'kind': '1f1b', 'num_micro_batches': 2, 'micro_batch_size': 2}",
            f"plan = {{'pipeproof': 1, 'model': model, 'topology': {topology}, 'schedule': schedule}}",
            "base = make_subject(plan_from_dict(plan))",
            "rows = base.graph.rows()",
            *changes,
            "subject = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))",
        ]
    )
