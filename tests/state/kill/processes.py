"""Work in processes that end by SIGKILL at an operation of theirs, forked from one that has imported everything."""

import multiprocessing
import signal

from tests.state.kill.dying import Death

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.state.kill.work"])


def _live(work, arguments, at, fraction, pipe):
    death = Death(at, fraction).install()
    work(*arguments)
    pipe.send(death.log)


class Victim:
    """A process that carries out ``work``, a function of ``tests.state.kill.work``."""

    def __init__(self, work, *arguments, at=None, fraction=0.0):
        self._pipe, other = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_live, args=(work, arguments, at, fraction, other))
        self._process.start()
        other.close()

    @property
    def sentinel(self):
        return self._process.sentinel

    def wait(self):
        """The log of a process that came to its end; None of one that was killed."""
        try:
            log = self._pipe.recv()
        except EOFError:
            log = None
        self._process.join()
        self._pipe.close()
        assert self._process.exitcode == (0 if log is not None else -signal.SIGKILL), self._process.exitcode
        return log

    def kill(self):
        self._process.kill()

    def wait_for_end(self):
        """However it ends."""
        self._process.join()


def barrier(parties):
    return _CONTEXT.Barrier(parties)
