"""The error of records and logs that ``state align`` cannot read."""

from __future__ import annotations


class AlignmentError(ValueError):
    """A file that is no record and no log, or is cut off; the message has its name, the place in it, and the remedy."""
