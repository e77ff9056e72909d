"""Directories that the hosts of a run kept, merged: the report of all ranks, and refusals of what is not one run."""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from pipeproof.diagnostics.finding import (
    BadPlanError,
    CycleWitness,
    ElementRange,
    Finding,
    OpsWitness,
    RangesWitness,
    Severity,
    WitnessOp,
)
from pipeproof.exec.compare.step_losses import NotFiniteError
from pipeproof.exec.launch.host_part import (
    HostPart,
    RankRecords,
    host_part,
    merge_directories,
    merged_report,
    read_directories,
    read_records,
)
from pipeproof.exec.launch.run_console import step_line
from pipeproof.exec.launch.run_plan import StepCollector, finish_report, prepare_job
from pipeproof.exec.launch.supervisor import Launcher
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.measure.clock_correction import ClockCorrection, Knot
from pipeproof.exec.rank.job_files import Job, RecordOptions, RunOptions, dump_plan, load_json, save_arrays, save_json
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.exec.store.rendezvous import process_environment
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.cli.commands import invoke
from tests.exec.logs import faithful_log
from tests.exec.test_host_parts import faithful, flip
from tests.plans import plan_dict

TP_DP = {"topology": {"pp": 1, "tp": 2, "dp": 2}, "run": {"steps": 2}}
BY_BOUND = {"topology": {"pp": 2, "tp": 2}, "run": {"steps": 2, "backend": "torch"}}
HOSTS = ((0, 1), (2, 3))


def checked(sections):
    report = check(plan_from_dict(plan_dict(**sections)))
    assert report.certificate is not None
    return replace(report, subject=report.subject.unfolded())


def kept(report, directory, ranks, outcomes, references, *, has_reference=(True, True), spoil=lambda logs: None):
    """The job of one host after its ranks and its reference have ended, the files of its ranks in it."""
    directory.mkdir()
    job = Job(directory, dump_plan(report.subject.loaded), report.conclusion, RunOptions())
    job.save()
    by_bound = report.subject.plan.spec.run.backend == "torch"
    for step, (own, reference) in enumerate(zip(outcomes, references, strict=True)):
        for rank in ranks:
            own[rank].save(job.step_file(f"rank{rank}", step))
            if by_bound and step:
                save_arrays(job.weights_file(rank, step), {"w": np.zeros(1)})
        for name, outcome in zip(("ordered", "unpartitioned"), reference, strict=True):
            if has_reference[step] and not (by_bound and name == "ordered"):
                outcome.save(job.step_file(name, step))
    logs = {rank: faithful_log(report.subject.graph, rank, num_steps=len(outcomes)) for rank in ranks}
    spoil(logs)
    for rank, log in logs.items():
        save_json(job.rank_file(rank, "log"), log, list[LogEntry])
    return job


def steps_of(report, num_steps=2):
    """Outcomes of all ranks and both references, by step."""
    steps = [faithful(report.subject.plan, step) for step in range(num_steps)]
    return [own for own, *_ in steps], [references for _, *references in steps]


def part_of(report, job, ranks, name):
    collector = StepCollector(job, report.subject, ranks=ranks)
    collector.collect_parts(2)
    part = host_part(report, job, collector.parts, ranks, 1, run="token", host=name)
    part.save(job.directory)
    return part


def hosts_of(report, tmp_path, outcomes, references, **options):
    """Directories of two hosts with their parts, and nothing else of the steps."""
    directories = []
    for number, ranks in enumerate(HOSTS):
        job = kept(report, tmp_path / f"node-{number}", ranks, outcomes, references, **options)
        part_of(report, job, ranks, f"node-{number}")
        assert not list(job.directory.glob("*.npz"))
        directories.append(job.directory)
    return directories


def merged(directories):
    return merge_directories(*read_directories(directories))


def whole_report(report, tmp_path, outcomes, references):
    job = kept(report, tmp_path / "whole", range(4), outcomes, references)
    collector = StepCollector(job, report.subject)
    assert collector.collect(2) == list(collector.results)
    return finish_report(report, job, collector.results, 1)


def test_the_report_of_two_hosts_is_that_of_one(tmp_path):
    report = checked(TP_DP)
    outcomes, references = steps_of(report)
    whole = whole_report(report, tmp_path, outcomes, references)
    result = merged(hosts_of(report, tmp_path, outcomes, references))
    assert result.passed is whole.passed is True
    of_merged, of_whole = result.to_json(), whole.to_json()
    assert of_merged.pop("hosts") == {"node-0": [0, 1], "node-1": [2, 3]}
    assert of_merged == of_whole


def test_without_logs_of_another_host_the_report_names_the_ranks(tmp_path):
    report = checked(TP_DP)
    directories = hosts_of(report, tmp_path, *steps_of(report))
    jobs = [replace(Job.load(directory), directory=directory) for directory in directories]
    parts = [HostPart.load(directory) for directory in directories]
    result = merged_report(report, jobs[0], parts, read_records(jobs[0], range(4)))
    assert result.passed
    assert result.ranks_without_log == (2, 3)
    assert {span.rank for span in result.timeline.spans} == {0, 1}
    assert merged_report(report, jobs[0], parts).ranks_without_log == (0, 1, 2, 3)
    (directories[1] / "rank2.log.json").unlink()
    assert merged(directories).ranks_without_log == (2,)


def test_findings_of_logs_come_from_their_hosts(tmp_path):
    def spoil(logs):
        if 3 in logs:
            logs[3][0] = replace(logs[3][0], op="0F3")

    report = checked(TP_DP)
    directories = hosts_of(report, tmp_path, *steps_of(report), spoil=spoil)
    parts = [HostPart.load(directory) for directory in directories]
    result = merged_report(report, Job.load(directories[0]), parts)
    assert [finding.code for finding in result.log_findings] == ["PP901"]
    assert result.log_findings[0].message.startswith("rank 3, step 0, queue compute, position 0: ")
    assert not result.passed


def test_a_wrong_bit_on_one_host_is_a_mismatch_of_all(tmp_path):
    report = checked(TP_DP)
    outcomes, references = steps_of(report)
    flip(outcomes[1][2].gradients["embed.weight"])
    result = merged(hosts_of(report, tmp_path, outcomes, references))
    (finding,) = result.findings
    assert finding.code == "PP904"
    assert "step 1: the loss has the reference's bits; gradients that differ: 1 of" in finding.message


def test_a_gradient_that_no_host_has_as_a_whole_is_shown_by_its_shard(tmp_path):
    report = checked({**BY_BOUND, "run": {"steps": 2}})
    outcomes, references = steps_of(report)
    (tp_pairs,) = [((0, 2), (1, 3))]
    name = "embed.weight"
    flip(outcomes[0][1].gradients[name])
    directories = []
    for number, ranks in enumerate(tp_pairs):
        job = kept(report, tmp_path / f"node-{number}", ranks, outcomes, references)
        part_of(report, job, ranks, f"node-{number}")
        directories.append(job.directory)
    result = merged(directories)
    gradient = next(gradient for gradient in result.gradients if not gradient.bitwise)
    assert (gradient.name, gradient.md5) == (name, None)
    (shard,) = gradient.differing
    assert f"first: {name} on rank 1, md5 {shard.md5}, reference {shard.reference_md5}" in result.findings[0].message
    shown = next(entry for entry in result.to_json()["gradients"] if entry["md5"] is None)
    assert [entry.get("reference_md5") for entry in shown["shards"]] == [None, shard.reference_md5]
    output = invoke("job", "merge", *directories)
    assert output.exit_code == 1
    assert "does not match the reference" in output.stdout


def test_references_of_two_hosts_that_differ_are_a_finding_with_both_names(tmp_path):
    report = checked(TP_DP)
    outcomes, references = steps_of(report)
    jobs = [kept(report, tmp_path / "node-0", HOSTS[0], outcomes, references)]
    for model in references[1]:
        model.gradients["head.weight"] = model.gradients["head.weight"] * np.float32(1 + 1e-6)
    jobs.append(kept(report, tmp_path / "node-1", HOSTS[1], outcomes, references))
    parts = [part_of(report, job, ranks, job.directory.name) for job, ranks in zip(jobs, HOSTS, strict=True)]
    result = merged_report(report, jobs[0], parts)
    assert result.findings[0].code == "PP938"
    assert "step 1: the references of hosts node-0 and node-1 differ" in result.findings[0].message
    assert not result.passed
    right = [replace(part, steps=part.steps[:1]) for part in parts]
    assert merged_report(report, jobs[0], right).findings == ()


def test_where_a_bound_decides_references_may_round_differently(tmp_path):
    report = checked({"topology": {"pp": 1, "dp": 2, "tp": 2}, "run": {"steps": 2, "backend": "torch"}})
    outcomes, references = steps_of(report)
    parts = []
    for number, ranks in enumerate(HOSTS):
        job = kept(report, tmp_path / f"node-{number}", ranks, outcomes, references)
        parts.append(part_of(report, job, ranks, f"node-{number}"))
        for model in references[0]:
            model.loss = model.loss * np.float32(1 + 1e-6)
    result = merged_report(report, job, parts)
    assert [(finding.code, finding.severity) for finding in result.host_findings] == [("PP938", Severity.WARNING)]


def test_later_steps_of_a_bound_have_no_reference_where_no_host_has_all_weights(tmp_path):
    report = checked(BY_BOUND)
    outcomes, references = steps_of(report)
    for _, unpartitioned in references:  # the ordered reference of `faithful` has the ranks' bits
        unpartitioned.gradients.update(references[0][0].gradients)
        unpartitioned.loss = references[0][0].loss
    directories = hosts_of(report, tmp_path, outcomes, references, has_reference=(True, False))
    result = merged(directories)
    assert [step.is_compared for step in result.steps] == [True, False]
    assert result.passed
    assert result.uncompared_steps == (1,)
    entry = result.to_json()["steps"][1]
    assert (entry["compared"], entry["reference_loss"], entry["uncut_loss"]) == (False, None, None)
    assert "compared" not in result.to_json()["steps"][0]
    assert "no reference  equal shards agree" in step_line(result.steps[1], 1.0)
    output = invoke("job", "merge", *directories)
    assert output.exit_code == 0
    words = output.stdout
    assert "only of step 0: no host has the weights of all ranks" in words
    assert "matches: the loss and every gradient of step 0, within the bound; equal shards of later steps" in words


def test_replicas_of_later_steps_are_compared_over_hosts(tmp_path):
    report = checked({"topology": {"pp": 2, "dp": 2}, "run": {"steps": 2, "backend": "torch"}})
    outcomes, references = steps_of(report)
    flip(outcomes[1][3].gradients["head.weight"])
    stages = sorted(range(4), key=lambda rank: report.subject.plan.mesh.coords(rank)["dp"])
    parts = []
    for number, ranks in enumerate((stages[:1], stages[1:2], stages[2:])):
        job = kept(report, tmp_path / f"n{number}", ranks, outcomes, references, has_reference=(True, number == 2))
        parts.append(part_of(report, job, ranks, f"n{number}"))
    result = merged_report(report, job, parts)
    assert result.uncompared_steps == (1,)
    assert "ranks with the same shard differ in head.weight" in result.findings[-1].message


def test_a_step_that_is_not_finite_ends_the_merge(tmp_path):
    report = checked(TP_DP)
    outcomes, references = steps_of(report)
    outcomes[1][3].gradients["embed.weight"][0] = np.nan
    directories = hosts_of(report, tmp_path, outcomes, references)
    with pytest.raises(NotFiniteError, match="step 1: every loss is finite; gradients that are not finite: 1 of"):
        merged(directories)
    output = invoke("job", "merge", *directories)
    assert output.exit_code == 1
    assert "PP921" in output.stdout


def test_a_part_is_read_back_with_its_findings(tmp_path):
    report = checked(TP_DP)
    job = kept(report, tmp_path / "node-0", HOSTS[0], *steps_of(report))
    part = part_of(report, job, HOSTS[0], "node-0")
    witness = OpsWitness((WitnessOp(1, "0F0", 3), WitnessOp(1, "0F1")))
    others = (CycleWitness(witness.ops), RangesWitness((ElementRange(1, 0, 4, 0),), ()), None)
    findings = {
        1: tuple(Finding("PP901", Severity.ERROR, "rank 1", help="look", witness=each) for each in (witness, *others))
    }
    part = replace(part, log_findings=findings, clock=ClockCorrection((Knot(5, -5, 7),)))
    part.save(job.directory)
    assert HostPart.load(job.directory) == part
    num_shards = sum(len(gradient.shards) for step in part.steps for gradient in step.gradients.values())
    num_weights = sum(len(step.gradients) for step in part.steps)
    assert (job.directory / "part.json").stat().st_size < 220 * num_weights + 170 * num_shards + 2000


def test_a_record_needs_the_tensors_of_all_ranks(tmp_path):
    report = checked(TP_DP)
    job = Job(tmp_path, {}, report.conclusion)
    with pytest.raises(ValueError, match=r"here are ranks \[0, 1\]"):
        StepCollector(job, report.subject, RecordOptions(tmp_path), ranks=(1, 0))


# --- real processes ---


def executed(report, tmp_path):
    """The directory of a run of all ranks, before anything is compared."""
    directory = tmp_path / "all"
    directory.mkdir()
    job = prepare_job(report, RunOptions(), directory)
    Launcher(job, JobState(report.subject), 120.0, has_reference=False).run(lambda: None)
    return job


def host_of(job, directory, ranks):
    """A host's directory with the files of its ranks, after its own reference has run in a process of its own."""
    directory.mkdir()
    for rank in ranks:
        for file in job.directory.glob(f"rank{rank}.*"):
            shutil.copy(file, directory)
    own = replace(job, directory=directory)
    own.save()
    program = (
        "import sys; from pathlib import Path; from pipeproof.exec.compare.reference_process import run_reference; "
        "from pipeproof.exec.rank.job_files import Job; "
        f"run_reference(Job.load(Path(sys.argv[1])), print, {list(ranks)})"
    )
    subprocess.run([sys.executable, "-c", program, directory], check=True, env=process_environment(), timeout=120)
    return own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "hosts", "uncompared"),
    [
        pytest.param(TP_DP, ((0, 1), (2, 3)), (), marks=pytest.mark.needs_paddle),
        pytest.param(
            {"topology": {"pp": 2, "dp": 2}, "memory": {"shard_optimizer": "dp"}, "run": {"steps": 2}},
            ((0, 3), (1, 2)),
            (),
            marks=pytest.mark.needs_paddle,
        ),
        pytest.param(BY_BOUND, ((0, 1), (2, 3)), (1,), marks=pytest.mark.needs_torch),
        pytest.param(
            {"topology": {"pp": 1, "dp": 2}, "run": {"steps": 2, "backend": "torch"}},
            ((0,), (1,)),
            (),
            marks=pytest.mark.needs_torch,
        ),
    ],
)
def test_ranks_of_real_processes_are_compared_on_their_hosts(sections, hosts, uncompared, tmp_path):
    report = checked(sections)
    job = executed(report, tmp_path)
    directories = []
    for number, ranks in enumerate(hosts):
        own = host_of(job, tmp_path / f"node-{number}", ranks)
        part_of(report, own, ranks, f"node-{number}")
        assert not list(own.directory.glob("*.npz"))
        directories.append(own.directory)
    result = merged(directories)
    assert result.findings == ()
    assert result.passed
    assert result.uncompared_steps == uncompared
    if not uncompared:
        whole_job = host_of(job, tmp_path / "whole", range(report.subject.graph.num_ranks))
        collector = StepCollector(whole_job, report.subject)
        collector.collect(2)
        whole = finish_report(report, whole_job, collector.results, 1).to_json()
        assert result.to_json()["steps"] == whole["steps"]
        assert result.to_json()["timeline"] == whole["timeline"]
        gradients = [{**entry, "shards": []} for entry in result.to_json()["gradients"]]
        assert gradients == [{**entry, "shards": []} for entry in whole["gradients"]]


# --- clocks ---


def moved(directory, offset_ns, error_ns):
    """Let a host's clock be ahead, as its logs show."""
    for file in directory.glob("rank*.log.json"):
        log = load_json(file, list[LogEntry])
        ahead = [
            replace(
                entry,
                start_ns=entry.start_ns + offset_ns,
                end_ns=entry.end_ns + offset_ns,
                posted_ns=entry.posted_ns and entry.posted_ns + offset_ns,
            )
            for entry in log
        ]
        save_json(file, ahead, list[LogEntry])
    clock = ClockCorrection((Knot(0, -offset_ns, error_ns),), drift_ppm=0)
    replace(HostPart.load(directory), clock=clock).save(directory)


def test_times_of_hosts_are_moved_to_the_clock_of_rank_0s_host(tmp_path):
    report = checked(TP_DP)
    outcomes, references = steps_of(report)
    directories = hosts_of(report, tmp_path, outcomes, references)
    before = merged(directories)
    assert before.clock_error_ns == 0
    moved(directories[1], 10**15, 1500)
    result = merged(directories)
    assert result.timeline == before.timeline
    assert result.clock_error_ns == 1500
    assert result.to_json()["clock_error_us"] == 1.5
    output = invoke("job", "merge", *directories)
    assert "times of different hosts are comparable within 1.5 us" in output.stdout
    moved(directories[0], 0, 500)
    assert merged(directories).clock_error_ns == 2000


def test_times_that_an_operation_does_not_have_are_not_moved():
    clock = ClockCorrection((Knot(0, -100, 0),), drift_ppm=0)
    part = HostPart("r", "h", (0,), None, (), {}, 1, clock)
    entry = LogEntry(0, "compute", "0F0", 1000, 1010)
    (found,) = RankRecords({0: [entry]}).corrected([part]).logs[0]
    assert (found.start_ns, found.end_ns, found.posted_ns, found.split_ns) == (900, 910, 0, 0)
    (found,) = RankRecords({0: [replace(entry, posted_ns=990, split_ns=1005)]}).corrected([part]).logs[0]
    assert (found.posted_ns, found.split_ns) == (890, 905)


def test_a_clock_that_was_stepped_makes_receives_end_before_their_sends(tmp_path):
    report = checked({"topology": {"pp": 2, "dp": 2}, "run": {"steps": 2}})
    directories = hosts_of(report, tmp_path, *steps_of(report))
    assert merged(directories).passed
    moved(directories[1], -(10**9), 100)
    replace(HostPart.load(directories[1]), clock=ClockCorrection((Knot(0, 0, 100),), drift_ppm=0)).save(directories[1])
    result = merged(directories)
    assert not result.passed
    assert [finding.code for finding in result.findings] == ["PP901", "PP901"]  # a finding for each pair of ranks
    assert "posted 0SEND_F" in result.findings[0].message


# --- the command, and what it refuses ---


@pytest.fixture
def directories(tmp_path):
    report = checked(TP_DP)
    return hosts_of(report, tmp_path, *steps_of(report))


def test_the_command_prints_the_verdict_and_writes_report_and_timeline(directories, tmp_path):
    output = invoke(
        "job", "merge", directories[1], directories[0], "--report", tmp_path / "r.json", "-o", tmp_path / "t.csv"
    )
    assert output.exit_code == 0
    lines = output.stdout.splitlines()
    assert [line[:13] for line in lines[:2]] == ["step 0  loss ", "step 1  loss "]
    assert "matches: every loss and every gradient, bit for bit" in lines
    hosts = json.loads((tmp_path / "r.json").read_text())["hosts"]
    assert list(hosts.items()) == [("node-0", [0, 1]), ("node-1", [2, 3])]
    with (tmp_path / "t.csv").open() as table:
        assert {row["rank"] for row in csv.DictReader(table)} == {"0", "1", "2", "3"}


def refused(paths, *words):
    with pytest.raises(BadPlanError) as caught:
        read_directories(paths)
    findings = caught.value.findings
    assert {finding.code for finding in findings} == {"PP939"}
    text = "\n".join(finding.message for finding in findings)
    for word in words:
        assert word in text
    return text


def test_missing_ranks_are_refused(directories):
    refused(directories[:1], "ranks 2, 3 are in no directory")
    output = invoke("job", "merge", directories[1])
    assert output.exit_code == 2
    assert "PP939" in output.stderr


def test_double_ranks_are_refused_with_both_directories(directories):
    text = refused([*directories, directories[0]], "ranks 0, 1 are in")
    assert text.count("node-0") == 2


def test_a_directory_of_another_run_is_refused_by_name(directories):
    part = HostPart.load(directories[1])
    replace(part, run="another").save(directories[1])
    refused(directories, "node-1 is of another run, by its run: another, and token in")
    digest = replace(part.certificate, graph_digest="0" * 64)
    replace(part, certificate=digest).save(directories[1])
    refused(directories, "node-1 is of another run, by its plan: 000000000000")
    replace(part, certificate=replace(part.certificate, rule_set_version=1)).save(directories[1])
    refused(directories, "node-1 is of another run, by its certificate")
    replace(part, steps=part.steps[:1]).save(directories[1])
    refused(directories, "by its number of steps: 1, and 2 in")
    replace(part, ranks=(2, 3, 9)).save(directories[1])
    refused(directories, "rank 9 is in", "the plan has 4 ranks")


def test_a_run_of_another_version_is_refused(directories):
    for directory in directories:
        part, job = HostPart.load(directory), Job.load(directory)
        certificate = replace(part.certificate, rule_set_version=1)
        replace(part, certificate=certificate).save(directory)
        replace(job, certificate=certificate, directory=directory).save()
    refused(directories, "another certificate than the run had")


def test_a_directory_that_no_host_kept_is_refused(directories, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused([directories[0], empty], "empty is not a directory that a host of a run kept: it has no job.json")
    refused([tmp_path / "nowhere"], "nowhere is not a directory")
    refused([directories[0] / "job.json"], "job.json is not a directory")
    (directories[1] / "part.json").write_text("{}")
    refused(directories, "node-1 is not a directory", "cannot be read")
    (directories[1] / "part.json").unlink()
    refused(directories, "it has no part.json")


def test_a_profile_needs_a_run_that_measured_it(directories, tmp_path):
    output = invoke("job", "merge", *directories, "--profile", tmp_path / "p.json")
    assert output.exit_code == 2
    assert "measured no times" in output.stderr
