"""Places where a part of the model is written, each with a way to leave the part out there.

A mutant leaves a part out by letting the code of the place see the model with the part's default, a Llama's, or by
dropping the parameter or the row that only the part needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType

import pytest

from pipeproof.specs.model import ModelSpec
from pipeproof.state.names.part_tables import PartTensors
from tests.describe.forgotten import (
    PARTS,
    check_digest,
    check_importers,
    check_names,
    check_parameters,
    check_rotation,
    check_settings,
    check_values,
)

DEFAULTS = {part: ModelSpec.model_fields[part].default for part in PARTS}
DESCRIBE, REFERENCE, IMPORTERS = "stages.describe", "stages.reference", "interop.importers"


@dataclass(frozen=True)
class Mutant:
    """``leave_out`` patches a place; ``check`` of ``subject`` must fail then, and name the place."""

    leave_out: Callable[[pytest.MonkeyPatch, str], None]
    check: Callable[..., None]
    subject: str = ""


def _module(name):
    return import_module(f"pipeproof.{name}")


def _without(model, part):
    return model.model_copy(update={part: DEFAULTS[part]})


def _plan_without(plan, part):
    return plan.model_copy(update={"model": _without(plan.gpt, part)})


def seeing_none(*functions):
    """Let functions, each ``module:name``, that take a model first see it without the part."""

    def leave_out(patch, part):
        for function in functions:
            module, _, name = function.partition(":")
            right = getattr(_module(module), name)
            patch.setattr(_module(module), name, lambda model, *args, right=right, **options: right(
                _without(model, part), *args, **options))  # fmt: skip

    return leave_out


def made_without(cls, position=0):
    """Let the objects of a class, ``module:name``, see a plan without the part: their argument at ``position``."""
    module, _, name = cls.partition(":")

    def leave_out(patch, part):
        right = getattr(_module(module), name).__init__

        def init(self, *args):
            right(self, *args[:position], _plan_without(args[position], part), *args[position + 1 :])

        patch.setattr(getattr(_module(module), name), "__init__", init)

    return leave_out


def later_without(cls, attribute, *methods):
    """Let methods of a class, ``module:name``, see a plan without the part in an attribute."""
    module, _, name = cls.partition(":")

    def leave_out(patch, part):
        for method in methods:
            right = getattr(getattr(_module(module), name), method)

            def call(self, *args, right=right):
                plan = getattr(self, attribute)
                setattr(self, attribute, _plan_without(plan, part))
                try:
                    return right(self, *args)
                finally:
                    setattr(self, attribute, plan)

            patch.setattr(getattr(_module(module), name), method, call)

    return leave_out


def replaced(target, value):
    """Replace a function or a method, ``module:name`` or ``module:name.name``."""
    module, _, name = target.partition(":")

    def leave_out(patch, part):
        *outer, last = name.split(".")
        holder = getattr(_module(module), outer[0]) if outer else _module(module)
        patch.setattr(holder, last, value)

    return leave_out


def dropping_biases(cls, method):
    """Let a norm drop its bias."""
    module, _, name = cls.partition(":")

    def leave_out(patch, part):
        right = getattr(getattr(_module(module), name), method)
        patch.setattr(getattr(_module(module), name), method, lambda self, x, weight, *_: right(self, x, weight))

    return leave_out


def no_longer_added(patch, part):
    module = _module("specs.model")
    patch.setattr(module, "PART_KEYS", tuple(key for key in module.PART_KEYS if key != part))


def no_tensors(patch, part):
    patch.setitem(_module("state.names.part_tables").TENSORS, "megatron", PartTensors({}, {}))


def no_models(patch, part):
    module = _module("state.names.part_tables")
    rows = (replace(row, parts={k: v for k, v in row.parts.items() if k != part}) for row in module._TRANSFORMERS)
    patch.setattr(module, "_TRANSFORMERS", tuple(rows))


def no_settings(patch, part):
    module = _module("state.names.part_tables")
    rows = (replace(row, settings=lambda model: {}) for row in module._TRANSFORMERS)
    patch.setattr(module, "_TRANSFORMERS", tuple(rows))


def no_types(patch, part):
    module = _module("interop.importers.model_parts")
    kept = {kind: {k: v for k, v in parts.items() if k != part} for kind, parts in module._PARTS.items()}
    patch.setattr(module, "_PARTS", MappingProxyType(kept))


def _importers(part):
    reader = {"qk_norm": "_norms", "norm": "_norms", "mlp": "_activation", "biases": "_biases"}.get(part, "_positions")
    configuration = {"mlp": "_take_activation", "qk_norm": "_take_switches", "biases": "_take_switches"}.get(part)
    flags = replaced(f"interop.importers.megatron.model_flags:{reader}", lambda *args, **options: None)
    mutants = [flags]
    if part != "mlp":
        mutants.append(no_types)
    if configuration is not None:
        mutants.append(replaced(f"interop.importers.model_parts:{configuration}", lambda *args: None))
    return tuple(Mutant(mutant, check_importers) for mutant in mutants)


def _names(part):
    named = {"qk_norm": "Qwen3", "mlp": "StarCoder2", "biases": "Llama with biases", "norm": "StableLM"}
    settings = {"qk_norm": "GLM-4", "mlp": "GPT-2", "biases": "StarCoder2", "norm": "StableLM"}
    kind = named.get(part, "GPT-2")
    mutants = [Mutant(no_models, check_names, kind), Mutant(no_models, check_settings, kind)]
    mutants.append(Mutant(no_settings, check_settings, settings.get(part, "GPT-2")))
    if part not in ("biases", "norm"):
        mutants.append(Mutant(no_tensors, check_names, kind))
    return tuple(mutants)


def _values(leave_out, part):
    return (Mutant(leave_out, check_values, part),)


_LAYERS = f"{DESCRIBE}.layers.layer_operations"
_STAGE = "stages.common.stage:Stage"
_ON_TORCH = f"{REFERENCE}.torch_model:TorchUnpartitionedModel"


def _places(part: str) -> dict[str, tuple[Mutant, ...]]:
    """Places that every part has."""
    return {
        "specs/model.py": (Mutant(no_longer_added, check_digest, part),),
        "stages/describe/typed_gpt.py": (
            Mutant(made_without(f"{DESCRIBE}.typed_gpt:_GptWriter"), check_parameters, part),
        ),
        "stages/reference/layer_math.py": _values(made_without(f"{REFERENCE}.layer_math:LayerMath"), part),
        "stages/reference/torch_model.py": _values(later_without(_ON_TORCH, "plan", "losses"), part),
        "state/names/part_tables.py": _names(part),
        "interop/importers/model_parts.py": _importers(part),
    }


def _described(part: str, *functions: str) -> tuple[Mutant, ...]:
    return (Mutant(seeing_none(*functions), check_parameters, part),)


def _activation(framework: str) -> tuple[Mutant, ...]:
    return _values(seeing_none(f"stages.{framework}.stage:mlp_activation"), "mlp")


def _norm_of(framework: str, method: str) -> tuple[Mutant, ...]:
    return _values(dropping_biases(f"stages.{framework}.weights:SplitWeights", method), "norm")


PLACES: Mapping[str, Mapping[str, tuple[Mutant, ...]]] = {
    "qk_norm": {
        **_places("qk_norm"),
        "stages/describe/layers/attention.py": _described("qk_norm", f"{_LAYERS}:attention"),
        "stages/common/stage.py": _values(later_without(_STAGE, "_plan", "_grouped_heads"), "qk_norm"),
    },
    "mlp": {
        **_places("mlp"),
        "stages/describe/layers/mlp.py": _described("mlp", f"{_LAYERS}:mlp"),
        "stages/paddle/functional.py": _activation("paddle"),
        "stages/torch/functional.py": _activation("torch"),
    },
    "biases": {
        **{place: mutants for place, mutants in _places("biases").items() if "reference/" not in place},
        "stages/describe/layers/layer_operations.py": _described("biases", f"{_LAYERS}:with_biases"),
        "stages/common/stage.py": _values(replaced(f"{_STAGE}._biased", lambda self, x, biases: x), "biases"),
        "stages/reference/ordered_layers.py": _values(
            replaced(f"{REFERENCE}.ordered_layers:OrderedLayers.biased", lambda self, x, name: x), "biases"
        ),
        "stages/reference/torch_reference_weights.py": _values(
            replaced(
                f"{REFERENCE}.torch_reference_weights:WholeWeights.linear",
                lambda self, x, name: self.product(x, f"{name}.weight"),
            ),
            "biases",
        ),
    },
    "norm": {
        **_places("norm"),
        "stages/describe/layers/operations.py": _described("norm", f"{_LAYERS}:norm"),
        "stages/paddle/weights.py": _norm_of("paddle", "norm_each"),
        "stages/torch/weights.py": _norm_of("torch", "norm"),
    },
    "positions": {
        **_places("positions"),
        "stages/describe/layers/layer_operations.py": _described("positions", f"{_LAYERS}:embedding"),
        "stages/describe/layers/attention.py": (
            Mutant(seeing_none(f"{_LAYERS}:attention"), check_rotation, "positions"),
        ),
        "stages/common/embedding_and_head.py": _values(
            made_without("stages.common.embedding_and_head:Positions", 1), "positions"
        ),
    },
}
"""By part and place, relative to the package: the mutants that leave the part out there."""
