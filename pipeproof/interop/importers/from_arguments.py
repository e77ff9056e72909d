"""Plans from the configuration that a tool has in its own process: nothing is read, and nothing of it is run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError, SourceMap
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.megatron.argument_block import arguments_of_values
from pipeproof.interop.importers.megatron.megatron_importer import import_arguments
from pipeproof.interop.importers.recipes.launcher_keys import LauncherSettings
from pipeproof.interop.importers.recipes.layered_yaml import Placed, Unknown, is_known
from pipeproof.interop.importers.recipes.megatron_settings import MODEL_FLAGS, OVERLAP_FLAGS, settings_of
from pipeproof.interop.importers.sectioned_file import SectionedFile
from pipeproof.interop.importers.torchtitan import import_sections

_SOURCE: Final = "the arguments"
_HERE: Final = Location(_SOURCE)


def from_arguments(arguments: object, kind: str = "megatron", flags: Flags = Flags()) -> Imported:  # noqa: B008 - frozen
    """Import the configuration of a training in the process of its tool.

    Args:
        arguments: ``megatron``: the namespace of ``get_args()`` or a dict of such names. ``megatron-bridge``: a
            ``ConfigContainer``. ``torchtitan``: a job configuration. Each may be nested dicts.
        kind: one of these three.
        flags: values that the configuration does not have.

    Raises:
        PlanFileError: PP170 if a value cannot be read or the kind is not known, PP171 if the tool refuses the settings.
    """
    if kind not in _KINDS:
        message = f"`{kind}` has no arguments to read: {', '.join(_KINDS)} have"
        raise PlanFileError(UNREADABLE.finding(message, _HERE))
    return _KINDS[kind](_attributes(arguments), flags)


def _megatron(values: Mapping[str, Any], flags: Flags) -> Imported:
    return import_arguments(arguments_of_values(values, _SOURCE), flags)


def _megatron_bridge(values: Mapping[str, Any], flags: Flags) -> Imported:
    """The sections of a ``ConfigContainer`` (Megatron-Bridge, commit 067f987: training/config.py)."""
    settings = LauncherSettings("Megatron-Bridge", SourceMap(_SOURCE, ()))
    model, dataset = _attributes(values.get("model")), _attributes(values.get("dataset"))
    if not model:
        settings.refuse("the configuration has no `model`", _HERE, "give the whole ConfigContainer")
    length = dataset.get("seq_length", dataset.get("sequence_length"))
    if length is not None:
        settings.default("--seq-length", length, _HERE)
    for section, names in (("model", MODEL_FLAGS), ("comm_overlap", OVERLAP_FLAGS), ("train", _TRAIN), ("ddp", _DDP)):
        settings.add(settings_of(_placed(_attributes(values.get(section))), names, f"{section}."))
    if model.get("share_embeddings_and_output_weights") is False:
        settings.switch("--untie-embeddings-and-output-weights", _HERE)
    precision = values.get("mixed_precision")
    is_half = "fp16" in precision if isinstance(precision, str) else _attributes(precision).get("fp16") is True
    settings.switch("--fp16" if is_half else "--bf16", _HERE)
    return import_arguments(settings.arguments(), flags)


def _torchtitan(values: Mapping[str, Any], flags: Flags) -> Imported:
    """The sections of a ``Trainer.Config`` (torchtitan, commit b5bcd76: config/configs.py)."""
    data = {name: dict(_attributes(values.get(name))) for name in ("parallelism", "training", "model")}
    if not data["parallelism"]:
        message = "the configuration has no `parallelism`: give the whole configuration of the trainer"
        raise PlanFileError(UNREADABLE.finding(message, _HERE))
    spec = _attributes(values.get("model_spec"))
    layers = _attributes(spec.get("model")).get("layers")
    if isinstance(spec.get("name"), str):
        data["model"]["name"] = spec["name"]
    if isinstance(layers, Sequence):
        data["model"]["num_layers"] = len(layers)
    checkpoints = values.get("activation_checkpoint")
    mode = _attributes(checkpoints).get("mode") or type(checkpoints).__qualname__.lower()
    data["activation_checkpoint"] = {"mode": next((name for name in ("selective", "full") if name in mode), "none")}
    plain = {name: {key: v for key, v in keys.items() if v is not None and is_known(v)} for name, keys in data.items()}
    return import_sections(SectionedFile(_SOURCE, (), plain, {}), flags)


_TRAIN: Final = MappingProxyType(
    {"global_batch_size": "--global-batch-size", "micro_batch_size": "--micro-batch-size"}
)  # fmt: skip
_DDP: Final = MappingProxyType(
    {
        "use_distributed_optimizer": "--use-distributed-optimizer",
        "overlap_grad_reduce": "--overlap-grad-reduce",
        "overlap_param_gather": "--overlap-param-gather",
        "bucket_size": "--ddp-bucket-size",
    }
)
_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any], Flags], Imported]]] = MappingProxyType(
    {"megatron": _megatron, "megatron-bridge": _megatron_bridge, "torchtitan": _torchtitan}
)


def _attributes(value: object) -> Mapping[str, Any]:
    """The items of a dict, or the attributes of an object with defaults of its class; empty for anything else."""
    if isinstance(value, Mapping):
        return value
    if value is None or isinstance(value, (bool, int, float, str, list, tuple, type)):
        return {}
    names = (*getattr(type(value), "__dataclass_fields__", ()), *getattr(value, "__dict__", ()))
    return {name: getattr(value, name) for name in names if name[:1] != "_" and hasattr(value, name)}


def _placed(values: Mapping[str, Any]) -> Iterator[tuple[str, Placed]]:
    """The values with the name of the source."""
    for name, value in values.items():
        yield name, Placed(value if is_known(value) else Unknown("no plain value", _HERE), _HERE)
