"""Plans of custom layers whose states the tests save: some of no file, and those of ``files/drift.py``."""

import functools

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import make_subject
from tests.custom.plans import described, own_dict

SHARDED = {"shard_optimizer": "dp"}
TWO = {"num_micro_batches": 2}
CHUNKS = {"kind": "interleaved", "num_chunks": 2}
LAYERS = [
    {"name": "stem", "kind": "Stem", "out": [{"shape": ["b", 4]}], "parameters": [{"name": "weight", "shape": [3, 4]}]},
    {"name": "act", "kind": "relu", "out": [{"shape": ["b", 4]}]},
    {"name": "norm.2", "kind": "Norm", "out": [{"shape": ["b", 4]}],
     "parameters": [{"name": "scale", "shape": [5]}, {"name": "shift", "shape": [7, 3]}],
     "buffers": [{"name": "mean", "shape": [4]}, {"name": "count", "shape": [], "dtype": "int64"}]},
    {"name": "optimizer", "kind": "Inner", "out": [{"shape": ["b", 4]}],
     "parameters": [{"name": "moment1", "shape": [2, 2]}]},
    {"name": "head", "kind": "Head", "parameters": [{"name": "bias", "shape": [3]}], "borrows": ["stem.weight"]},
]  # fmt: skip


def made(layers, build="nowhere.py:build", steps=4, **sections):
    sections["run"] = {"optimizer": "adamw", "steps": steps, **sections.get("run", {})}
    return make_subject(plan_from_dict(own_dict(build, 4, layers, **sections)))


@functools.cache
def layers_of(build):
    return described(build, 4)


def drift(steps=4, **sections):
    return made(layers_of("drift.py"), "drift.py", steps, **sections)
