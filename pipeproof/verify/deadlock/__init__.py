"""4xx: every operation completes without buffering beyond the backend's promises.

``comm.channel_models`` has the ways in which backends execute transfers,
``wait_columns`` the waits on whole columns, ``deadlock_verdict`` cycles and the
verdict, ``suggested_fix`` proved changes, ``deadlock_rules`` the codes.
"""

from pipeproof.verify.deadlock.deadlock_rules import RULES

__all__ = ["RULES"]
