"""Plans of the custom layers in ``files`` and of the examples, declared as ``pipeproof import layers`` would."""

from pathlib import Path

from pipeproof.specs.load_plan import plan_from_dict

FILES = Path(__file__).parent / "files"
EXAMPLES = Path(__file__).parents[2] / "examples" / "custom_layers"


def own_dict(build, rows, layers=({"name": "any"},), **sections):
    """A plan of a file's layers; ``build`` is one of these, or any ``FILE.py:FUNCTION``."""
    if ":" not in build:
        build = f"{(EXAMPLES if (EXAMPLES / build).exists() else FILES) / build}:build"
    plan = {
        "pipeproof": 1,
        "model": {"kind": "layers", "build": build, "layers": list(layers)},
        "topology": {"pp": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": rows},
        "loss": {"normalization": "mean_of_micro_batches"},
    }
    for name, value in sections.items():
        plan.setdefault(name, {})
        plan[name] = {**plan[name], **value} if isinstance(value, dict) else value
    return plan


def described(build, rows, **run):
    """The declarations of a file's layers."""
    from pipeproof.stages.custom.built_layers import BuiltModel
    from pipeproof.stages.custom.declaration import declaration

    spec = plan_from_dict(own_dict(build, rows, topology={"pp": 1}, run=run)).spec
    return declaration(spec, BuiltModel(spec))


def own_plan(build, rows, **sections):
    """The loaded plan of a file's layers."""
    layers = described(build, rows, **sections.get("run", {}))
    return plan_from_dict(own_dict(build, rows, layers, **sections))
