"""The seed experiment: equal losses with wrong gradients, and the exact conditions for that."""

from pathlib import Path

import pytest

from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.verify.check_plan import check
from tests.exec.processes import Run
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

SEED = Path(__file__).parents[2] / "examples" / "seed"
PLACES = ("after_tail_empty", "before_tail_empty")
SAME_ROWS, OTHER_ROWS, FULL = "whole tokens", "cut tokens", "sent in full"


def first_step(place, transport, *, tp=2, rows=2, **model):
    from tests.exec.in_memory import compared

    plan = subject(
        model={"num_layers": 2, "empty_layers": {"tail": 4}, "final_norm": place, **model},
        topology={"pp": 2, "tp": tp, "sequence_parallel": True},
        schedule={"num_micro_batches": 2, "micro_batch_size": rows},
        stages="layer:TransformerLayer|EmptyLayer",
        transport={"forward": transport, "backward": transport},
        run={"steps": 1},
    ).unfolded().plan  # fmt: skip
    assert ("norm" in plan.stages[0]) == (place == "before_tail_empty")
    (step,) = compared(plan)
    return step


def by_name(step):
    return {gradient.name: gradient for gradient in step.gradients}


def tells_apart(one, other):
    """The names of the gradients that differ between two runs."""
    ours, theirs = by_name(one), by_name(other)
    assert ours.keys() == theirs.keys()
    return {name for name in ours if ours[name].md5 != theirs[name].md5}


@pytest.mark.slow(but=["sizes1-whole tokens", "sizes5-cut tokens", "sizes7-sent in full"])
@pytest.mark.parametrize(
    ("sizes", "meant"),
    [
        ({"seq_length": 8}, SAME_ROWS),
        ({"seq_length": 8, "activation_order": "bsh"}, SAME_ROWS),
        ({"seq_length": 6, "rows": 2}, SAME_ROWS),  # three tokens of each row, two rows
        ({"seq_length": 16, "tp": 4, "rows": 1}, SAME_ROWS),
        ({"seq_length": 6, "rows": 1}, OTHER_ROWS),
        ({"seq_length": 6, "rows": 1, "activation_order": "bsh"}, OTHER_ROWS),
        ({"seq_length": 12, "tp": 4, "rows": 2}, OTHER_ROWS),
        ({"seq_length": 4, "tp": 4, "rows": 1, "hidden_size": 18, "head_size": 4}, FULL),
    ],
)
def test_losses_agree_exactly_where_slices_have_whole_tokens(sizes, meant):
    tp, rows = sizes.get("tp", 2), sizes.get("rows", 2)
    num_tokens, hidden = sizes["seq_length"] // tp * rows, sizes.get("hidden_size", 16)
    is_sent_in_full = num_tokens * hidden % tp != 0
    assert meant == (FULL if is_sent_in_full else SAME_ROWS if num_tokens % tp == 0 else OTHER_ROWS)

    after, before = (first_step(place, "partial", **sizes) for place in PLACES)
    if meant == FULL:
        assert after.bitwise
        assert before.bitwise
        return
    assert (after.loss.tobytes() == before.loss.tobytes()) == (meant == SAME_ROWS)
    assert after.loss != after.reference_loss != before.loss
    everything = by_name(after).keys()
    assert tells_apart(after, before) == (everything - {"head.weight"} if meant == SAME_ROWS else everything)
    assert not any(gradient.bitwise for step in (after, before) for gradient in step.gradients)


def test_in_full_both_are_the_reference():
    after, before = (first_step(place, "full") for place in PLACES)
    assert after.bitwise
    assert before.bitwise
    assert tells_apart(after, before) == set()
    assert after.loss.tobytes() == before.loss.tobytes()


@pytest.mark.slow
def test_on_real_processes(tmp_path):
    reports = []
    for place in ("after", "before"):
        spec = load_plan(SEED / f"norm_{place}_partial.yaml").spec
        plan = spec.model_dump(mode="json", exclude_unset=True) | {"run": {"steps": 1, "seed": 7}}
        assert "PP201" in {finding.code for finding in check(plan_from_dict(plan)).errors}
        ended = Run(tmp_path / place, plan, "--unsafe").end()
        assert ended.status == 1
        assert ended.report["log_matches_graph"]
        assert not ended.report["verified"]
        reports.append(ended.report)
    losses = {report["steps"][0]["loss"] for report in reports}
    references = {report["steps"][0]["reference_loss"] for report in reports}
    assert len(losses) == len(references) == 1
    assert losses != references
    after, before = ({g["name"]: g for g in report["gradients"]} for report in reports)
    assert {name for name in after if after[name]["md5"] == before[name]["md5"]} == {"head.weight"}
    for gradients in (after, before):
        assert all(one["md5"] != one["reference_md5"] or not one["replicas_agree"] for one in gradients.values())
