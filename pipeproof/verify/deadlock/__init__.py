"""4xx: with no buffering beyond what the backend promises, every operation gets done.

``events`` has the definition, ``models`` the ways in which backends carry
transfers out, ``columns`` and ``cycles`` the same waits at scale, ``classify``
the verdict, ``mend`` changes that are proved, ``rules`` the codes.
"""

from pipeproof.verify.deadlock.rules import RULES

__all__ = ["RULES"]
