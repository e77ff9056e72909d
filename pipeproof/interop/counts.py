"""Counts of a draft that an importer reckons with, whatever ``--set`` made of them."""

from __future__ import annotations

from pipeproof.interop.draft import Draft


def count(draft: Draft, *path: str, default: int = 1) -> int:
    """The count at a path of plan keys; ``default`` where there is none, or what is there is none.

    What is no count is refused when the plan is validated, with the key that it was given for.
    """
    value = draft.get(*path)
    return value if type(value) is int and value > 0 else default
