"""Waiting for what other processes do: a condition is read again and again, at growing intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1


def wait_until(condition: Callable[[], bool], limit_s: float = math.inf) -> bool:
    """Return True once a condition holds, False if it does not within ``limit_s`` seconds; it is read at least once."""
    ends, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while not condition():
        if time.monotonic() > ends:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
