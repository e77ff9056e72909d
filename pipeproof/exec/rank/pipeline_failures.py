"""One error on every rank from a failure on one: the store reports it, and transfers are ended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from pipeproof.exec.rank.stall_watch import StallWatch
from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.train_errors import PipelineError

_REPORT_S = 1.0
"""Time in which the rank that failed reports why, after its transfers have ended: it reports before it ends them."""
_STALL_REPORT_S = 15.0
"""The same time while a rank collects the activities of all others."""
_ADVICE = re.compile(r"^\[/[^\]]*\] |\. This is typically .*")
"""Parts of gloo's messages that name its source files and guess."""


class PipelineFailures:
    """The failures of one rank's pipeline; ``abort`` ends its transfers."""

    def __init__(self, agreement: Agreement, abort: Callable[[], None]) -> None:
        self._agreement, self._abort = agreement, abort
        self._text: str | None = None
        self.is_own = False
        """True if this rank has failed first."""

    @property
    def is_broken(self) -> bool:
        """True after a failure of this rank, or a known failure of another."""
        return self._text is not None

    def require_sound(self, failure: str | None = None) -> None:
        """Refuse to run after a failure: other ranks may be in another step. ``failure`` is one that was seen since.

        Raises:
            PipelineError: this rank or another has failed.
        """
        if self._text is not None:
            raise PipelineError.reported(f"this pipeline has failed before; make a new one. It failed by: {self._text}")
        if failure is not None:
            raise PipelineError.reported(failure)

    def fail(self, text: str, *, is_reported: bool = False) -> None:
        """Report to all ranks why this one ends, and end the transfers that they wait for.

        With ``is_reported`` the text is another rank's, or common to all.
        """
        if self._text is None:
            self._text, self.is_own = text if is_reported else f"rank {self._agreement.rank}: {text}", not is_reported
            with contextlib.suppress(Exception):
                self._agreement.fail(self._text)
        self._abort()

    def elsewhere(self, error: Exception, activity: str = "") -> str:
        """After a transfer has ended with an error: the failure that another rank reported, or this one's own.

        ``activity`` is this rank's operation, and the peer that it waits for.
        """
        reported = self._reported()
        if reported is not None:
            self.fail(reported, is_reported=True)
            return reported
        text = _ADVICE.sub("", str(error).partition("\n")[0])
        if is_of_peer(error):
            text = f"its communication ended while it {activity}; the peer's process has probably ended ({text})"
        elif activity:
            text = f"{type(error).__name__} while it {activity}: {text}"
        self.fail(text)
        return str(self._text)

    @contextlib.contextmanager
    def as_one(
        self, watch: StallWatch, of_transfers: type[Exception], note: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Turn an error in a step on any rank into one error and one report on every rank.

        An error of the type ``of_transfers`` usually means that a peer has failed and ended a transfer; ``note`` is
        called before its text is made.
        """
        self.require_sound(watch.failure)
        try:
            yield
            self.require_sound(watch.failure)  # values of ended transfers are not results
        except PipelineError as error:
            if not error.leaves_usable:
                self.fail(str(error), is_reported=error.is_reported)
            raise
        except of_transfers as error:
            note()
            text = self.elsewhere(error, watch.state())
            raise PipelineError.reported(text) from (error if self.is_own and not is_of_peer(error) else None)
        except BaseException as error:
            activity = watch.state(with_line=False)
            self.fail(f"{type(error).__name__} {f'({error}) ' if str(error) else ''}while it {activity}")
            raise
        finally:
            watch.leave()
            if self.is_broken:
                watch.acknowledge()

    def _reported(self) -> str | None:
        try:
            if self._agreement.is_published("failed", _REPORT_S):
                return self._agreement.failure()
            if self._agreement.has("stalled") and self._agreement.is_published("failed", _STALL_REPORT_S):
                return self._agreement.failure()
        except Exception:  # noqa: BLE001 - the store has gone with the rank that held it
            return None
        return None


@contextlib.contextmanager
def one_failure(agreement: Agreement) -> Iterator[contextlib.ExitStack]:
    """Report a failed start to all ranks, also to ranks in another phase; then call the stack's undo functions."""
    with contextlib.ExitStack() as undo:
        try:
            yield undo
        except BaseException as error:
            is_known = isinstance(error, PipelineError) and error.is_reported
            text = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(Exception):
                agreement.fail(text if is_known else f"rank {agreement.rank}: {text}")
            raise
        undo.pop_all()


def is_of_peer(error: Exception) -> bool:
    """True for an error of a transfer whose other end has gone."""
    return any(word in str(error) for word in ("onnection", "NCCL", "peer"))
