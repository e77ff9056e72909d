"""Records: written by hand, cut off, mixed up, and compared with each other."""

import json
import re

import numpy as np
import pytest

from pipeproof.analysis.align.array_digests import md5_of, norm_of
from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.analysis.align.read_record import RecordFile
from pipeproof.analysis.align.record_format import AlignmentError, Header, Recorded, RecordedStep, Shard, values_file
from tests.cli.commands import invoke

BITS = Tolerance()


def gradient(step, name="head.weight", value=1.0, shape=(2, 3)):
    array = np.full(shape, value, "f4")
    return array, Recorded(
        step, name.split(".")[0], shape, "float32", md5_of(array), norm_of(array), (), parameter=name
    )


def write(directory, *, steps=3, values=False, dtype="float32", digest="d" * 64, change=lambda step: {}):
    """A record of one gradient and a loss; ``change`` gives other keywords of a step's gradient."""
    header = Header("run", "0.1.0", digest, "paddle", dtype, steps, layers=False, values=values)
    directory.mkdir()
    lines = [header.to_line()]
    for step in range(steps):
        array, line = gradient(step, **change(step))
        loss = np.float32(5.5 - step)
        lines.append(RecordedStep(step, f"{float(loss):.20f}", md5_of(np.asarray(loss)), (line,)).lines())
        if values:
            file = values_file(directory, step)
            file.parent.mkdir(exist_ok=True)
            np.savez(file, **{line.key: array})
    (directory / "record.jsonl").write_text("".join(lines))
    return directory


def test_what_is_written_is_read(tmp_path):
    directory = write(tmp_path / "a")
    record = RecordFile(directory)
    assert (record.header.who, record.header.steps, record.header.values) == ("run", 3, False)
    steps = list(record.steps())
    assert [step.step for step in steps] == [0, 1, 2]
    assert steps[1].tensors == (gradient(1)[1],)
    assert list(RecordFile(directory / "record.jsonl").steps()) == steps


def test_a_tensor_of_a_layer_is_read_as_it_was():
    line = Recorded(
        4, "layer.1", (2,), "float64", "0" * 32, 1.5, (Shard(3, "1" * 32, ((0, 2),)),), "forward", "input", 7, 1
    )
    assert Recorded.from_json(json.loads(json.dumps(line.to_json()))) == line
    assert line.title == "layer.1, forward input, micro-batch 7, piece 1"


def test_a_norm_that_is_no_number_is_null():
    assert gradient(0, value=float("nan"))[1].to_json()["norm"] is None


def test_the_first_difference_and_the_steps_after_it(tmp_path):
    a = write(tmp_path / "a", values=True, change=lambda step: {"value": 2.0} if step else {})
    found = align(a, write(tmp_path / "b", values=True), BITS)
    assert found.losses.equal
    tensors = found.tensors
    assert (tensors.num_compared, tensors.num_differing, tensors.differing_steps) == (3, 2, 2)
    assert (tensors.first.a.step, tensors.first.ulps, tensors.first.relative) == (1, 2**23, 1.0)
    assert tensors.first.cause.family == "scale"
    assert align(a, tmp_path / "b", Tolerance(relative=1.0)).equal
    assert not align(a, tmp_path / "b", Tolerance(relative=0.9, ulps=5)).equal
    assert align(a, tmp_path / "b", Tolerance(ulps=2**23)).equal


def test_without_values_only_norms_speak(tmp_path):
    a = write(tmp_path / "a", values=True, change=lambda _: {"value": 2.0})
    found = align(a, write(tmp_path / "b"), Tolerance(relative=1.0))
    assert not found.equal
    assert found.tensors.first.ulps is None
    assert found.tensors.first.cause.evidence == "by norms alone: A's is 2 of B's"
    assert "B has no values (`run --record-values`): only MD5s and norms were compared" in found.notes


def test_other_shapes_dtypes_and_plans_are_named(tmp_path):
    a = write(tmp_path / "a", change=lambda _: {"shape": (3, 2)}, digest="e" * 64)
    b = write(tmp_path / "b", dtype="float64")
    found = align(a, b, BITS)
    assert found.tensors.first.cause.evidence == "A is float32 [3, 2], B float32 [2, 3]"
    assert "A computed in float32, B in float64" in found.notes
    assert f"the plans differ: digests {'e' * 12} and {'d' * 12}" in found.notes


def test_a_killed_run_has_whole_steps_and_the_missing_ones_are_no_match(tmp_path):
    found = align(write(tmp_path / "a", steps=2), write(tmp_path / "b", steps=3), BITS)
    assert not found.equal
    assert found.losses.main.num_equal == 2
    assert found.losses.unpaired == [0, 1]


def test_a_tensor_that_one_side_lacks(tmp_path):
    a = write(tmp_path / "a", change=lambda step: {"name": "norm.weight"} if step == 1 else {})
    found = align(a, write(tmp_path / "b"), BITS)
    assert (found.tensors.only_a, found.tensors.only_b, found.equal) == (1, 1, False)
    assert found.tensors.example == "step 1, gradient of norm.weight: only A has it"


def cut(text):
    return text[:-10]


def without_the_end(text):
    return "".join(text.splitlines(keepends=True)[:-1])


DAMAGE = {
    "cut": (cut, "record.jsonl:7: the last line is cut off"),
    "no end of step": (without_the_end, "the file ends in the midst of step 2; it was cut off"),
    "no json": (lambda text: text + "nothing\n", ":8: no JSON"),
    "no object": (lambda text: text + "[1]\n", ":8: a line of a record is an object"),
    "other kind": (lambda text: text + '{"kind":"x"}\n', ":8: no line of a record: kind 'x'"),
    "no kind": (lambda text: text + "{}\n", ":8: no line of a record: key 'kind' is missing"),
    "other format": (lambda text: text.replace('"format":1', '"format":2', 1), "format 2, this pipeproof reads"),
    "no header": (lambda text: text.split("\n", 1)[1], ":1: no header of a record: kind 'gradient'"),
    "empty": (lambda _: "", ":1: the last line is cut off"),
    "step again": (lambda text: text + text.splitlines(keepends=True)[-1], "the end of step 2 counts 0 tensors and 1"),
    "steps go back": (
        lambda text: text + "".join(text.splitlines(keepends=True)[1:3]), ":9: no line of a record: step 0 after",
    ),
    "no loss": (lambda text: text.replace("5.50000000000000000000", "none", 1), "could not convert string to float"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_record_is_refused_with_its_place(name, tmp_path):
    good, bad = write(tmp_path / "a"), write(tmp_path / "b")
    damage, fact = DAMAGE[name]
    file = bad / "record.jsonl"
    file.write_text(damage(file.read_text()))
    result = invoke("state", "align", good, bad)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert fact in result.stderr
    assert result.stdout == ""


def test_values_that_are_missing_or_are_others(tmp_path):
    a, b = (write(tmp_path / name, values=True, change=lambda _, v=v: {"value": v}) for name, v in (("a", 1), ("b", 2)))
    file = values_file(a, 0)
    content = file.read_bytes()
    np.savez(file, **{"gradient/head.weight": np.zeros((2, 3), "f8")})
    with pytest.raises(AlignmentError, match=re.escape("gradient of head.weight is float64 [2, 3] there")):
        align(a, b, BITS)
    for damage in (content[:-30], b"", b"no archive"):
        file.write_bytes(damage)
        with pytest.raises(AlignmentError, match=re.escape(f"{file}: no values of gradient of head.weight: ")):
            align(a, b, BITS)
    file.unlink()
    with pytest.raises(AlignmentError, match="the file is not there; copy the whole directory"):
        align(a, b, BITS)


def test_paths_that_are_no_record(tmp_path):
    good = write(tmp_path / "runs")
    write(tmp_path / "more") and (tmp_path / "more").rename(tmp_path / "runs" / "inner")
    (good / "record.jsonl").unlink()
    for path, fact in (
        (good, f"without record.jsonl: name {good / 'inner'}"),
        (tmp_path / "none", "cannot read"),
        (tmp_path, "without record.jsonl"),
    ):
        result = invoke("state", "align", path, good / "inner")
        assert result.exit_code == 2
        assert fact in result.stderr


def test_a_record_and_a_log_are_not_compared(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("loss: 1.0, global_step: 1\n")
    result = invoke("state", "align", log, write(tmp_path / "a"))
    assert result.exit_code == 2
    assert "compare two records, or two text logs" in result.stderr


def test_records_without_a_common_step(tmp_path):
    result = invoke("state", "align", write(tmp_path / "a", steps=0), write(tmp_path / "b"))
    assert result.exit_code == 2
    assert "have no finished step in common: A none and B 3 from step 0 on" in result.stderr


def test_records_of_other_models_have_nothing_in_common(tmp_path):
    b = write(tmp_path / "b", change=lambda _: {"name": "norm.weight"})
    result = invoke("state", "align", write(tmp_path / "a"), b)
    assert result.exit_code == 2
    assert "no tensor in common" in result.stderr


def test_the_command_on_logs_and_its_options(tmp_path):
    a, b = tmp_path / "a.log", tmp_path / "b.log"
    a.write_text("loss: 1.0, global_step: 1, mtp_1_loss: 2.0\n")
    b.write_text("loss: 1.0000001, global_step: 1, mtp_1_loss: 2.0\n")
    result = invoke("state", "align", a, b)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "main_matches=0/1, mtp_matches=1/1",
        "first_main_diff: step 1, main (loss): A 1.0, B 1.0000001; 1 ulps, relative 1e-07",
        "note: where a log prints no MD5, the printed decimals were compared",
        "different",
    ]
    assert invoke("state", "align", a, b, "--ulps", "1").exit_code == 0
    same = invoke("state", "align", a, a)
    assert same.exit_code == 0
    assert same.stdout.endswith("equal: in every printed digit\n")


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (("--rank-a", "1"), "give --rank-a and --rank-b, or neither"),
        (("--order-a", "main,main"), "is not an order of losses"),
        (("--order-b", "aux"), "is not an order of losses"),
        (("--relative", "nan"), "nan is not a number"),
        (("--ulps", "-1"), "-1"),
        (("--micro-batches", "0"), "0"),
    ],
)
def test_options_that_make_no_sense(options, fact, tmp_path):
    result = invoke("state", "align", write(tmp_path / "a"), tmp_path / "a", *options)
    assert result.exit_code == 2
    assert fact in result.stderr
