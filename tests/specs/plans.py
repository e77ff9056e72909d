"""The issue's plan as text and as data, and the outcome of loading as a pair."""

from pathlib import Path

import yaml

from pipeproof.diagnostics.finding import BadPlanError

EXAMPLE = """\
pipeproof: 1
model:
  {kind: gpt, num_layers: 4, hidden_size: 64, num_heads: 4, ffn_size: 128, vocab_size: 256, seq_length: 32}
topology: {pp: 2, tp: 2, dp: 1, sequence_parallel: true}
schedule: {kind: 1f1b, num_micro_batches: 4, micro_batch_size: 2}
transport: {forward: full, backward: full}        # full | partial; a plain string sets both
cost:     {forward_us: 100, backward_us: 200, p2p_latency_us: 0}
run:      {backend: paddle, device: cpu, dtype: float32, steps: 2, seed: 7, learning_rate: 0.01}
"""


def example(**sections):
    """The plan as data, each section updated with the given keys (or replaced, where it is not a mapping)."""
    data = yaml.safe_load(EXAMPLE)
    for name, value in sections.items():
        data[name] = {**data.get(name, {}), **value} if isinstance(value, dict) else value
    return data


def outcome(load, what):
    """(the spec, None) or (None, the refusal); any other exception passes."""
    try:
        return load(what).spec, None
    except BadPlanError as error:
        return None, error


def example_plans():
    """The plan files of the repository's examples; next to them are files that other programs have written."""
    examples = Path(__file__).parents[2] / "examples"
    found = [path for path in sorted(examples.rglob("*.yaml")) if examples / "importing" not in path.parents]
    assert found
    return found
