"""A new rule changes verdicts and the rules' own pages: no digest, saved state, report identity or other page."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from pipeproof.cli import code_registry
from pipeproof.diagnostics.finding import RuleDoc
from pipeproof.exec.launch.worker import require_same_plan
from pipeproof.exec.rank.checkpointing import prepare_checkpoint
from pipeproof.exec.rank.job_files import CheckpointOptions, Job, dump_plan
from pipeproof.state.read_state import find_state
from pipeproof.state.resume_check import require_resumable
from pipeproof.verify import certificate, check_plan, registry
from pipeproof.verify.certificate import backend_table_version, graph_digest
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import Rule
from tests.plans import subject
from tests.state.tiny import write_state

ROOT = Path(__file__).parents[2]
EXAMPLE = "topology: {pp: 2}"
NOTED = RuleDoc("PP299", "the plan has stages", "Every plan has some.", EXAMPLE, EXAMPLE, severity="note")
PLANS = ({}, {"topology": {"pp": 2, "tp": 2}}, {"schedule": {"kind": "gpipe"}})


@pytest.fixture
def add_rule(monkeypatch):
    """Adds a rule of a note, which every plan gets or none, and raises the rule set version."""

    def add(*, finds=True):
        found = [NOTED.finding("it has stages")] if finds else []
        rules = (*registry.RULES, Rule(NOTED, lambda one: iter(found)))
        monkeypatch.setattr(registry, "RULES", rules)
        monkeypatch.setattr(check_plan, "RULES", rules)
        monkeypatch.setattr(check_plan, "CHECK_CODES", (*check_plan.CHECK_CODES, NOTED.code))
        monkeypatch.setattr(code_registry, "RULES", rules)
        monkeypatch.setattr(certificate, "RULE_SET_VERSION", certificate.RULE_SET_VERSION + 1)

    return add


def identity(report):
    """A report's JSON without findings."""
    return {key: value for key, value in report.to_json().items() if key != "findings"}


def test_no_digest_and_no_report_s_identity_changes(add_rule):
    before = [check_subject(subject(**sections)) for sections in PLANS]
    conclusions = [report.conclusion for report in before]
    add_rule()
    after = [check_subject(subject(**sections)) for sections in PLANS]
    assert all("PP299" in {finding.code for finding in report.findings} for report in after)
    assert [identity(report) for report in after] == [identity(report) for report in before]
    for report, was in zip(after, conclusions, strict=True):
        assert report.conclusion == replace(was, rule_set_version=was.rule_set_version + 1)


def test_a_saved_state_is_resumed_as_one_of_the_same_plan(add_rule, tmp_path):
    at = subject()
    directory = write_state(at, tmp_path)
    before = prepare_checkpoint(CheckpointOptions(resume=directory), at, graph_digest(at))
    add_rule()
    report = check_subject(subject())
    require_resumable(find_state(directory), at.plan, report.digest)
    kept = prepare_checkpoint(CheckpointOptions(resume=directory), report.subject, report.digest)
    assert kept == before
    assert not kept.reference_from_state


@pytest.mark.parametrize(
    ("script", "changed"),
    [("make_rules", {"docs/codes.md"}), ("make_tables", set()), ("make_zoo", set()),
     ("make_refused", set()), ("make_receives", set())],
)  # fmt: skip
def test_no_generated_page_but_the_list_of_codes_changes(add_rule, monkeypatch, validation_script, script, changed):
    """These generators ask for rules, checks, refusals or the docstring of the digest."""
    folder = ROOT / "validation" / "pages"
    pages = validation_script("pages")

    def made():
        texts = {}
        monkeypatch.setattr(pages, "main", lambda name, wanted, unexpected=frozenset(): texts.update(wanted))
        with pytest.raises(SystemExit):
            runpy.run_path(str(folder / f"{script}.py"), run_name="__main__")
        return {path.relative_to(ROOT).as_posix(): text for path, text in texts.items()}

    before = made()
    add_rule(finds=False)
    after = made()
    assert before.keys() <= after.keys()
    assert {page for page, text in after.items() if before.get(page) != text} == changed


def test_a_worker_reports_what_differs_from_the_launcher_s_certificate(add_rule, tmp_path):
    at = subject()
    Job(tmp_path, dump_plan(at.loaded), check_subject(at).conclusion).save()
    job = Job.load(tmp_path)
    require_same_plan(at, job.certificate)
    add_rule()
    with pytest.raises(RuntimeError) as raised:
        require_same_plan(at, job.certificate)
    text, version = str(raised.value), job.certificate.rule_set_version
    assert f"rule set version {version + 1}, not {version}; install the same pipeproof" in text
    assert "digest" not in text
    assert "table" not in text


def test_a_worker_distinguishes_another_graph_from_another_backend_table():
    at = subject()
    checked = check_subject(at).conclusion
    with pytest.raises(RuntimeError, match=r"graph digest \w{12}, not \w{12}; install"):
        require_same_plan(subject(schedule={"kind": "gpipe"}), checked)
    other = replace(at, backend=replace(at.backend, max_batched_transfers=3))
    assert graph_digest(other) == graph_digest(at)
    assert backend_table_version(other.backend) != backend_table_version(at.backend)
    with pytest.raises(RuntimeError, match=r"launcher's: backend table version \w{12}, not \w{12}; install"):
        require_same_plan(other, checked)


def test_sources_of_a_table_are_not_in_its_version():
    table = subject().backend
    assert backend_table_version(replace(table, sources=dict.fromkeys(table.sources, "elsewhere"))) == (
        backend_table_version(table)
    )
