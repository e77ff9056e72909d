"""Calls a person's ``build`` function; whatever goes wrong in their file is told with its line."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeproof.specs.finding import BadPlanError
from pipeproof.specs.own_layers import LayersSpec
from pipeproof.specs.problems import describe_value
from pipeproof.stages.own.codes import cannot_build

_WANTED = "return `layers, loss, data`: a list of layers, and two functions"


@dataclass(frozen=True, slots=True)
class Built:
    """What ``build`` returned: the layers as they are written, ``loss(output, labels)`` and ``data(step, index, rng)``.

    ``file`` is where it stands.
    """

    file: Path
    layers: Any
    loss: Callable[[Any, Any], Any] | None
    data: Callable[[int, int, Any], Any]


def call_build(model: LayersSpec) -> Built:
    """Load the file of a model and call its function. The file's folder is put on the path of imports.

    Raises:
        BadPlanError: PP911, there is no such file or function, it raises, or it returns something else.
    """
    name, function_name = model.file_and_function
    file = Path(name).resolve()
    if not file.is_file():
        raise cannot_build(f"there is no file `{name}`", "the path is relative to the plan file")
    spec = importlib.util.spec_from_file_location(f"pipeproof_own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: pickle and dataclasses look there
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    with blaming(file, f"loading `{name}`"):
        spec.loader.exec_module(module)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise cannot_build(
            f"`{name}` has no function `{function_name}`", f"define `def {function_name}():` in it, at the top level"
        )
    with blaming(file, f"`{function_name}()`"):
        result = function()
    if not isinstance(result, tuple | list) or len(result) != 3:
        found = f"{len(result)} things" if isinstance(result, tuple | list) else describe_value(result)
        raise cannot_build(f"`{function_name}()` returned {found} in place of three", _WANTED)
    layers, loss, data = result
    if loss is not None and not callable(loss):
        raise cannot_build(f"the loss that `{function_name}()` returned is {describe_value(loss)}", _WANTED)
    if not callable(data):
        raise cannot_build(f"the data that `{function_name}()` returned is {describe_value(data)}", _WANTED)
    return Built(file, layers, loss, data)


@contextmanager
def blaming(file: Path, what: str) -> Iterator[None]:
    """Turn whatever a person's code raises into PP911, with the last line of their file that was at work.

    Raises:
        BadPlanError: in place of any other exception.
    """
    try:
        yield
    except BadPlanError:
        raise
    except (Exception, SystemExit) as error:
        text = str(error).strip().splitlines()
        summary = f"{type(error).__name__}: {text[-1] if text else ''}".rstrip(": ")
        raise cannot_build(f"{what} raised {summary}", _place(error, file)) from error


def _place(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{Path(error.filename).name}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    if not frames:
        return f"no line of {file.name} was at work"
    last = frames[-1]
    return f"{file.name}:{last.lineno}, in {last.name}: {last.line}"
