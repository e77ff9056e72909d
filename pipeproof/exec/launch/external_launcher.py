"""Rehearsals under an external launcher (see ``exec.store.launcher_table``), on any number of hosts.

Each process is one rank, identified by its environment. The ranks meet at the framework's store. The ranks of one host
share a directory of its temporary files; the first of them, the leader, reads what they found and sends it through the
store to rank 0, which reports.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.exec.launch.host_watch import HostWatch
from pipeproof.exec.launch.hosts import make_directory
from pipeproof.exec.launch.launched_rank import LaunchedRank, launched_rank
from pipeproof.exec.launch.meeting import JobEndedError, Meeting, Verdict, key_prefix, longest_pause_s, meet
from pipeproof.exec.launch.run_plan import prepare_job, require_runnable, status_of
from pipeproof.exec.launch.supervisor import START_UP_TIMEOUT_S
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.launch.worker import Rehearse, run_rank
from pipeproof.exec.rank.failures import event_of
from pipeproof.exec.rank.framework_choice import start_framework
from pipeproof.exec.rank.framework_protocol import Framework
from pipeproof.exec.rank.job_files import Job, RunOptions, dump_plan, end_process
from pipeproof.exec.store.answering_store import AnsweringStore
from pipeproof.exec.store.launcher_table import OF_BACKEND, TORCHRUN
from pipeproof.exec.store.polling import wait_until
from pipeproof.exec.store.rendezvous import (
    ANOTHER_HOST,
    GLOO_INTERFACE,
    QUIET,
    await_store,
    framework_variables,
    interface_towards,
    is_loopback_name,
)
from pipeproof.exec.store.run_codes import NOT_TOGETHER, WORLD_SIZE
from pipeproof.exec.store.store import Store, get_json, has_json, put_json
from pipeproof.exit_status import ExitStatus
from pipeproof.signals import TerminatedError
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.verify.check_plan import Report

_LAST_S = 10.0
"""Time for the other ranks to read the end of a job before rank 0, which may serve the store, ends."""
_LOCAL = {"torch": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), "paddle": ("PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE")}
"""Variables of each framework for the rank among those of this host, and for their number."""


class Outcome(Protocol):
    """Result of a job."""

    @property
    def passed(self) -> bool:
        """True if the exit status is 0."""
        ...


_Result = TypeVar("_Result", bound=Outcome)


@dataclass(frozen=True)
class LaunchedRehearsal(Generic[_Result]):
    """A rehearsal under a launcher: what each rank runs, what each host finds out, and what all of it means.

    ``of_host`` returns the JSON value of this host, whose ranks have written their files to the job's directory.
    ``of_all`` returns the result of all hosts, by their values in order; rank 0's directory still exists.
    """

    make: Rehearse
    of_host: Callable[[Job, Meeting], Any]
    of_all: Callable[[Job, Meeting, Sequence[Any]], _Result]


def join_launcher(run: RunSpec) -> LaunchedRank | None:
    """Rank of this process if a launcher started it as one of several, else None.

    A launcher that knows no framework sets none of the variables from which the plan's framework learns its rank; they
    are set here.

    Raises:
        PipeproofError: PP907, the launcher's variables are incomplete or contradict each other.
    """
    launched = launched_rank(os.environ, run.backend)
    if launched is None:
        return None
    if launched.launcher.backend is None:
        variables = framework_variables(run.backend, launched.rank, launched.world_size, launched.master, run.device)
        if run.backend == "paddle":  # init_parallel_env requires an address of this process, but nobody connects to it
            variables["PADDLE_CURRENT_ENDPOINT"] = f"{socket.gethostname()}:{launched.master[1]}"
        local_rank, local_world_size = _LOCAL[run.backend]
        variables[local_rank] = str(launched.local_rank)
        if launched.local_world_size is not None:
            variables[local_world_size] = str(launched.local_world_size)
        os.environ.update(variables)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    peer = ANOTHER_HOST if launched.is_on_several_hosts and is_loopback_name(launched.master[0]) else launched.master[0]
    interface = None if GLOO_INTERFACE in os.environ else interface_towards(peer)
    if interface is not None:  # gloo would take the address of the host's name, which other hosts need not reach
        os.environ[GLOO_INTERFACE] = interface
    return launched


def execute_launched(
    launched: LaunchedRank,
    report: Report,
    options: RunOptions,
    rehearsal: LaunchedRehearsal[_Result],
    on_finding: Callable[[Finding], None],
    on_wait: Callable[[str], None],
) -> _Result:
    """Run one rank of a job; rank 0 returns the result of all ranks, the others end with the exit status of the job.

    ``on_finding`` prints a verdict or a note; ``on_wait`` prints a line about ranks that have not come.

    Raises:
        PipeproofError: see ``require_runnable``, or the launcher does not fit the plan, or (PP947) the processes do not
            belong together.
        JobEndedError: a rank failed, or rank 0 refuses the job; without a finding on ranks that do not print it.
    """
    require_runnable(report, options)
    _require_fit(launched, report)
    framework = _started(report.subject.plan.spec.run, options)
    meeting = _meeting(launched, report, options, on_wait)
    try:
        make_directory(meeting.directory, meeting.local)
    except OSError as error:
        fact = f"rank {launched.rank} cannot use its directory of temporary files: {error}"
        raise PipeproofError(NOT_TOGETHER.finding(fact)) from error
    state = JobState(report.subject)

    # A shell that started the ranks by hand, with torchrun's variables, may end before them.
    has_launcher = launched.launcher is not TORCHRUN or launched.run_id != ""
    watch = HostWatch(meeting, state, options.timeout_s, on_finding, watches_launcher=has_launcher)
    try:
        job = _job_of_host(meeting, watch, report, options)
        run_rank(job, launched.rank, watch.emit, framework(), rehearsal.make)
        result = _concluded(meeting, watch, job, rehearsal)
    except TerminatedError as error:
        raise watch.fail("terminated") from error
    except PipeproofError as error:
        raise watch.fail("refused", Verdict(error.findings, status_of(error))) from error
    except Exception as error:
        watch.emit("error", **event_of(error))
        raise watch.fail("raised") from error
    watch.close()
    _leave_together(meeting)
    return end_process(result) if isinstance(result, ExitStatus) else result


def _meeting(launched: LaunchedRank, report: Report, options: RunOptions, on_wait: Callable[[str], None]) -> Meeting:
    patience_s = max(options.timeout_s, START_UP_TIMEOUT_S)
    host, port = launched.master
    try:
        run = report.subject.plan.spec.run
        store = _store(launched, run.backend, patience_s)
        return meet(launched, store, _facts(report, options), patience_s, on_wait)
    except (ConnectionError, RuntimeError) as error:
        finding = NOT_TOGETHER.finding(
            f"rank {launched.rank} of {launched.world_size} cannot meet the others at the store {host}:{port}: {error}",
            help="is the launcher's process of rank 0 alive, and is its port free and reachable from this host?",
        )
        raise JobEndedError(finding, status=ExitStatus.WORKER_FAILED) from error


def _store(launched: LaunchedRank, backend: str, patience_s: float) -> Store:
    host, port = launched.master
    if launched.rank > 0:
        await_store(f"{host}:{port}", patience_s)
    store: Store
    if backend == "torch":
        from pipeproof.exec.store import torch_store

        store = torch_store.process_store().part(key_prefix(launched))
    else:
        from pipeproof.exec.store import paddle_store

        is_first = launched.rank == 0
        store = paddle_store.process_store(host, port, launched.world_size, key_prefix(launched), is_first=is_first)
    return AnsweringStore(store, patience_s)


def _started(run: RunSpec, options: RunOptions) -> Callable[[], Framework]:
    """Start the framework; its error is raised by the result, when the other ranks can learn of it."""
    failure: RuntimeError | None = None
    try:
        framework = start_framework(run, computes=not options.rehearses, share_gpus=options.share_gpus)
    except RuntimeError as error:
        failure = error

    def result() -> Framework:
        if failure is not None:
            raise failure
        return framework

    return result


def _facts(report: Report, options: RunOptions) -> Mapping[str, Any]:
    """Facts that must be equal on all ranks."""
    plan, certificate = dump_plan(report.subject.loaded), report.conclusion
    for section, key in (("schedule", "path"), ("cost", "profile")):
        plan.get(section, {}).pop(key, None)  # files may lie elsewhere on another host
    stated = replace(options, logs=None)
    return {
        "the plan's graph": certificate.graph_digest,
        "the plan": hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest(),
        "rules": certificate.rule_set_version,
        "backend tables": certificate.backend_table_version,
        "options": hashlib.sha256(repr(stated).encode()).hexdigest(),
    }


def _job_of_host(meeting: Meeting, watch: HostWatch, report: Report, options: RunOptions) -> Job:
    """The job in the directory of this host, which its leader writes."""
    ready = meeting.directory / "ready"
    if meeting.leads:
        watch.emit("setup", what="preparing the job")
        job = prepare_job(report, options, meeting.directory)
        ready.touch()
        return job
    with watch.waiting():
        wait_until(ready.exists)
    return Job.load(meeting.directory)


def _concluded(
    meeting: Meeting, watch: HostWatch, job: Job, rehearsal: LaunchedRehearsal[_Result]
) -> _Result | ExitStatus:
    """Result on rank 0, the job's exit status on the others."""
    store = meeting.store
    if meeting.leads:
        with watch.waiting():
            wait_until(lambda: all(job.rank_file(rank, "log").exists() for rank in meeting.host.ranks))
        own = rehearsal.of_host(job, meeting)
        _keep(job, meeting)
        if meeting.rank > 0:
            put_json(store, f"part/{meeting.index}", own)
    with watch.waiting():
        if meeting.rank > 0:
            wait_until(lambda: has_json(store, "status"), longest_pause_s=longest_pause_s(meeting.num_ranks))
            return ExitStatus(get_json(store, "status", _LAST_S))
        parts = [own]
        for index in range(1, len(meeting.hosts)):
            wait_until(functools.partial(has_json, store, f"part/{index}"))
            parts.append(get_json(store, f"part/{index}", _LAST_S))
    result = rehearsal.of_all(job, meeting, parts)
    put_json(store, "status", int(ExitStatus.OK if result.passed else ExitStatus.FAILED))
    return result


def _keep(job: Job, meeting: Meeting) -> None:
    """Copy the host's files to ``--logs``; each of several hosts has its own folder."""
    if job.options.logs is None:
        return
    folder = job.options.logs if len(meeting.hosts) == 1 else job.options.logs / meeting.host.name
    folder.mkdir(parents=True, exist_ok=True)
    for file in meeting.directory.glob("*.json"):
        shutil.copy(file, folder)


def _leave_together(meeting: Meeting) -> None:
    """Leave after the end of the watch; the leader removes the host's files when no rank of the host is watching.

    Rank 0, which may serve the store, is the last.
    """
    (meeting.directory / f"rank{meeting.rank}.left").touch()
    ends = time.monotonic() + _LAST_S
    if meeting.leads:
        files = [meeting.directory / f"rank{rank}.left" for rank in meeting.host.ranks]
        wait_until(lambda: all(file.exists() for file in files), _LAST_S)
        shutil.rmtree(meeting.directory, ignore_errors=True)
    with contextlib.suppress(ConnectionError):  # the end is known: that rank 0 has left first changes nothing
        meeting.store.add("done", 1)
        if meeting.rank == 0:
            wait_until(lambda: meeting.store.add("done") >= meeting.num_ranks, ends - time.monotonic())


def _require_fit(launched: LaunchedRank, report: Report) -> None:
    launcher = launched.launcher
    backend, needed = report.subject.plan.spec.run.backend, report.subject.graph.num_ranks
    row = launcher if launcher.backend in (None, backend) else OF_BACKEND[backend]
    if row is not launcher:
        fact = f"the launcher is not that of {backend}, which run.backend names"
        location = report.subject.locate("run", "backend")
    elif launched.world_size != needed:
        fact = f"the launcher started {launched.world_size} processes, but the plan's topology has {needed} ranks"
        location = report.subject.locate("topology")
    else:
        return
    fix = f"start it with {row.command.format(ranks=needed)}"
    raise PipeproofError(WORLD_SIZE.finding(fact, location=location, help=fix))
