"""Slurm's commands for tests, on this machine: tasks of a job array run one after the other, and scripts are kept.

``install`` writes the commands into a folder. Each is this file, started with the name of the command. The state of
task T of job J is in the file ``J_T.state``; ``refuse`` is the message with which ``sbatch`` fails, if there is one.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scancel", "sacct")


def install(folder):
    """Write the commands; returns the folder."""
    folder.mkdir()
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {shlex.quote(__file__)} {name} "$@"\n')
        path.chmod(0o755)
    return folder


def _states(home):
    return {path.stem: path.read_text() for path in sorted(home.glob("*.state"))}


def _set(path, text):
    """Write a state at once: another command may read it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def sbatch(home, script):
    if (home / "refuse").exists():
        sys.exit((home / "refuse").read_text())
    text = Path(script).read_text()
    number = 100 + len(list(home.glob("*.sh")))
    (home / f"{number}.sh").write_text(text)
    array = re.search(r"^#SBATCH --array=0-(\d+)%\d+$", text, re.MULTILINE)
    tasks = range(int(array[1]) + 1) if array else [None]
    for task in tasks:
        _set(home / f"{_id(number, task)}.state", "PENDING")
    command = [sys.executable, "-S", __file__, "run", str(number), *(str(t) for t in tasks if t is not None)]
    with (home / f"{number}.log").open("w") as log:
        runner = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (home / f"{number}.pid").write_text(str(runner.pid))
    sys.stdout.write(f"Submitted batch job {number}\n")


def _id(number, task):
    return str(number) if task is None else f"{number}_{task}"


def run(home, number, *tasks):
    """Execute the tasks, in a session of their own."""
    time.sleep(0.2)  # its number is not known before
    for task in tasks or [None]:
        state = home / f"{_id(number, task)}.state"
        _set(state, "RUNNING")
        variables = {"SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NODEID": "0"}
        variables |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
        if task is not None:
            variables |= {"SLURM_ARRAY_JOB_ID": number, "SLURM_ARRAY_TASK_ID": task}
        done = subprocess.run(["bash", str(home / f"{number}.sh")], env={**os.environ, **variables}, check=False)
        _set(state, "FAILED" if done.returncode else "COMPLETED")


def srun(home, *arguments):
    """Execute the command, with the output in the files that the options name."""
    options, rest = {}, list(arguments)
    while rest[0].startswith("--"):
        name = rest.pop(0)
        options[name] = None if name == "--unbuffered" else rest.pop(0)
    number = os.environ.get("SLURM_ARRAY_JOB_ID", os.environ["SLURM_JOB_ID"])
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    for name, where in (("--output", sys.stdout), ("--error", sys.stderr)):
        path = options[name]
        for mark, value in (("%A", number), ("%a", task), ("%j", number), ("%t", "0")):
            path = path.replace(mark, value)
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), where.fileno())
    os.execvp(rest[0], rest)


def sacct(home, *arguments):
    if "--noheader" not in arguments:
        sys.stdout.write("JobID|State|NodeList\n")
        for name, state in _states(home).items():
            sys.stdout.write(f"{name}|{state}|here\n")


def scancel(home, *arguments):
    """Cancel jobs by their name."""
    with (home / "scancel.calls").open("a") as calls:
        calls.write(shlex.join(arguments) + "\n")
    (name,) = (argument.removeprefix("--name=") for argument in arguments if argument.startswith("--name="))
    for script in home.glob("*.sh"):
        if f"#SBATCH --job-name={name}\n" in script.read_text():
            try:
                os.killpg(int(script.with_suffix(".pid").read_text()), signal.SIGKILL)
            except ProcessLookupError:
                continue
            for path in home.glob(f"{script.stem}*.state"):
                if path.read_text() in {"PENDING", "RUNNING"}:
                    _set(path, "CANCELLED by 0")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(os.environ["FAKE_SLURM"]), *sys.argv[2:])
