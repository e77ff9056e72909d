"""Turns of two computations of one rank: one in the rank's own thread, the other in a helper thread.

Exactly one of them runs at any time: each hands the turn over and waits until it comes back. Autograd runs a backward
inside one call, which cannot be left and entered again, so the backward of an overlapped pair needs a thread of its
own. On a GPU autograd runs functions in a thread for the device; if one of them gives the turn away, that thread waits,
and with it only the helper's call of the backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

JOIN_S = 10.0
"""Time that an abandoned helper has for its end. Only one that hangs in communication needs longer; it is a daemon."""


class TurnsEndedError(RuntimeError):
    """The other computation failed, so this one does not get its turn again."""


class Helper:
    """A computation that runs in a thread of its own while the rank's thread waits in ``resume``, and only then.

    ``name`` is that of the thread, in which ``set_up`` is called before ``work``.
    """

    def __init__(self, name: str, work: Callable[[], None], set_up: Callable[[], None]) -> None:
        self._work, self._set_up = work, set_up
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._turn, self._back = threading.Lock(), threading.Lock()  # each is released to hand the turn over
        self._turn.acquire()
        self._back.acquire()
        self._is_abandoned = False
        self._error: BaseException | None = None
        self.has_ended = False

    def resume(self) -> None:
        """Let the work run until it gives the turn back or ends; call this in the rank's thread.

        Raises:
            BaseException: what the work raised.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self.has_ended:
            self._thread.join()
            if self._error is not None:
                raise self._error

    def give_back(self) -> None:
        """Give the turn back and wait for the next one; call this inside the work, also in another of its threads.

        Raises:
            TurnsEndedError: there is no next turn.
        """
        if not self._is_abandoned:
            self._back.release()
            self._turn.acquire()
        if self._is_abandoned:
            raise TurnsEndedError("the other computation of the pair has failed")

    def close(self) -> None:
        """End the thread, in which ``give_back`` raises an error if the work has not ended."""
        if self._thread.ident is None or self.has_ended:
            return
        self._is_abandoned = True
        self._turn.release()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            self._set_up()
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised in the rank's thread
            self._error = error
        self.has_ended = True
        self._back.release()
