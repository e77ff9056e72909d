"""Directories of Hugging Face, read into the stages of a model.

Names, and conversions of names and tensors, are the library's: its own functions map each tensor of the directory to
tensors of the whole model on the meta device. So every rank checks all names and shapes, and reads the elements of its
own stages alone, one conversion at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.cut_transformers import TransformersStage
from pipeproof.exec.train.torch.data_parallel import local_part
from pipeproof.exec.train.torch.dcp_files import Ranks
from pipeproof.exec.train.torch.meta_buffers import compute_buffers, give_memory, kept_ties, require_computed_buffers
from pipeproof.exec.train.torch.model_names import HeldTensor, held_tensors, unwrapped
from pipeproof.exec.train.torch.model_stages import ModelStages
from pipeproof.foreign_text import MALFORMED, decode_json, open_foreign, read_foreign
from pipeproof.state.safetensors_header import StoredArray, read_header

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of the files of a directory, as the library has them."""


def models_of(stages: Mapping[int, nn.Module], ranks: Ranks) -> list[Any]:
    """The ``PreTrainedModel`` of each stage of this rank.

    Raises:
        PipelineError: a stage is of another kind, or its model cannot be in such a directory.
    """
    if isinstance(stages, ModelStages) and ranks.size > 1:
        raise PipelineError(
            "`stages` has the whole model, and a rank reads its own stages: pass {number: stages[number] for number in "
            "stages_of_rank(schedule, num_ranks, num_stages, rank)}"
        )
    models = []
    for number, stage in stages.items():
        inner = unwrapped(stage)
        if not isinstance(inner, TransformersStage):
            raise PipelineError(
                f"stage {number} is a {type(inner).__name__}: only stages of `stages_of_transformers` are read from "
                "and written to directories of Hugging Face; use load_dcp and save_dcp for others"
            )
        model = inner.pretrained
        if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
            raise PipelineError(
                f"the {type(model).__name__} of stage {number} is quantized or has adapters: use load_dcp and save_dcp"
            )
        models.append(model)
    if not models:
        raise PipelineError("give this rank at least one stage: {number: module}")
    return models


def whole_model(models: Sequence[Any]) -> Any:
    """The whole model of some stages on the meta device, with the names, ties and conversions of the library."""
    model = models[0]
    with torch.device("meta"):
        whole = type(model)(copy.deepcopy(model.config))
    whole._weight_conversions = getattr(model, "_weight_conversions", None)  # noqa: SLF001 - of the directory it is from
    if getattr(model, "generation_config", None) is not None:
        whole.generation_config = model.generation_config
    return whole


def known_tensors(whole: Any, stages: Mapping[int, nn.Module]) -> list[HeldTensor]:
    """The parameters and buffers of stages.

    Raises:
        PipelineError: the whole model does not have one of them.
    """
    names, held = set(whole.state_dict()), held_tensors(stages)
    for entry in held:
        if entry.name not in names:
            raise PipelineError(
                f"stage {entry.stage} has {entry.name}, which {type(whole).__name__} does not have: use load_dcp and "
                "save_dcp for a model that was changed"
            )
    return held


def load_pretrained(
    stages: Mapping[int, nn.Module],
    directory: str | Path,
    *,
    device: torch.device | str | None = None,
    group: Any = None,
) -> None:
    """Load a directory of Hugging Face into the stages of this rank, as ``from_pretrained`` would.

    ``stages`` are this rank's stages of ``stages_of_transformers``, by global stage number. Every rank of ``group``
    calls it. Tensors on the meta device get memory on ``device`` (the current GPU, else the CPU), and buffers that no
    state dict has are computed. Other parameters are written in place. Each rank reads the tensors of its own stages,
    one after the other, converts them as the library does, and casts them to the type of the parameter. With
    ``fully_shard`` each rank keeps its shard.

    Names and shapes of the whole model are checked before anything changes.

    Raises:
        PipelineError: on all ranks: weights are missing, unexpected, or have another shape; there are no safetensors.
        StateError: on all ranks: a file is missing, cut short or damaged.
    """
    ranks, path = Ranks(group), Path(directory).absolute()
    models = ranks.together(partial(models_of, stages, ranks))
    whole = ranks.together(partial(whole_model, models))
    stored = ranks.together(partial(_stored_tensors, path))
    conversions = ranks.together(partial(_conversions, whole, stored, path))
    held = ranks.together(partial(known_tensors, whole, stages))
    reads = ranks.together(partial(_reads, whole, conversions, held, path))
    ranks.together(partial(_require_equal_ties, whole, conversions, held, path))
    ranks.together(partial(_materialize, stages, device, set(reads)))
    ranks.together(partial(_fill, whole, stages, reads))
    for model in models:  # for a save, as ``from_pretrained`` leaves them
        model._weight_conversions = [each for each in whole._weight_conversions if each.was_used()]  # noqa: SLF001


def initialize_weights(
    stages: Mapping[int, nn.Module], *, seed: int = 0, device: torch.device | str | None = None
) -> None:
    """Initialise the stages of this rank as the library does a new model, and give them memory as ``load_pretrained``.

    All parameters and buffers get new values. The random numbers depend on ``seed``, on the number of the stage and on
    its contents: ranks with the same stage draw the same numbers, another cut draws others.

    Raises:
        PipelineError: a stage is not of ``stages_of_transformers``, or is sharded.
    """
    models = models_of(stages, Ranks(None))
    for number, stage in stages.items():
        if any(isinstance(weight, DTensor) for weight in stage.parameters()):
            raise PipelineError(f"stage {number} is sharded: initialise it before fully_shard")
    _give_memory(stages, device)
    for number, model in zip(stages, models, strict=True):
        with torch.random.fork_rng():
            torch.manual_seed(int.from_bytes(sha256(f"{seed} {number}".encode()).digest()[:6]))
            compute_buffers(model, ())
    require_computed_buffers(stages)


# --- the contents of a directory ---


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file."""

    file: Path
    array: StoredArray

    def meta(self) -> torch.Tensor:
        """A tensor of its type and shape, without values."""
        return torch.empty(self.array.shape, dtype=getattr(torch, self.array.dtype), device="meta")

    def read(self) -> torch.Tensor:
        """Its elements."""
        array = self.array
        with open_foreign(self.file) as stream:
            stream.seek(array.start)
            content = np.fromfile(stream, np.uint8, array.num_bytes)
        return torch.from_numpy(content).view(getattr(torch, array.dtype)).reshape(array.shape)


def _files_of(index: Path) -> set[str]:
    try:
        names = set(decode_json(read_foreign(index))["weight_map"].values())
    except MALFORMED as error:
        raise PipelineError(f"{index} has no `weight_map` from tensors to files: save the model again") from error
    strange = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if strange:
        raise PipelineError(f"{index} names {strange[0]!r}, which is not a file of its directory: save the model again")
    return names


def _stored_tensors(path: Path) -> dict[str, _Stored]:
    if (path / WEIGHTS).is_file():
        names = {WEIGHTS}
    elif (path / INDEX).is_file():
        names = _files_of(path / INDEX)
    else:
        what = "directory" if path.is_dir() else "local directory; download a model of the Hub first"
        raise PipelineError(f"{path} is no {what} with {WEIGHTS} or {INDEX}: save the model as safetensors")
    return {
        key: _Stored(path / name, array)
        for name in sorted(names)
        for key, array in read_header(path / name).arrays.items()
    }


# --- the library's conversions ---


@dataclass(slots=True)
class _Conversion:
    """Tensors of a directory that become one or several of the model; ``transform`` is the library's, unused."""

    first: str
    transform: Any
    sources: list[tuple[str, str, _Stored]] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def run(self, whole: Any, get: Callable[[_Stored], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of the model by name; ``get`` returns a tensor of the directory."""
        transform = copy.deepcopy(self.transform)
        for key, pattern, stored in self.sources:
            transform.add_tensor(self.first, key, pattern, partial(get, stored))
        made = transform.convert(self.first, model=whole, config=whole.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _conversions(whole: Any, stored: Mapping[str, _Stored], path: Path) -> dict[str, _Conversion]:
    """The conversion that makes each tensor of the model, as ``from_pretrained`` would choose it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping, state, prefix = get_model_conversion_mapping(whole), whole.state_dict(), whole.base_model_prefix
    whole._weight_conversions = mapping  # noqa: SLF001 - as the library keeps them for its save
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    by_first, unexpected = dict[str, _Conversion](), set[str]()
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            unexpected.add(key)
            continue
        transform = WeightRenaming(key, name) if pattern is None else by_pattern[pattern]
        conversion = by_first.setdefault(name, _Conversion(name, transform))
        conversion.sources.append((key, key if pattern is None else pattern, stored[key]))
    unexpected = _not_ignored(whole, unexpected)
    if unexpected:
        raise PipelineError(f"{path} has {_listed(unexpected)}, which {type(whole).__name__} does not have")
    result = {}
    for conversion in by_first.values():
        try:
            made = conversion.run(whole, _Stored.meta)
        except Exception as error:
            keys = _listed({key for key, _, _ in conversion.sources})
            raise PipelineError(f"{path}: {keys} cannot become {conversion.first}: {error}") from error
        conversion.shapes = {name: value.shape for name, value in made.items()}
        result.update(dict.fromkeys(made, conversion))
    return result


def _not_ignored(whole: Any, unexpected: set[str]) -> set[str]:
    """Names without those that the library knows as superfluous for the model, such as buffers of old versions."""
    from transformers.utils.loading_report import LoadStateDictInfo

    info = LoadStateDictInfo(set(), unexpected, set(), [], {}, set())
    whole._adjust_missing_and_unexpected_keys(info)  # noqa: SLF001 - the patterns are in it
    return set(info.unexpected_keys)


def _listed(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more ({', '.join(others[:4])}{', ..' * (len(others) > 4)})" if others else first


_Read = tuple[_Conversion, str]
"""The conversion that makes a tensor, and the name that it makes it under."""


def _reads(
    whole: Any, conversions: Mapping[str, _Conversion], held: Sequence[HeldTensor], path: Path
) -> dict[str, _Read]:
    """The conversions for the tensors of this rank's stages, by name. Files may have a tied weight's other name."""
    sources, ignored = dict(whole.all_tied_weights_keys), whole._keys_to_ignore_on_load_missing  # noqa: SLF001
    reads, missing = dict[str, _Read](), set[str]()
    for entry in held:
        source = sources.get(entry.name, entry.name)
        same = [entry.name, source, *(target for target, of in sources.items() if of == source)]
        name = next((name for name in same if name in conversions), None)
        if name is not None:
            reads[entry.name] = conversions[name], name
            shape, needed = list(conversions[name].shapes[name]), list(entry.value.shape)
            if shape != needed:
                raise PipelineError(f"{path} has {name} with shape {shape}, and stage {entry.stage} needs {needed}")
        elif isinstance(entry.value, nn.Parameter) or not any(re.search(each, entry.name) for each in ignored):
            missing.add(entry.name)
    if missing:
        raise PipelineError(f"{path} does not have {_listed(missing)} of {type(whole).__name__}")
    return reads


def _require_equal_ties(
    whole: Any, conversions: Mapping[str, _Conversion], held: Sequence[HeldTensor], path: Path
) -> None:
    """Refuse different values under two names of one weight."""
    for name in {entry.name for entry in held} & conversions.keys():
        source = whole.all_tied_weights_keys.get(name)
        if source in conversions:
            first, second = (conversions[each].run(whole, _Stored.read)[each] for each in (source, name))
            if not torch.equal(first, second):
                raise PipelineError(
                    f"{path} has other values for {source} and {name}, which {type(whole).__name__} ties: set "
                    "config.tie_word_embeddings = False before the model is made"
                )


def _materialize(stages: Mapping[int, nn.Module], device: torch.device | str | None, loaded: set[str]) -> None:
    """Give memory to tensors on the meta device, and compute the buffers among them that are not ``loaded``."""
    made = _give_memory(stages, device)
    for number, stage in stages.items():
        if made[number]:
            names = {entry.path for entry in held_tensors({number: stage}) if entry.name in loaded}
            tensors = (*stage.named_parameters(), *stage.named_buffers())
            compute_buffers(
                unwrapped(stage).pretrained, [x for name, x in tensors if name in names or name not in made[number]]
            )


def _give_memory(stages: Mapping[int, nn.Module], device: torch.device | str | None) -> dict[int, set[str]]:
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    with kept_ties(stages.values()):
        return {number: give_memory(stage, device) for number, stage in stages.items()}


def _fill(whole: Any, stages: Mapping[int, nn.Module], reads: Mapping[str, _Read]) -> None:
    """Write the stored values into the tensors of stages, one conversion after the other."""
    targets = dict[int, tuple[_Conversion, list[tuple[torch.Tensor, str]]]]()
    for entry in held_tensors(stages):
        if entry.name in reads:
            conversion, name = reads[entry.name]
            targets.setdefault(id(conversion), (conversion, []))[1].append((entry.value, name))
    for conversion, of_conversion in targets.values():
        made = conversion.run(whole, _Stored.read)
        for target, name in of_conversion:
            with torch.no_grad():
                _copy(made[name], target)
    require_computed_buffers(stages)


def _copy(value: torch.Tensor, target: torch.Tensor) -> None:
    if isinstance(target, DTensor):
        value = value.to(target.device, target.dtype)
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    local_part(target).copy_(local_part(value))
