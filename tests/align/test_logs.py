"""Logs as PaddleFormers, PaddleFleet and Megatron print them: lines that are read, skipped, and refused."""

import re
import tracemalloc
from pathlib import Path

import pytest

from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance, align_losses
from pipeproof.analysis.align.record_format import AlignmentError
from pipeproof.analysis.align.training_logs import LogForm, Observed, read_log
from tests.cli.commands import invoke
from tests.docs.test_schemas import require_fit, strict_json

LOGS = Path(__file__).parent / "logs"
BITS = Tolerance()
MD5 = "0" * 32
FLEET = LogForm(2, ("main", "mtp"), 7)
MEGATRON = LogForm(2, ("mtp", "main"), 0)


def log(tmp_path, text, name="a.log"):
    path = tmp_path / name
    path.write_text(text)
    return path


def trainer(step, loss, extra=""):
    return f"[ INFO] - loss: {loss}, learning_rate: 1e-05, global_step: {step}, interval_runtime: 0.1{extra}\n"


def test_the_trainers_lines():
    seen = list(read_log(LOGS / "trainer.log", LogForm()))
    assert [(o.step, o.loss) for o in seen] == [(s, loss) for s in (1, 2, 3, 4) for loss in ("main", "mtp1")]
    assert seen[0] == Observed(1, "main", "loss", None, None, "11.98305893", None)
    assert seen[5].value == "11.99843025"


def test_a_logs_own_md5(tmp_path):
    (seen,) = read_log(log(tmp_path, trainer(3, 9.1, f", loss_md5: {MD5}")), LogForm())
    assert seen.md5 == MD5


def test_anchors_are_counted_by_micro_batch_and_loss():
    seen = list(read_log(LOGS / "fleet.log", LogForm(2, ("main", "mtp"))))
    assert {o.rank for o in seen} == {7}
    finals = [(o.step, o.micro_batch, o.loss) for o in seen if o.what == "final_loss"]
    assert finals == [(s, m, loss) for s in (1, 2, 3) for m in (0, 1) for loss in ("main", "mtp")]
    paths = [(o.step, o.micro_batch, o.loss) for o in seen if o.what == "mtp_loss_path"]
    assert paths == [(s, m, "mtp1") for s in (1, 2, 3) for m in (0, 1)]
    assert all(re.fullmatch("[0-9a-f]{32}", o.md5) for o in seen)
    assert {o.value is None for o in seen if o.what == "per_token_loss"} == {True}


def test_fleet_and_megatron_agree_although_they_print_in_other_orders(tmp_path):
    # without the lines that only Fleet prints every loss has a partner
    text = "".join(line for line in (LOGS / "fleet.log").open() if "MTP_LOSS_PATH" not in line)
    fleet = log(tmp_path, text)
    found = align(fleet, LOGS / "megatron.log", BITS, (FLEET, MEGATRON))
    assert found.equal
    assert (len(found.losses.main.steps), len(found.losses.mtp.steps)) == (3, 3)
    wrong = align(fleet, LOGS / "megatron.log", BITS, (FLEET, LogForm(2, ("main", "mtp"), 0)))
    assert wrong.losses.main.num_equal == 0


def test_what_only_one_side_prints_is_no_match():
    found = align(LOGS / "fleet.log", LOGS / "megatron.log", BITS, (FLEET, MEGATRON))
    assert not found.equal
    assert found.losses.main.num_equal == 3
    assert found.losses.unpaired == [6, 0]
    assert found.losses.examples[0].what == "mtp_loss_path"


def test_the_first_difference_and_its_distance(tmp_path):
    a = "".join(trainer(step, 9.0) for step in range(1, 6))
    b = a.replace(trainer(3, 9.0), trainer(3, 9.5)).replace(trainer(5, 9.0), trainer(5, "nan"))
    found = align(log(tmp_path, a), log(tmp_path, b, "b.log"), BITS)
    assert found.losses.main.differing == {3, 5}
    first = found.losses.main.first
    assert (first.a.step, first.relative) == (3, 0.5 / 9.5)
    assert first.ulps == 0.5 / 2**-20  # between 8 and 16 the float32 are 2^-20 apart


@pytest.mark.parametrize(
    ("tolerance", "equal"),
    [
        (Tolerance(), False),
        (Tolerance(ulps=1), True),
        (Tolerance(relative=1e-6), True),
        (Tolerance(relative=1e-9), False),
    ],
)
def test_within_what_was_asked(tolerance, equal, tmp_path):
    near = f"{9.0 + 2**-20:.20f}"  # the next float32
    a, b = log(tmp_path, trainer(1, "9.0")), log(tmp_path, trainer(1, near), "b.log")
    assert align(a, b, tolerance).equal is equal


def test_other_digits_of_one_float32_are_different(tmp_path):
    a, b = log(tmp_path, trainer(1, "7.11150000")), log(tmp_path, trainer(1, "7.11150001"), "b.log")
    found = align(a, b, BITS)
    assert not found.equal
    assert found.losses.main.first.ulps == 0
    assert 1.4e-9 < found.losses.main.first.relative < 1.5e-9


def test_other_md5s_of_the_same_digits_are_different(tmp_path):
    a = log(tmp_path, trainer(1, 9.0, f", loss_md5: {MD5}"))
    b = log(tmp_path, trainer(1, 9.0, f", loss_md5: {'1' * 32}"), "b.log")
    assert not align(a, b, BITS).equal


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        (trainer(1, "9.o"), "'9.o' is not a loss"),
        (trainer("1x", 9.0), "'1x' is not a global_step"),
        (trainer(1, 9.0, ", loss_md5: 12"), "'12' is not an MD5"),
        (trainer(1, 9.0, ", mtp_1_loss: ?"), "'?' is not a loss"),
        (f"final_loss: rank=x val=1.0 md5={MD5}\n", "'x' is not a rank"),
        (f"final_loss: rank=0 val=1.0 md5={MD5[1:]}\n", "is not an MD5"),
        (f"final_loss: rank=0 val=one md5={MD5}\n", "'one' is not a loss"),
    ],
)
def test_a_line_that_shows_a_loss_must_be_whole(line, fact, tmp_path):
    bad = log(tmp_path, "before\n" + line)
    with pytest.raises(AlignmentError, match=re.escape(fact)) as refused:
        list(read_log(bad, LogForm()))
    assert f"{bad}:2: " in str(refused.value)


@pytest.mark.parametrize(
    "line",
    [
        "", "loss: 3", "global_step: 7, lr: 1", "eval_loss: 1.0, global_step: 4", "\x00\xff loss", "train_loss = 3",
        "final_loss = 3", "per_token_loss:", "[ INFO] - loss: 9.0, learning_rate: 1e-05, global_st",
    ],
)  # fmt: skip
def test_other_lines_are_passed_over(line, tmp_path):
    assert list(read_log(log(tmp_path, line), LogForm())) == []


def test_progress_bars_and_prints_on_one_line(tmp_path):
    text = f" 10%|#\r{trainer(1, 9.0)}x final_loss: rank=0 val=1 md5={MD5} final_loss: rank=1 val=2 md5={MD5}\n"
    seen = list(read_log(log(tmp_path, text), LogForm()))
    assert [(o.step, o.rank, o.value) for o in seen] == [(1, None, "9.0"), (1, 0, "1"), (1, 1, "2")]


def test_a_long_log_is_read_in_bounded_memory():
    def stream(late):
        for step in range(10_000):
            for rank in range(4):
                yield Observed(step, "main", "final_loss", (rank + late) % 4, 0, "9.0", MD5)

    tracemalloc.start()
    found = align_losses(stream(0), stream(1), BITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.main.steps) == 10_000
    assert found.equal
    assert peak < 4e6


def test_a_side_without_partners_does_not_grow(monkeypatch):
    monkeypatch.setattr("pipeproof.analysis.align.loss_pairs.WINDOW", 10)
    lonely = (Observed(step, "main", "loss", None, None, "9.0", None) for step in range(100))
    found = align_losses(lonely, iter(()), BITS)
    assert found.unpaired == [100, 0]
    assert found.examples[0].step == 0


def test_a_step_that_comes_twice_has_one_partner(tmp_path):
    a = log(tmp_path, trainer(1, 9.0) + trainer(1, 9.0))
    b = log(tmp_path, trainer(1, 9.0), "b.log")
    found = align(a, b, BITS)
    assert found.losses.unpaired == [1, 0]
    assert not found.equal


@pytest.mark.parametrize(
    ("a", "b", "fact"),
    [
        ("no loss here\n", "nor here\n", "shows a loss"),
        (trainer(1, 9.0), trainer(7, 9.0), "have no loss in common: A has `loss` (main) of step 1 and B has"),
        (trainer(1, 9.0), "", "B has none"),
    ],
)
def test_nothing_in_common(a, b, fact, tmp_path):
    with pytest.raises(AlignmentError, match=re.escape(fact)):
        align(log(tmp_path, a), log(tmp_path, b, "b.log"), BITS)


def test_the_json_of_logs_fits_the_schema(tmp_path):
    a, b = log(tmp_path, trainer(1, 9.0)), log(tmp_path, trainer(1, "inf"), "b.log")
    for path, status in ((b, 1), (a, 0), (LOGS / "megatron.log", 2)):
        result = invoke("state", "align", a, path, "--format", "json")
        assert result.exit_code == status
        if status < 2:
            require_fit("align", strict_json(result.stdout))
