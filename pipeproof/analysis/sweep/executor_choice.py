"""Executors by name: ``dask:ADDRESS``, ``ray[:ADDRESS]``, ``slurm[:KEY=VALUE,...]``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from pipeproof.analysis.sweep.cluster import Cluster
from pipeproof.analysis.sweep.slurm_arrays import SlurmOptions, open_slurm
from pipeproof.diagnostics.install_command import install_extra
from pipeproof.diagnostics.problems import nearest_name

PACKAGES = {"dask": "distributed", "ray": "ray", "slurm": "submitit"}
"""The package that each kind needs; the kind is also the name of the extra."""


@dataclass(frozen=True)
class ExecutorChoice:
    """An executor that was chosen, and is not open yet."""

    kind: str
    open: Callable[[Path], AbstractContextManager[Cluster]]
    """Open it; the argument is a folder for the files that it needs, such as that of the results."""

    def require_package(self) -> None:
        """Refuse a kind without its package.

        Raises:
            ValueError: the package is not installed.
        """
        package = PACKAGES[self.kind]
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"{self.kind} needs the package {package}: {install_extra(self.kind)}")


def parse_executor(text: str) -> ExecutorChoice:
    """Read the name of an executor.

    Raises:
        ValueError: there is no such kind, its address is missing, or a key of it is unknown or has a wrong value.
    """
    kind, _, rest = text.partition(":")
    if kind == "dask":
        if not rest:
            raise ValueError("dask needs the address of a scheduler: dask:tcp://HOST:8786")
        return ExecutorChoice(kind, partial(_open_dask, rest))
    if kind == "ray":
        return ExecutorChoice(kind, partial(_open_ray, rest or None))
    if kind == "slurm":
        return ExecutorChoice(kind, partial(open_slurm, _slurm_options(rest)))
    raise ValueError(f"no executor {kind!r}; {_near(kind, PACKAGES)}")


def _open_dask(address: str, folder: Path) -> AbstractContextManager[Cluster]:
    from pipeproof.analysis.sweep.dask_cluster import open_dask

    return open_dask(address)


def _open_ray(address: str | None, folder: Path) -> AbstractContextManager[Cluster]:
    from pipeproof.analysis.sweep.ray_cluster import open_ray

    return open_ray(address)


def _slurm_options(text: str) -> SlurmOptions:
    known = {field.name: field for field in fields(SlurmOptions)}
    options: dict[str, Any] = {}
    for item in text.split(",") if text else ():
        key, equals, value = item.partition("=")
        if key not in known:
            raise ValueError(f"slurm has no key {key!r}; {_near(key, known)}")
        if not equals or not value:
            raise ValueError(f"slurm's key {key} needs a value: {key}=VALUE")
        if key in options:
            raise ValueError(f"slurm's key {key} is given twice")
        if isinstance(known[key].default, int):
            if not (value.isascii() and value.isdigit() and int(value)):
                raise ValueError(f"slurm's key {key} is a positive integer, found {value!r}")
            options[key] = int(value)
        else:
            options[key] = value
    return SlurmOptions(**options)


def _near(name: str, known: Iterable[str]) -> str:
    near = nearest_name(name, known)
    return f"did you mean {near!r}?" if near else f"known are {', '.join(known)}"
