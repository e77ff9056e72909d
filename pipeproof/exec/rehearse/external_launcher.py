"""Rehearsals under an external launcher (see ``exec.store.launcher_table``), on any number of hosts.

Each process is one rank, identified by its environment. Like the ranks of a ``Pipeline``, they agree through the
framework's store, and a thread of each watches its progress. Each rank sends its findings to rank 0, which reports.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from pipeproof.diagnostics.finding import PipeproofError, RuleDoc
from pipeproof.diagnostics.wait_graph import ranks_text
from pipeproof.exec.launch.run_plan import prepare_job, require_runnable
from pipeproof.exec.launch.supervisor import START_UP_TIMEOUT_S, Host, JobEndedError, hosts_of, job_directory, own_host
from pipeproof.exec.rank.framework_choice import start_framework
from pipeproof.exec.rank.framework_protocol import Framework
from pipeproof.exec.rank.job_files import RunOptions, dump_plan, end_process
from pipeproof.exec.rank.pipeline_failures import PipelineFailures, one_failure
from pipeproof.exec.rank.stall_watch import STALLED, StallWatch, op_facts
from pipeproof.exec.rehearse.rehearsal_framework import rehearse_rank
from pipeproof.exec.rehearse.rehearsal_report import RankRehearsal, Rehearsal, merged_rehearsal, rank_rehearsal
from pipeproof.exec.store.agreement import STORE_LOST, Agreement
from pipeproof.exec.store.launcher_table import OF_BACKEND, LaunchedRank, launched_rank
from pipeproof.exec.store.rendezvous import (
    ANOTHER_HOST,
    GLOO_INTERFACE,
    QUIET,
    await_store,
    framework_variables,
    interface_towards,
    is_loopback_name,
    wait_until,
)
from pipeproof.exec.store.run_codes import DIED, HUNG, NOT_TOGETHER, WORLD_SIZE
from pipeproof.exec.store.store import Store
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exit_status import ExitStatus
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.verify.check_plan import Report
from pipeproof.version import __version__

_LAST_S = 10.0
"""Time for the other ranks to read the end of a job before rank 0, which may serve the store, ends."""
_SHOW_S = 5.0
"""Time between two lines about ranks that have not come."""
_LOCAL = {"torch": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"), "paddle": ("PADDLE_LOCAL_RANK", "PADDLE_LOCAL_SIZE")}
"""Variables of each framework for the rank on this host, and for the number of ranks on it."""
_PART = TypeAdapter(RankRehearsal)


def join_launcher(run: RunSpec) -> LaunchedRank | None:
    """Rank of this process if a launcher started it as one of several, else None.

    A launcher that knows no framework does not set the variables from which the plan's framework learns its rank; this
    function sets them.

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
    on_wait: Callable[[str], None],
) -> Rehearsal:
    """Run one rank of a job; rank 0 returns the result of all ranks, the others end with the exit status of the job.

    ``on_wait`` prints a line about ranks that have not come.

    Raises:
        PipeproofError: see ``require_runnable``, or the launcher does not fit the plan, or (PP947) another process came
            as this rank.
        JobEndedError: the processes do not belong together (PP947), or a rank failed; every rank raises it.
    """
    require_runnable(report, options)
    _require_fit(launched, report)
    framework = _started(report.subject.plan.spec.run, options)
    agreement = _joined(launched, report, options)
    with _one_end(agreement, NOT_TOGETHER):
        hosts = _all_hosts(agreement, launched, _facts(report, options), on_wait)
    own = _rehearsed(agreement, report, options, framework)
    with _one_end(agreement, DIED):
        result = _concluded(agreement, own, hosts, report)
    _leave(agreement)
    return end_process(result) if isinstance(result, ExitStatus) else result


@contextmanager
def _one_end(agreement: Agreement, code: RuleDoc) -> Iterator[None]:
    """Turn a failure on one rank into a failure on all, with a finding of the code."""
    try:
        with one_failure(agreement):
            yield
    except (PipelineError, ConnectionError) as error:
        _leave(agreement)
        text = STORE_LOST if isinstance(error, ConnectionError) else str(error)
        raise JobEndedError(code.finding(text, help=_LOOK)) from None


_LOOK = (
    "look at the launcher's output on the host of that rank; each host needs the same plan, options and pipeproof, "
    "and a way to the others"
)


def _leave(agreement: Agreement) -> None:
    """Leave; rank 0, which may serve the store, is the last."""
    with suppress(ConnectionError):
        agreement.notice()
        if agreement.rank == 0:
            wait_until(lambda: agreement.num_noticed() >= agreement.num_ranks, _LAST_S)


def _joined(launched: LaunchedRank, report: Report, options: RunOptions) -> Agreement:
    patience_s = max(options.timeout_s, START_UP_TIMEOUT_S)
    host, port = launched.master
    try:
        store = _store(launched, report.subject.plan.spec.run.backend, patience_s)
        is_second = store.add(f"{launched.rank}/came", 1) > 1
    except (ConnectionError, RuntimeError) as error:
        finding = NOT_TOGETHER.finding(
            f"rank {launched.rank} of {launched.world_size} cannot meet the others at the store {host}:{port}: {error}",
            help="is the launcher's process of rank 0 alive, and is its port free and reachable from this host?",
        )
        raise JobEndedError(finding) from error
    if is_second:
        raise PipeproofError(
            NOT_TOGETHER.finding(
                f"another process came as rank {launched.rank} of run `{launched.run_id or 'run'}`, attempt "
                f"{launched.attempt}, to the store at {host}:{port}: two runs use one address, or one launcher "
                "started twice",
                help="give each run its own MASTER_PORT (torchrun: --rdzv-endpoint and --rdzv-id)",
            )
        )
    late_s = _LAST_S if launched.rank else 0.0  # rank 0 reports who is missing
    return Agreement(store, launched.rank, launched.world_size, patience_s + late_s)


def _store(launched: LaunchedRank, backend: str, patience_s: float) -> Store:
    host, port = launched.master
    if launched.rank > 0:
        await_store(f"{host}:{port}", patience_s)
    run_id = re.sub(r"[^A-Za-z0-9._-]", "_", launched.run_id)[:100] or "run"
    prefix = f"pipeproof/{run_id}/{launched.attempt}/"  # a restarted attempt reads nothing of the attempt before
    if backend == "torch":
        from pipeproof.exec.store import torch_store

        return torch_store.process_store().part(prefix)
    from pipeproof.exec.store import paddle_store

    return paddle_store.process_store(host, port, launched.world_size, prefix, is_first=launched.rank == 0)


def _started(run: RunSpec, options: RunOptions) -> Callable[[], Framework]:
    """Start the framework; the result raises its error when the other ranks can learn of it."""
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


def _facts(report: Report, options: RunOptions) -> dict[str, Any]:
    """Facts that must be equal on all ranks."""
    plan, certificate = dump_plan(report.subject.loaded), report.conclusion
    for section, key in (("schedule", "path"), ("cost", "profile")):
        plan.get(section, {}).pop(key, None)  # files may lie elsewhere on another host
    stated = replace(options, logs=None)
    return {
        "pipeproof": __version__,
        "the plan's graph": certificate.graph_digest,
        "the plan": hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest(),
        "rules": certificate.rule_set_version,
        "backend tables": certificate.backend_table_version,
        "options": hashlib.sha256(repr(stated).encode()).hexdigest(),
    }


def _all_hosts(
    agreement: Agreement, launched: LaunchedRank, facts: Mapping[str, Any], on_wait: Callable[[str], None]
) -> tuple[Host, ...]:
    """Wait for all ranks, which must have rank 0's facts. Only rank 0 reads them, and returns the hosts."""
    name, machine = own_host()
    agreement.publish(f"came/{agreement.rank}", {"host": name, "machine": machine, "facts": dict(facts)})
    if agreement.rank:
        agreement.read("complete", "rank 0 did not answer")
        return ()
    machines: list[tuple[str, str]] = []
    ends = time.monotonic() + agreement.timeout_s
    for rank in range(agreement.num_ranks):
        while not agreement.is_published(f"came/{rank}", _SHOW_S):
            absent = [each for each in range(agreement.num_ranks) if not agreement.has(f"came/{each}")]
            if time.monotonic() > ends:
                raise PipelineError(
                    f"{len(absent)} of {agreement.num_ranks} ranks did not come to the store at "
                    f"{launched.master[0]}:{launched.master[1]} within {agreement.timeout_s:g} s: {ranks_text(absent)}"
                )
            on_wait(f"waiting for {ranks_text(absent)}")
        came = agreement.read(f"came/{rank}", f"rank {rank} did not come")
        machines.append((str(came["host"]), str(came["machine"])))
        theirs = dict(came["facts"])
        differ = [key for key in dict.fromkeys((*facts, *theirs)) if theirs.get(key) != facts.get(key)]
        if differ:
            shown = ", ".join(f"{key} {_short(theirs.get(key))} and not {_short(facts.get(key))}" for key in differ)
            raise PipelineError(
                f"rank {rank} on {machines[rank][0]} was started differently from rank 0 on {machines[0][0]}: {shown}"
            )
    agreement.publish("complete", agreement.num_ranks)
    return hosts_of(machines)


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:12]}.."


def _rehearsed(
    agreement: Agreement,
    report: Report,
    options: RunOptions,
    framework: Callable[[], Framework],
) -> Any:
    """Run this rank's program in its own directory, watched, and return its findings."""
    graph, failures = report.subject.graph, PipelineFailures(agreement, lambda: None)
    watch = StallWatch(agreement.of_thread(), options.timeout_s, lambda: partial(op_facts, graph), lambda: None)

    def emit(kind: str, **content: Any) -> None:
        if kind == "setup":
            watch.begin_call(content["what"])
        elif kind == "at":
            watch.enter(content["step"], content["op"])
        elif kind in ("ready", "finished"):
            watch.leave()

    try:
        with failures.as_one(watch, Exception), job_directory(None) as directory:
            job = prepare_job(report, options, directory)
            rehearse_rank(job, agreement.rank, emit, framework())
            if options.logs is not None:
                options.logs.mkdir(parents=True, exist_ok=True)
                for file in directory.glob("rank*.json"):
                    shutil.copy(file, options.logs)
            return _PART.dump_python(rank_rehearsal(report, job, agreement.rank), mode="json")
    except PipelineError as error:
        text = str(error)
        raise JobEndedError((HUNG if STALLED in text else DIED).finding(text, help=_LOOK)) from error.__cause__
    finally:
        watch.close()


def _concluded(agreement: Agreement, own: Any, hosts: Sequence[Host], report: Report) -> Rehearsal | ExitStatus:
    """Result on rank 0, the job's exit status on the others."""
    agreement.publish(f"found/{agreement.rank}", own)
    if agreement.rank:
        return ExitStatus(agreement.read("status", "rank 0 has no report"))
    parts = [agreement.read(f"found/{rank}", f"rank {rank} has no results") for rank in range(agreement.num_ranks)]
    result = merged_rehearsal(report, [_PART.validate_python(part) for part in parts], hosts)
    agreement.publish("status", int(ExitStatus.OK if result.passed else ExitStatus.FAILED))
    return result


def _require_fit(launched: LaunchedRank, report: Report) -> None:
    launcher = launched.launcher
    backend, needed = report.subject.plan.spec.run.backend, report.subject.graph.num_ranks
    row = launcher if launcher.backend in (None, backend) else OF_BACKEND[backend]
    if row is not launcher:
        fact = f"the launcher is not {backend}'s, which run.backend names"
        location = report.subject.locate("run", "backend")
    elif launched.world_size != needed:
        fact = f"the launcher started {launched.world_size} processes, but the plan's topology has {needed} ranks"
        location = report.subject.locate("topology")
    else:
        return
    fix = f"start it with {row.command.format(ranks=needed)}"
    raise PipeproofError(WORLD_SIZE.finding(fact, location=location, help=fix))
