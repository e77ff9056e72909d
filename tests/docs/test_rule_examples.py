"""Every wrong example brings its code and every right one brings no error; what cannot be run is listed."""

from pathlib import Path

import pytest

from pipeproof.cli.code_registry import all_docs
from pipeproof.diagnostics.finding import ExampleKind, RuleDoc
from tests.docs.rule_examples import can_run, findings_of

ROOT = Path(__file__).parents[2]

NOT_RUN = {
    "PP142": ("what is installed on the machine", "cli/test_schedule_bound.py"),
    "PP163": ("traces of a run", "interop/profiles/test_traces.py"),
    "PP164": ("traces of a run", "interop/profiles/test_traces.py"),
    "PP180": ("a checkpoint, and statements about it", "state/aoa/test_read.py"),
    "PP181": ("a checkpoint, and statements about it", "state/aoa/test_expand.py"),
    "PP182": ("a checkpoint, and statements about it", "state/aoa/test_engine.py"),
    "PP183": ("a checkpoint, and statements about it", "state/aoa/test_inverse.py"),
    "PP184": ("a checkpoint, and statements about it", "state/aoa/test_expand.py"),
    "PP213": ("two checkpoints or plans, and a map between them", "state/reshard_proof/test_proof.py"),
    "PP214": ("two checkpoints or plans, and a map between them", "state/reshard_proof/test_proof.py"),
    "PP215": ("two checkpoints or plans, and a map between them", "state/reshard_proof/test_proof.py"),
    "PP216": ("two checkpoints or plans, and a map between them", "state/reshard_proof/test_proof.py"),
    "PP901": ("a log that differs from the graph", "exec/test_oplog.py"),
    "PP902": ("a worker that dies", "exec/test_run.py"),
    "PP903": ("a worker that hangs", "exec/test_run.py"),
    "PP904": ("other bits than the reference's", "exec/test_run.py"),
    "PP905": ("a run on real processes that is not stopped", "exec/test_compare.py"),
    "PP906": ("what is installed on the machine", "cli/test_options.py"),
    "PP907": ("a launcher of somebody else's", "exec/test_run.py"),
    "PP908": ("a gradient that rounding does not explain", "exec/test_run.py"),
    "PP909": ("a run that is refused before it begins", "exec/test_run.py"),
    "PP913": ("a machine without GPUs", "exec/test_rehearse_command.py"),
    "PP947": ("ranks of a launcher", "exec/test_hosts.py"),
    "PP914": ("elements that arrive wrongly", "exec/test_rehearsal.py"),
    "PP915": ("elements that really arrived", "exec/test_rehearsal.py"),
    "PP920": ("a directory with a state", "exec/test_kept.py"),
    "PP921": ("values of a run", "exec/test_failures.py"),
    "PP922": ("a run whose memory ran out", "exec/test_failures.py"),
    "PP925": ("a state that is resumed", "state/test_data_position.py"),
    "PP926": ("a checkpoint of Paddle's", "state/flex/test_open.py"),
    "PP927": ("a state that is saved", "state/flex/test_saved.py"),
    "PP928": ("a state of such a model", "state/names/test_convention.py"),
    "PP929": ("a file of another tool", "state/names/test_command.py"),
    "PP930": ("a directory of dumps", "interop/hang/test_hang.py"),
    "PP931": ("dumps of a run that hung", "interop/hang/test_hang.py"),
    "PP932": ("dumps of a run that hung", "interop/hang/test_hang.py"),
    "PP933": ("dumps of a run that hung", "interop/hang/test_hang.py"),
    "PP934": ("dumps of a run that hung", "interop/hang/test_hang.py"),
    "PP935": ("dumps of a run that hung", "interop/hang/test_hang.py"),
    "PP936": ("a checkpoint of PyTorch's", "state/dcp/test_read.py"),
    "PP937": ("modules of a training", "train/test_dcp_state.py"),
    "PP940": ("a directory of logs", "interop/record/test_read.py"),
    "PP941": ("logs of a program", "interop/record/test_check_log.py"),
    "PP942": ("logs of a program", "interop/record/test_check_log.py"),
    "PP943": ("logs of a program", "interop/record/test_check_log.py"),
    "PP944": ("logs of a program", "interop/record/test_check_log.py"),
    "PP945": ("logs of a program", "interop/record/test_check_log.py"),
    "PP946": ("logs of a program", "interop/record/test_check_log.py"),
    "PP950": ("a launcher that places ranks", "exec/test_rank_order.py"),
    "PP952": ("rings of a job", "exec/monitor/test_ring.py"),
    "PP953": ("rings of a job", "exec/monitor/test_planted_hangs.py"),
    "PP954": ("rings of a job", "exec/monitor/test_planted_hangs.py"),
    "PP955": ("rings of a job", "exec/monitor/test_verdict.py"),
    "PP956": ("a server of NCCL", "exec/monitor/test_ras.py"),
    "PP923": ("files that are there already", "state/reshard/test_work_directory.py"),
    "PP924": ("a checkpoint that is moved", "state/reshard/test_names.py"),
}
"""Codes whose findings come when commands run, not from what is written: why, and the test that brings them."""

WEAKER = {"PP412", "PP413"}
"""Errors where the backend's table says that the plan hangs; the examples are judged for one where they warn."""

RUNNABLE = [doc for doc in all_docs() if doc.code not in NOT_RUN]


def test_the_list_of_what_is_not_run_is_exact():
    """A new code is run, unless it says of itself that it cannot be."""
    assert {doc.code for doc in all_docs() if not can_run(doc)} == set(NOT_RUN)


@pytest.mark.parametrize("code", NOT_RUN)
def test_what_is_not_run_here_is_brought_about_elsewhere(code):
    _, file = NOT_RUN[code]
    assert code in (ROOT / "tests" / file).read_text()


@pytest.mark.parametrize("doc", RUNNABLE, ids=lambda doc: doc.code)
def test_the_wrong_example_brings_the_code(doc, tmp_path):
    found = {(finding.code, finding.severity) for finding in findings_of(doc, doc.wrong, tmp_path)}
    assert (doc.code, "warning" if doc.code in WEAKER else doc.severity) in found


@pytest.mark.parametrize("doc", RUNNABLE, ids=lambda doc: doc.code)
def test_the_right_example_brings_no_error(doc, tmp_path):
    found = findings_of(doc, doc.right, tmp_path)
    assert [finding for finding in found if finding.severity == "error"] == []
    assert doc.code not in {finding.code for finding in found}


@pytest.mark.parametrize("doc", all_docs(), ids=lambda doc: doc.code)
def test_documents_are_written_alike(doc):
    assert doc.severity in ("error", "warning", "note")
    assert doc.title[0].islower() or doc.title.startswith(("`", "AOA ", "Fleet"))
    assert doc.title[-1] != "."
    assert doc.explanation.endswith((".", ".)"))
    assert "  " not in doc.explanation
    assert doc.wrong != doc.right


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("rank 0: 0F0", ExampleKind.PROGRAM),
        ("tensor t: shape=4\nrank 0: 0F0", ExampleKind.PROGRAM),
        ("from pipeproof import check\nsubject = 1", ExampleKind.PYTHON),
        ("topology: {pp: 2}", ExampleKind.PLAN),
    ],
)
def test_the_kind_of_an_example_shows(text, kind):
    assert RuleDoc("PP999", "t", "e", wrong=text, right="").example_kind is kind


def test_the_kind_can_be_said():
    doc = RuleDoc("PP999", "t", "e", wrong="rank 1 died", right="it lives", kind=ExampleKind.OUTCOME)
    assert doc.example_kind is ExampleKind.OUTCOME


def test_no_code_stands_for_two_things() -> None:
    codes = [doc.code for doc in all_docs()]
    assert len(codes) == len(set(codes))
