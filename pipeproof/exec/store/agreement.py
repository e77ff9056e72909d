"""Reports of the ranks of one pipeline to each other through their store, before the first step and when one fails.

Each rank writes under its number and reads all others with a deadline: an error on one rank is an error on every rank
within the start-up, and never a hang. A rank that waits for a value also looks for the report of a failure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.diagnostics.problems import grouped
from pipeproof.exec.store.store import (
    Store,
    TimeoutStore,
    finding_content,
    finding_of,
    get_json,
    has_json,
    put_json,
    remove_json,
)
from pipeproof.exec.store.train_errors import PipelineError, PlanRefused

_Result = TypeVar("_Result")
_FAILED, _FAILURES, _NOTICED = "failed", "failures", "noticed"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
_FAILURE_EVERY_S = 0.25
"""Time between two looks for a failure while waiting for a value."""
_WORK_S = 60.0
"""The shortest time limit after all ranks have come: they may still work on a phase."""
_LATE_S = 5.0
"""Time in which other ranks may still report an error: in the same phase, or the first error of the pipeline."""
_GET_S = 60.0
"""Time limit for reading a value that is there, and for each answer of the store."""


class Agreement:
    """The exchange of one pipeline's ranks; ``rank`` counts within the pipeline's group.

    ``timeout_s`` limits the wait for ranks that have not come yet.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store, self.timeout_s = TimeoutStore(store, _GET_S), timeout_s

    def gather(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        """Return the JSON results of ``work`` on every rank, in order; every rank calls it once for each phase.

        Raises:
            PipelineError: ``work`` raised on a rank, or a rank did not come in time; every rank raises it, with the
                same text.
            PlanRefused: ``work`` raised it, or another error with findings, on some rank.
        """
        failure: Exception | None = None
        try:
            content = {"result": work()}
        except Exception as error:  # noqa: BLE001 - user code may raise anything; every rank reports it
            failure, content = error, _error_content(error)
        self.publish(f"{phase}/{self.rank}", content)
        results: list[Any] = []
        failed = {} if failure is None else {self.rank: content}
        for rank in range(self.num_ranks):
            if failed and not self._comes(f"{phase}/{rank}", _LATE_S, heeds_failure=False):
                continue  # another rank's error is enough
            content = self._read(phase, rank)
            if "error" in content:
                failed[rank] = content
            else:
                results.append(content["result"])
        if not failed:
            self.timeout_s = max(self.timeout_s, _WORK_S)
            return results
        failed = dict(sorted(failed.items()))
        raise _common_error(failed, self.num_ranks) from (None if failure is None else _user_error(failure))

    def own(self, phase: str, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work`` on this rank, of any type, after it has succeeded on all.

        Raises:
            PipelineError: as ``gather``.
        """
        made: list[_Result] = []
        self.gather(phase, lambda: made.append(work()))
        return made[0]

    def publish(self, key: str, content: Any) -> None:
        """Write one JSON value for ``read``."""
        with _store_errors():
            put_json(self._store, key, content)

    def read(self, key: str, missing: str) -> Any:
        """Return the JSON value of ``publish`` on another rank; ``missing`` begins the error if it does not come.

        Raises:
            PipelineError: it did not come in time, or a rank has reported a failure.
        """
        with _store_errors():
            if not self._comes(key, self.timeout_s, heeds_failure=key != _FAILED):
                text = self.failure()
                if text is not None and key != _FAILED:
                    raise PipelineError.reported(text)
                raise PipelineError(f"{missing} within {self.timeout_s:g} s")
            return get_json(self._store, key, _GET_S)

    def take(self, key: str, missing: str) -> Any:
        """``read`` a value, and remove it: its key is free for the next one."""
        content = self.read(key, missing)
        with _store_errors():
            remove_json(self._store, key)
        return content

    def of_thread(self) -> Agreement:
        """The same exchange for another thread."""
        with _store_errors():
            return Agreement(self._store.of_thread(), self.rank, self.num_ranks, self.timeout_s)

    def has(self, key: str) -> bool:
        """Return True if ``publish`` was called for the key on any rank."""
        return has_json(self._store, key)

    def is_published(self, key: str, within_s: float) -> bool:
        """Return True if ``publish`` was called for the key, or is within a time."""
        return self._comes(key, within_s, heeds_failure=False)

    def fail(self, text: str) -> None:
        """Report to all ranks why the pipeline ends; the first report counts."""
        is_first = self._store.add(_FAILURES, 1) == 1
        if is_first or not self.is_published(_FAILED, _LATE_S):  # the first one may have ended before it reported
            self.publish(_FAILED, text)

    def failure(self) -> str | None:
        """The report of the first rank that failed; None while there is none."""
        return str(get_json(self._store, _FAILED, _GET_S)) if self.has(_FAILED) else None

    def notice(self) -> None:
        """Count a rank that knows of the failure."""
        self._store.add(_NOTICED, 1)

    def num_noticed(self) -> int:
        """Number of ranks that know of the failure."""
        return self._store.add(_NOTICED)

    def _comes(self, key: str, within_s: float, *, heeds_failure: bool) -> bool:
        """Wait until a key has a value; False if it has none in time, or if a rank fails meanwhile."""
        now = time.monotonic()
        ends, look, pause = now + within_s, now + _FAILURE_EVERY_S, _FIRST_PAUSE_S
        while not self.has(key):
            now = time.monotonic()
            if now > ends:
                return False
            if heeds_failure and now > look:
                if self.has(_FAILED):
                    return self.has(key)
                look = now + _FAILURE_EVERY_S
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return True

    def _read(self, phase: str, rank: int) -> dict[str, Any]:
        missing = (
            f"rank {rank} has ended, hangs, or makes another call than rank {self.rank}: it has not come to `{phase}` "
            "of the pipeline"
        )
        content: dict[str, Any] = self.read(f"{phase}/{rank}", missing)
        return content


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except ConnectionError:
        raise PipelineError(STORE_LOST) from None


STORE_LOST = (
    "the store of the process group does not answer: the process that holds it (the launcher, or rank 0) has "
    "ended, is stopped, or is not reachable"
)


def described_in_order(
    agreement: Agreement,
    numbers: Sequence[int],
    describe: Callable[[int, dict[str, Any]], dict[str, Any]],
    phase: str = "boundaries",
) -> dict[int, dict[str, Any]]:
    """JSON facts of all stages by number; ``describe`` makes the facts of this rank's stages ``numbers``.

    It is called with the number and with the facts of the stage before, which are empty for the first stage. ``phase``
    must be different in each call.

    Raises:
        PipelineError: it raised on a rank.
    """

    def own() -> dict[str, Any]:
        facts: dict[str, Any] = {}
        for position, number in enumerate(numbers):
            try:
                facts[str(number)] = describe(number, _facts_before(agreement, number, phase))
            except Exception as error:
                for later in numbers[position:]:  # other ranks may wait for one of these
                    agreement.publish(f"{phase}/after/{later}", {"error": str(error)})
                raise
            agreement.publish(f"{phase}/after/{number}", facts[str(number)])
        return facts

    reports = agreement.gather(phase, own)
    return dict(sorted((int(number), facts) for of_rank in reports for number, facts in of_rank.items()))


def _facts_before(agreement: Agreement, number: int, phase: str) -> dict[str, Any]:
    before: dict[str, Any] = {}
    if number:
        before = agreement.read(f"{phase}/after/{number - 1}", f"no output of stage {number - 1}")
    if "error" in before:
        raise PipelineError.reported(str(before["error"]))
    return before


def require_equal(values: Sequence[Any], what: str) -> None:
    """Refuse ranks that were given different values.

    Raises:
        PipelineError: names the ranks and their values; of dicts, the keys that differ.
    """
    texts = [_json(value) for value in values]
    if len(set(texts)) == 1:
        return
    if all(isinstance(value, dict) for value in values):
        flat = [dict(_leaves(value)) for value in values]
        keys = list(dict.fromkeys(key for leaves in flat for key in leaves))
        unequal = [key for key in keys if len({_json(leaves.get(key)) for leaves in flat}) > 1]
        shown = "; ".join(f"{key} is {_by_rank([leaves.get(key) for leaves in flat])}" for key in unequal[:3])
        more = f"; and {len(unequal) - 3} more keys" if len(unequal) > 3 else ""
        raise PipelineError(f"{what} differs between the ranks: {shown}{more}")
    raise PipelineError(f"{what} differs between the ranks: {_by_rank(values)}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in nested dicts by their dotted key."""
    if isinstance(value, dict) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def _by_rank(values: Sequence[Any]) -> str:
    groups = grouped((_json(value), rank) for rank, value in enumerate(values))
    return ", ".join(f"{_short(text)} on {_ranks_text(ranks)}" for text, ranks in groups.items())


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


# --- errors as JSON ---


def _error_content(error: Exception) -> dict[str, Any]:
    if isinstance(error, PipeproofError):  # of one rank, unless all have it
        return {**_error_content(PlanRefused(error.findings, "the plan is not valid")), "of_rank": True}
    if isinstance(error, PlanRefused):
        findings = [finding_content(finding) for finding in error.findings]
        return {"error": str(error), "headline": error.headline, "findings": findings, "of_rank": False}
    name = "" if isinstance(error, PipelineError) else f"{type(error).__name__}: "
    return {"error": f"{name}{error}", "is_echo": isinstance(error, PipelineError) and error.is_reported}


def _common_error(failed: dict[int, dict[str, Any]], num_ranks: int) -> PipelineError:
    """The error that every rank raises: without rank numbers if all ranks have the same error."""
    failed = {rank: content for rank, content in failed.items() if not content.get("is_echo")} or failed
    ranks = grouped((content["error"], rank) for rank, content in failed.items())
    first, is_everywhere = next(iter(failed.values())), len(ranks) == 1 and len(failed) == num_ranks
    prefixed = "\n".join(f"{_ranks_text(numbers)}: {text}" for text, numbers in ranks.items())
    error = PipelineError(first["error"] if is_everywhere else prefixed)
    if len(ranks) == 1 and "findings" in first:
        of_ranks = f"{_ranks_text(list(failed))}: " if first["of_rank"] and not is_everywhere else ""
        error = PlanRefused([finding_of(each) for each in first["findings"]], of_ranks + first["headline"])
    error.is_reported = True
    return error


def _user_error(failure: Exception) -> BaseException | None:
    """The error whose traceback shows the user's code; None if the message is enough."""
    if isinstance(failure, PipelineError):
        return failure.__cause__
    return None if isinstance(failure, PipeproofError) else failure


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]}..."
