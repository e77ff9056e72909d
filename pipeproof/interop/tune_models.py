"""The model for ``tune``: a plan, files of another tool, a ``config.json``, or the name of a public model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.analysis.tune.frameworks import TuneModel, model_of_plan
from pipeproof.diagnostics.finding import BadPlanError, Finding, Severity
from pipeproof.diagnostics.problems import nearest_name
from pipeproof.diagnostics.source import read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop.importers.check_imported import load_imported
from pipeproof.interop.importers.import_kinds import import_files
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.model_sizes import read_model_config
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.state.names.config_names import MODEL_NAMES


@dataclass(frozen=True)
class PublicModel:
    """The keys of ``model`` of a plan, without the sequence length; ``notes`` name inexpressible properties."""

    keys: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def _llama(num_layers: int, hidden: int, heads: int, ffn: int) -> PublicModel:
    return PublicModel(
        {"num_layers": num_layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": 8, "ffn_size": ffn,
         "vocab_size": 128256}
    )  # fmt: skip


def _qwen(num_layers: int, hidden: int, heads: int, ffn: int, expert: int) -> PublicModel:
    return PublicModel(
        {"num_layers": num_layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": 4, "head_size": 128,
         "ffn_size": ffn, "vocab_size": 151936, "qk_norm": True,
         "moe": {"num_experts": 128, "top_k": 8, "ffn_size": expert}}
    )  # fmt: skip


def _deepseek(heads: int, vocabulary: int, experts: int, dense: int, **more: Any) -> PublicModel:
    return PublicModel(
        {"num_layers": 61, "hidden_size": 7168, "num_heads": heads, "ffn_size": 18432, "vocab_size": vocabulary,
         "mla": {"q_rank": 1536, "kv_rank": 512, "nope_head_size": 128, "rope_head_size": 64, "value_head_size": 128},
         "moe": {"num_experts": experts, "top_k": 8, "ffn_size": 2048, "num_shared_experts": 1,
                 "dense_layers": dense, "score": "sigmoid"}, **more}
    )  # fmt: skip


MODELS: Mapping[str, PublicModel] = MappingProxyType(
    {
        "llama3_8b": _llama(32, 4096, 32, 14336),
        "llama3_70b": _llama(80, 8192, 64, 28672),
        "llama3.1_405b": _llama(126, 16384, 128, 53248),
        "qwen3_30b_a3b": _qwen(48, 2048, 32, 6144, 768),
        "qwen3_235b_a22b": _qwen(94, 4096, 64, 12288, 1536),
        "deepseekv3": _deepseek(128, 129280, 256, 3, mtp={"num_modules": 1, "magic_send": True, "reads": "after_norm"}),
        "kimi_k2": _deepseek(64, 163840, 384, 1),
        "gpt oss 120b": PublicModel(
            {
                "num_layers": 36,
                "hidden_size": 2880,
                "num_heads": 64,
                "num_kv_heads": 8,
                "head_size": 64,
                "ffn_size": 2880,
                "vocab_size": 201088,
                "biases": "qkv",
                "moe": {"num_experts": 128, "top_k": 4, "ffn_size": 2880},
            },
            (
                "attention to the last 128 tokens, in every second block, is counted as attention to all",
                "biases of experts and of attention's output are left out",
            ),
        ),
    }
)
"""By the name in lower case."""

NOT_DESCRIBED: Mapping[str, str] = MappingProxyType(
    {
        "nemotron": "blocks with a state space (Mamba) have no key in a plan",
        "qwen3_next": "linear attention has no key in a plan",
    }
)
"""Reasons by the beginning of the name in lower case."""

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
    plan = PlanBuilder("config", flags)
    read_model_config(plan, path)
    plan.set(("model", "kind"), "gpt", "the family of the model")
    imported = plan.imported(str(path), ())
    return _with_length(dict(imported.plan.get("model", {})), flags, ())


def _public_model(name: str, flags: Flags) -> TuneModel:
    wanted = _plain(name)
    by_name = {_plain(model_name): model_name for model_name in MODELS}
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
    plan = plan_from_dict({"pipeproof": 1, "model": model, **_ONE_RANK}, flags.settings)
    return TuneModel(plan, assumptions=assumptions)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _unknown(message: str, help: str) -> BadPlanError:
    return BadPlanError(Finding("PP100", Severity.ERROR, message, help=help))
