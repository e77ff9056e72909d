"""Meeting of the ranks that a launcher started: each comes once, with the same plan, and learns who is on its host.

Keys are below ``pipeproof/<run id>/<attempt>/``, so that a restarted attempt reads nothing of the one before. Rank 0
draws a random token, which all keys after the meeting and the job's files on every host have. It reads all ranks and
writes the table of hosts; every other rank reads two values: at 10,000 ranks rank 0 makes 10,000 reads of one value,
and nobody makes more.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.exec.launch.hosts import Host, Identity, host_of, hosts_content, hosts_from, hosts_of, ranks_text
from pipeproof.exec.launch.launched_rank import LaunchedRank
from pipeproof.exec.store.polling import LONGEST_PAUSE_S, wait_until
from pipeproof.exec.store.run_codes import NOT_TOGETHER
from pipeproof.exec.store.store import Store, finding_content, finding_of, get_json, has_json, put_json
from pipeproof.exit_status import ExitStatus
from pipeproof.version import __version__

VERDICT = "verdict"
"""Its key in the store of a job."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Findings that explain the end, and the exit status of every rank."""

    findings: tuple[Finding, ...]
    status: ExitStatus = ExitStatus.WORKER_FAILED

    def content(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {"findings": [finding_content(finding) for finding in self.findings], "status": int(self.status)}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Verdict:
        """Read what ``content`` made.

        Raises:
            ValueError: it is something else.
        """
        try:
            return cls(tuple(finding_of(each) for each in content["findings"]), ExitStatus(content["status"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the store has no verdict: {error}") from None


class JobEndedError(PipeproofError):
    """A job ended early by its verdict; without findings on ranks that do not print it."""

    def __init__(self, *findings: Finding, status: ExitStatus = ExitStatus.WORKER_FAILED) -> None:
        super().__init__(*findings)
        self.status = status


_REFUSED = "refused"
"""Counter of the ranks that have read the verdict of the meeting."""
_TOKEN = re.compile(r"[0-9a-f]{32}")
_READS_PER_S = 20_000
"""Most questions of all waiting ranks together; a store answers several times as many."""
_LATE_S = 10.0
"""Longer wait of the other ranks than of rank 0, which reports who is missing."""


@dataclass(frozen=True)
class Meeting:
    """The job as one rank knows it; ``local`` are the processes of this host by rank."""

    store: Store
    rank: int
    hosts: tuple[Host, ...]
    local: Mapping[int, Identity]
    token: str

    @property
    def num_ranks(self) -> int:
        """Number of all ranks."""
        return sum(len(host.ranks) for host in self.hosts)

    @property
    def host(self) -> Host:
        """This rank's host."""
        return host_of(self.hosts, self.rank)

    @property
    def index(self) -> int:
        """Number of this rank's host."""
        return self.hosts.index(self.host)

    @property
    def leads(self) -> bool:
        """True for the first rank of each host."""
        return self.rank == self.host.leader

    @property
    def name(self) -> str:
        """Name of the job, one on all hosts."""
        return f"pipeproof-{self.token}"

    @property
    def directory(self) -> Path:
        """Directory of this host's files of the job."""
        return Path(tempfile.gettempdir()) / f"{self.name}.{self.host.leader}"


def key_prefix(launched: LaunchedRank) -> str:
    """Prefix of all keys of one attempt of one run."""
    run_id = re.sub(r"[^A-Za-z0-9._-]", "_", launched.run_id)[:100] or "run"
    return f"pipeproof/{run_id}/{launched.attempt}/"


def meet(
    launched: LaunchedRank,
    store: Store,
    facts: Mapping[str, Any],
    patience_s: float,
    on_wait: Callable[[str], None],
) -> Meeting:
    """Wait for all ranks; every rank calls this once. ``facts`` are JSON values that must be equal on all ranks.

    On rank 0 ``on_wait`` is called with a line about the ranks that have not come.

    Raises:
        PipeproofError: PP947, another process came as this rank, a rank did not come within ``patience_s``, or it was
            started with another plan or other options.
        ConnectionError: the process that serves the store has ended.
    """
    rank, num_ranks = launched.rank, launched.world_size
    own, facts = Identity.own(), {"pipeproof": __version__, **facts}
    if store.add(f"{rank}/came", 1) > 1:
        raise PipeproofError(_claimed_twice(launched))
    try:
        put_json(store, f"{rank}/identity", {"identity": own.content(), "facts": facts})
        if rank == 0:
            token = secrets.token_hex(16)
            hosts = hosts_of(_all_identities(store, launched, facts, patience_s, on_wait))
            put_json(store, "hosts", {"token": token, "hosts": hosts_content(hosts)})
        else:
            table = _await(store, "hosts", patience_s + _LATE_S, longest_pause_s(num_ranks))
            token, hosts = _checked_token(table["token"]), hosts_from(table["hosts"], num_ranks)
        of_host = host_of(hosts, rank).ranks
        local = {other: Identity.of(get_json(store, f"{other}/identity", _LATE_S)["identity"]) for other in of_host}
    except TimeoutError:
        fact = f"rank 0 did not answer within {patience_s + _LATE_S:g} s"
        raise JobEndedError(NOT_TOGETHER.finding(fact), status=ExitStatus.WORKER_FAILED) from None
    except (ValueError, KeyError) as error:
        raise PipeproofError(NOT_TOGETHER.finding(f"{error}")) from None
    return Meeting(store.part(f"{token}/"), rank, hosts, local, token)


def _all_identities(
    store: Store,
    launched: LaunchedRank,
    facts: Mapping[str, Any],
    patience_s: float,
    on_wait: Callable[[str], None],
) -> list[Identity]:
    """Identities of all ranks, which have rank 0's facts.

    Raises:
        PipeproofError: as ``meet``; the other ranks get the same finding.
    """
    identities: list[Identity] = []
    ends, shown_at = time.monotonic() + patience_s, time.monotonic() + 5.0
    for rank in range(launched.world_size):
        has_come = functools.partial(has_json, store, f"{rank}/identity")
        while not wait_until(has_come, min(ends, shown_at) - time.monotonic()):
            absent = _absent(store, launched.world_size)
            if time.monotonic() > ends:
                num_others = launched.world_size - len(absent) - 1
                _refuse(store, _missing(launched, absent, patience_s), num_others, ExitStatus.WORKER_FAILED)
            shown_at = time.monotonic() + 10.0
            on_wait(f"waiting for {ranks_text(absent)}")
        content = get_json(store, f"{rank}/identity", _LATE_S)
        identities.append(Identity.of(content["identity"]))
        if difference := _difference(dict(content["facts"]), facts):
            others = launched.world_size - 1  # also those that are about to come
            _refuse(store, _other_start(rank, identities[rank].host, identities[0].host, difference), others)
    return identities


def longest_pause_s(num_ranks: int) -> float:
    """Longest time between two questions of one rank, so that all ranks together leave the store time to answer."""
    return max(LONGEST_PAUSE_S, num_ranks / _READS_PER_S)


def _await(store: Store, key: str, patience_s: float, longest_s: float) -> Any:
    """Wait for a JSON value, or for the verdict.

    Raises:
        PipeproofError: the verdict.
        TimeoutError: neither came in time.
    """
    if not wait_until(lambda: has_json(store, key) or has_json(store, VERDICT), patience_s, longest_s):
        raise TimeoutError(key)
    if not has_json(store, key):
        verdict = Verdict.of(get_json(store, VERDICT, _LATE_S))
        store.add(_REFUSED, 1)
        raise JobEndedError(*verdict.findings, status=verdict.status)
    return get_json(store, key, _LATE_S)


def _checked_token(text: Any) -> str:
    """The token, which becomes a part of a file's name.

    Raises:
        ValueError: it is not one of ours.
    """
    if not _TOKEN.fullmatch(str(text)):
        raise ValueError("the store's token of the job is not one of ours")
    return str(text)


def _refuse(store: Store, finding: Finding, num_others: int, status: ExitStatus = ExitStatus.BAD_INPUT) -> NoReturn:
    """End all ranks that came; rank 0, which may serve the store, waits until the others have read why."""
    verdict = Verdict((finding,), status)
    put_json(store, VERDICT, verdict.content())
    wait_until(lambda: store.add(_REFUSED) >= num_others, 2 * _LATE_S)
    raise JobEndedError(finding, status=verdict.status)


def _absent(store: Store, num_ranks: int) -> list[int]:
    return [rank for rank in range(num_ranks) if not has_json(store, f"{rank}/identity")]


def _difference(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    names = [name for name in dict.fromkeys((*ours, *theirs)) if theirs.get(name) != ours.get(name)]
    return ", ".join(f"{name} {_short(theirs.get(name))} and not {_short(ours.get(name))}" for name in names)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:12]}.."


def _claimed_twice(launched: LaunchedRank) -> Finding:
    host, port = launched.master
    return NOT_TOGETHER.finding(
        f"another process came as rank {launched.rank} of run `{launched.run_id or 'run'}`, attempt "
        f"{launched.attempt}, to the store at {host}:{port}: two runs use one address, or one launcher started twice",
        help="give each run its own MASTER_PORT (torchrun: --rdzv-endpoint and --rdzv-id)",
    )


def _missing(launched: LaunchedRank, absent: list[int], patience_s: float) -> Finding:
    return NOT_TOGETHER.finding(
        f"{len(absent)} of {launched.world_size} ranks did not come to the store within {patience_s:g} s: "
        f"{ranks_text(absent)}",
        help="look at the hosts of these ranks: did the launcher start there, and does it reach "
        f"{launched.master[0]}:{launched.master[1]}? `--timeout` waits longer",
    )


def _other_start(rank: int, host: str, first_host: str, difference: str) -> Finding:
    return NOT_TOGETHER.finding(
        f"rank {rank} on {host} was started differently from rank 0 on {first_host}: {difference}",
        help="give every host the same plan file, the same options and the same pipeproof",
    )
