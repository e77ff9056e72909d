"""The model that ``tune`` is given: a plan, files of another tool, a ``config.json``, or the name of a public model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeproof.analysis.tune.tune_model import TuneModel, model_of_plan
from pipeproof.diagnostics.finding import BadPlanError, Finding, Severity
from pipeproof.diagnostics.problems import KeyPath, nearest_name
from pipeproof.diagnostics.source import read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop.importers.check_imported import load_imported
from pipeproof.interop.importers.draft import Draft
from pipeproof.interop.importers.import_kinds import import_files
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.model_sizes import MODEL_NAMES, read_model_config
from pipeproof.interop.public_models import MODELS, NOT_DESCRIBED
from pipeproof.specs.load_plan import load_plan, plan_from_dict

DEFAULT_SEQ_LENGTH = 4096
"""Tokens of a sequence for a model whose source does not give the length of training."""

_KIND_OF_SUFFIX = {".sh": "megatron", ".toml": "torchtitan"}
_ONE_RANK = {"topology": {}, "schedule": {"kind": "1f1b", "num_micro_batches": 1, "micro_batch_size": 1}}


def tune_model(source: str, *, kind: str | None = None, flags: Flags | None = None) -> TuneModel:
    """Read the model to tune.

    Args:
        source: A plan file, a file of a kind of ``import_kinds.KINDS``, a ``config.json`` in the style of Hugging Face,
            or a name of ``public_models.MODELS``; case and punctuation of names do not count.
        kind: The kind of the file; without it, by its suffix and its keys.
        flags: Values that the file lacks.

    Raises:
        BadPlanError: there is no such file or name, or it cannot be read.
    """
    flags = flags or Flags()
    path = Path(source)
    if not path.exists():
        return _public_model(source, flags)
    kind = kind or _KIND_OF_SUFFIX.get(path.suffix.lower())
    if kind is not None:
        return model_of_plan(load_imported(import_files(kind, [path], flags)))
    tree = parse_text(read_text(str(path)), str(path))
    if isinstance(tree.data, dict) and "pipeproof" not in tree.data and not tree.problems:
        names = tree.data.get("text_config", tree.data)
        if isinstance(names, dict) and any(name in names for name in MODEL_NAMES):
            return _of_config(path, flags)
    return model_of_plan(load_plan(path, flags.settings))


def _of_config(path: Path, flags: Flags) -> TuneModel:
    draft = Draft("config", flags)
    read_model_config(draft, path)
    draft.set(("model", "kind"), "gpt", "the family of the model")
    imported = draft.imported(str(path), ())
    return _with_length(dict(imported.plan.get("model", {})), flags, ())


def _public_model(name: str, flags: Flags) -> TuneModel:
    wanted = _plain(name)
    by_name = {_plain(known): known for known in MODELS}
    for start, reason in NOT_DESCRIBED.items():
        if wanted.startswith(_plain(start)):
            raise _unknown(f"{name}: {reason}", f"known models are {', '.join(MODELS)}")
    if wanted not in by_name:
        near = nearest_name(name.lower(), MODELS)
        hint = f"did you mean `{near}`? " if near else ""
        raise _unknown(f"`{name}` is neither a file nor a known model", f"{hint}known models are {', '.join(MODELS)}")
    model = MODELS[by_name[wanted]]
    return _with_length({"kind": "gpt", **model.keys}, flags, model.notes)


def _with_length(model: dict[str, Any], flags: Flags, notes: tuple[str, ...]) -> TuneModel:
    assumptions = notes
    if "seq_length" not in model and ("model", "seq_length") not in flags.settings:
        model["seq_length"] = DEFAULT_SEQ_LENGTH
        assumptions += (f"sequences have {DEFAULT_SEQ_LENGTH} tokens (`--set model.seq_length=N`)",)
    data = _with_settings({"pipeproof": 1, "model": model, **_ONE_RANK}, flags)
    return TuneModel(plan_from_dict(data), assumptions=assumptions)


def _with_settings(data: dict[str, Any], flags: Flags) -> dict[str, Any]:
    """The data of a plan with the values of the command line."""
    result = dict(data)
    for path, value in flags.settings.items():
        result = _with_value(result, path, value)
    return result


def _with_value(data: dict[str, Any], path: KeyPath, value: object) -> dict[str, Any]:
    key, *rest = path
    inner = data.get(str(key))
    below = _with_value(inner if isinstance(inner, dict) else {}, tuple(rest), value) if rest else value
    return {**data, str(key): below}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unknown(message: str, help: str) -> BadPlanError:
    return BadPlanError(Finding("PP100", Severity.ERROR, message, help=help))
