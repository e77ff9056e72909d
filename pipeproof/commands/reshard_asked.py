"""What ``pipeproof reshard`` is asked, and whether that makes sense together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

_PLANS = (".yaml", ".yml", ".json")
FILE = ".safetensors"
_INDEX = "index.json"
"""How the files end that say what a checkpoint has, of ours and of Hugging Face's."""
_WITH_CONFIG = "huggingface"
"""The names whose directories have a configuration beside the weights."""


@dataclass(frozen=True)
class Asked:
    """What was typed."""

    source: Path
    plan: Path | None
    out: Path | None
    aoa: Path | None
    names: str | None
    weights_only: bool
    by_paddle: bool
    picture: Path | None
    jobs: int
    as_json: bool


def is_plan(path: Path) -> bool:
    """Whether a source is to be read as a plan; an index of a checkpoint has such a suffix, too."""
    return path.suffix in _PLANS and not path.is_dir() and not path.name.endswith(_INDEX)


def require_sense(asked: Asked, *, check: bool) -> None:
    """Refuse what is said twice, or not at all.

    Raises:
        click.UsageError: with what to give.
    """
    if check == (asked.out is not None):
        raise click.UsageError("give -o OUT, what to make, or --check to prove it alone")
    if is_plan(asked.source) and not check:
        raise click.UsageError("SOURCE is a plan, which has no tensors to write: give --check")
    if asked.plan is not None and (asked.plan.is_dir() or asked.plan.suffix == FILE):
        what = "a directory" if asked.plan.is_dir() else "a file of tensors"
        raise click.UsageError(f"{asked.plan} is {what}: --to names the plan that is to go on")
    if asked.by_paddle and (asked.plan is None or asked.out is None):
        raise click.UsageError("--save-format says how the state of a plan is written: give --to PLAN and -o OUT")
    if asked.out is not None and asked.picture is not None and asked.out.absolute() == asked.picture.absolute():
        raise click.UsageError(f"-o and --picture are to make the same file, {asked.out}: name another picture")
    if asked.out is None:
        if asked.plan is None and asked.aoa is None and asked.names is None:
            raise click.UsageError("--check needs to know for what: a plan, --aoa or --names")
        if is_plan(asked.source) and asked.plan is None:
            raise click.UsageError("give the plan that is to go on: --to PLAN")
        if is_plan(asked.source) and asked.names is not None:
            raise click.UsageError("SOURCE is a plan, whose states have pipeproof's own names: leave --names out")
    elif (asked.plan is None) != (asked.out.suffix == FILE):
        if asked.plan is None and asked.names != _WITH_CONFIG:
            raise click.UsageError(f"give the plan that is to go on, --to PLAN, or an OUT that ends with {FILE}")
        if asked.plan is not None:
            raise click.UsageError(f"the state of a plan is a directory: OUT may not end with {FILE}")
