"""Experts on four ranks with a module of multi-token prediction: nothing is found where nothing is wrong, faults are.

100 steps on real processes, and all faults with two steps, are in ``validation/results/alignment-log.md``.
"""

import functools
import json

import pytest

from tests.align.planted import FAULTS, LAYER, SCHEDULES
from tests.cli.commands import invoke
from tests.docs.test_schemas import require_fit

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


@pytest.fixture(scope="module")
def trained():
    """Each schedule's plan and reference, one step, made once."""
    from tests.align.planted import plan_under
    from tests.align.recorded_plan import reference_run

    @functools.cache
    def of(schedule):
        plan = plan_under(schedule, steps=1)
        return plan, reference_run(plan)

    return of


@pytest.mark.slow
def test_schedules_have_the_same_bits_as_each_other_and_their_references(tmp_path):
    from tests.align.planted import plan_under
    from tests.align.recorded_plan import record, reference_run

    steps = 2
    for schedule in SCHEDULES:
        plan = plan_under(schedule, topology={"pp": 2, "ep": 4}, steps=steps)
        results = record(plan, reference_run(plan), tmp_path / schedule, values=False)
        assert all(result.bitwise for result in results)
    runs = [tmp_path / schedule / "run" for schedule in SCHEDULES]
    for a, b in [*((run, run.parent / "reference") for run in runs), *((runs[0], run) for run in runs[1:])]:
        result = invoke("state", "align", a, b)
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0] == f"main_matches={steps}/{steps}, mtp_matches={steps}/{steps}, router_matches={steps}/{steps}"
        assert lines[1] == f"tensor_matches={steps * 288}/{steps * 288}"
    texts = [(run / "record.jsonl").read_text().splitlines() for run in runs]
    losses = [[json.loads(line)["loss_md5"] for line in text if '"kind":"step"' in line] for text in texts]
    assert len({*losses[0]}) == steps
    assert losses[0] == losses[1] == losses[2]


@pytest.mark.slow(
    but=[
        "scale-zb_v",
        "norms-1f1b",
        "rope-interleaved",
        "auxiliary-1f1b",
        "modules-interleaved",
        "experts-zb_v",
        "tied-1f1b",
    ]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_in_its_layer(name, schedule, trained, tmp_path):
    from tests.align.planted import located

    fault = FAULTS[name]
    status, printed, found = located(*trained(schedule), tmp_path, fault)
    assert status == 1
    require_fit("align", found)
    first = found["tensors"]["first_difference"]
    assert first["step"] == 0
    assert first["tensor"].items() >= fault.tensor.items()
    assert first["tensor"].get("micro_batch", 0) == 0
    assert first["cause"]["family"] == fault.family
    assert found["main"]["equal"] == (0 if name in ("scale", "experts") else 1)
    assert "first tensor that differs, in execution order: step 0, " in printed
    _of_each[name](found, first, printed)


def _rope(_, first, printed):
    names = ["attn.qkv.weight", "attn_norm.weight"]
    assert sorted(first["weights"]["different"]) == [f"{LAYER}.{name}" for name in names]
    assert "  of its weights' gradients differ: attn.qkv, attn_norm; are equal: " in printed
    assert "are 2 of 16 rows" in first["cause"]["evidence"]  # two sequences: their first tokens are not turned


def _auxiliary(found, first, _):
    assert found["routers"]["first_difference"]["loss"] == "aux"
    equal = [f"{LAYER}.mlp.{part}.{one}.weight" for part in ("experts", "shared") for one in ("down", "gate", "up")]
    assert sorted(first["weights"]["equal"]) == equal


def _experts(found, first, _):
    assert "10 of 16 rows along the last dim" in first["cause"]["evidence"]  # tokens for other experts
    assert found["tensors"]["last_equal_before"]["layer"] == LAYER


def _norms(_, first, __):
    assert "2 groups of ranks of A hold different tensors; their sum is B's" in first["cause"]["evidence"]
    assert len(first["ranks"]) == 8


def _scale(found, first, printed):
    assert "are 1/2 of B's, exactly" in first["cause"]["evidence"]
    assert [found[kind]["first_difference"]["factor"] for kind in ("main", "mtp")] == ["1/2", "1/2"]
    assert printed.count("; A is 1/2 of B\n") == 2


def _tied(found, first, printed):
    assert (found["tensors"]["compared"], found["tensors"]["equal"]) == (288, 287)
    factor = 2 if len(first["ranks"]) == 16 else 4  # in a V eight ranks hold it, and sum once more over ep
    assert f"are {factor} of B's" in printed


def _modules(found, first, _):
    assert "are 2 of B's" in first["cause"]["evidence"]
    assert found["mtp"]["equal"] == 1  # its loss is shown without the weight


_of_each = {
    "scale": _scale,
    "modules": _modules, "norms": _norms, "rope": _rope, "auxiliary": _auxiliary, "experts": _experts, "tied": _tied,
}  # fmt: skip
