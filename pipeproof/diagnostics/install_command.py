"""The commands that messages recommend to install missing packages in the running Python."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def install_extra(extra: str) -> str:
    """Return the command that adds an extra of pipeproof.

    pip keeps an installed pipeproof, from a wheel or from a checkout. A checkout that is only on Python's path is
    installed with it, because no package index may have it.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    name = "pipeproof"
    try:
        distribution(name)
    except PackageNotFoundError:
        checkout = Path(__file__).parents[2]
        if (checkout / "pyproject.toml").exists():
            return f"{_pip()} install -e '{checkout}[{extra}]'"
    return f"{_pip()} install '{name}[{extra}]'"


def missing_framework(error: ModuleNotFoundError, title: str, extra: str) -> ImportError:
    """Return the error of an import without a framework, with the command that installs it; others stay as they are."""
    if error.name not in ("torch", "paddle"):
        return error
    return ImportError(f"`pipeproof.{error.name}` needs {title}: {install_extra(extra)}", name=error.name)


def _pip() -> str:
    """``pip`` if the shell finds this Python's own, else the path of this Python with ``-m pip``."""
    python, pip_path = Path(sys.executable), shutil.which("pip")
    if pip_path is not None and Path(pip_path).parent == python.parent:
        return "pip"
    directory = Path.cwd()
    return f"{python.relative_to(directory) if python.is_relative_to(directory) else python} -m pip"
