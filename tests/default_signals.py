"""Signals as a terminal starts a program with them, whatever started the tests.

``nohup`` has SIGHUP ignored, a shell its background jobs SIGINT and SIGQUIT, and each child inherits that.
"""

import signal

SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def default_signals():
    """Restore the default actions of these signals; ``preexec_fn`` of a process that a test sends them to."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
