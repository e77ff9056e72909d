"""``pipeproof job file``: files, the list of placeholders, and refusals with a place and a remedy."""

import pytest

from pipeproof.cli.job_file_command import LAUNCHERS
from pipeproof.interop.job_files import job_launchers
from tests.cli.commands import invoke

GPUS = {"topology": {"pp": 4, "dp": 3}, "run": {"backend": "torch", "device": "gpu"}}


def test_the_choices_are_the_launchers():
    assert tuple(job_launchers.LAUNCHERS) == LAUNCHERS


def test_placeholders_are_listed_and_the_file_is_written(good, tmp_path):
    shown = invoke("job", "file", good, "--for", "slurm")
    assert shown.exit_code == 0
    assert [line.split(":")[0] for line in shown.stderr.splitlines()] == [
        "fill in FILL_IN_ACCOUNT",
        "fill in FILL_IN_PARTITION",
        "fill in FILL_IN_TIME_LIMIT",
    ]
    written = invoke("job", "file", good, "--for", "slurm", "-o", tmp_path / "job.sh")
    assert (written.exit_code, written.stdout, written.stderr) == (0, "", shown.stderr)
    assert (tmp_path / "job.sh").read_text() == shown.stdout


def test_a_script_trains_in_place_of_run(good, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    text = invoke("job", "file", good, "--for", "slurm", "--script", script).stdout
    assert f"task python -m pipeproof rehearse {good}\n" in text
    assert f"task python {script}\n" in text
    assert "pipeproof run" not in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--for", "pbs"), "'pbs' is not one of 'torchrun', 'paddle', 'slurm'"),
        ((), "Missing option '--for'"),
        (("--for", "slurm", "--script", "absent.py"), "'absent.py' does not exist"),
        (("--for", "paddle", "--gpus-per-host", "4"), "paddle starts paddle, and run.backend is torch (plan.json:1:"),
        (("--for", "paddle", "--gpus-per-host", "4"), "use torchrun"),
        (("--for", "slurm"), "plan.json:1:"),
        (("--for", "slurm"), "8 per host do not divide the plan's 12 ranks"),
        (("--for", "slurm"), "use 6, on 2 hosts"),
        (("--for", "slurm", "--gpus-per-host", "5"), "Invalid value for --gpus-per-host: 5 per host do not divide"),
        (("--for", "slurm", "--gpus-per-host", "0"), "0 is not in the range x>=1"),
        (("--for", "slurm", "--processes-per-host", "4"), "the plan runs on GPUs: use --gpus-per-host"),
        (("--for", "slurm", "--gpus-per-host", "4", "-o", "no/such/job.sh"), "there is no directory"),
    ],
)
def test_refusals_name_the_remedy(options, words, write, tmp_path, monkeypatch):
    plan = write(**GPUS)
    monkeypatch.chdir(tmp_path)
    refused = invoke("job", "file", plan, *options)
    assert refused.exit_code == 2
    assert words in refused.stderr
    assert refused.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_a_plan_on_cpus_has_processes(good):
    refused = invoke("job", "file", good, "--for", "slurm", "--gpus-per-host", "2")
    assert refused.exit_code == 2
    assert "the plan runs on CPUs: use --processes-per-host" in refused.stderr
    assert invoke("job", "file", good, "--for", "slurm", "--processes-per-host", "1").exit_code == 0


def test_a_plan_that_cannot_be_read(tmp_path):
    for plan, text in ((tmp_path / "absent.yaml", None), (tmp_path / "plan.yaml", "topology: {pp: 0}\n")):
        if text is not None:
            plan.write_text(text)
        refused = invoke("job", "file", plan, "--for", "slurm")
        assert refused.exit_code == 2
        assert plan.name in refused.stderr
        assert refused.stdout == ""
