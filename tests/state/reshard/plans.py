"""One training on several topologies, and states of it by the command."""

import functools
from pathlib import Path

import yaml

from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.subject import make_subject
from tests.cli.commands import printed
from tests.plans import plan_dict
from tests.state.tiny import write_state

MOE = {"num_experts": 12, "top_k": 2, "ffn_size": 8, "aux_loss": 0.1, "expert_bias_rate": 0.01}
"""More than ten experts: their order as strings differs from the order of their numbers."""
DENSE = {"num_layers": 4, "hidden_size": 8, "ffn_size": 16, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 16}
WITH_ALL = {**DENSE, "moe": MOE, "tied_embedding": True, "mtp": {"num_modules": 1}}
TOPOLOGIES = {
    "one": {"topology": {"pp": 1}},
    "dp2": {"topology": {"pp": 1, "dp": 2}, "num": 2},
    "sd4": {"topology": {"pp": 1, "dp": 4}, "num": 1, "memory": {"shard_optimizer": "dp"}},
    "tp2": {"topology": {"pp": 1, "tp": 2}},
    "tp2_pp2": {"topology": {"pp": 2, "tp": 2}},
    "vpp": {"topology": {"pp": 2}, "schedule": {"kind": "interleaved", "num_chunks": 2}},
    "pp2_sd2": {"topology": {"pp": 2, "dp": 2}, "num": 2, "memory": {"shard_optimizer": "dp"}},
    "ep2_tp2": {"topology": {"pp": 1, "ep": 2, "tp": 2}, "num": 2},
    "ep2_pp2": {"topology": {"pp": 2, "ep": 2}, "num": 2},
    "tp2_sp_pp2": {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}},
    "pp4": {"topology": {"pp": 4}},
    "sd2_tp2(ep2)": {
        "topology": {"pp": 1, "dp": 2, "tp": 2, "sequence_parallel": True, "experts_over_tp": True},
        "num": 2,
        "memory": {"shard_optimizer": "dp"},
    },
}


def write_plan(path: Path, topology: str, model=None, backend="paddle", micro=None, **run) -> Path:
    """The plan of a topology; every topology trains on four micro-batches a step, or ``micro`` on each rank."""
    asked = TOPOLOGIES[topology]
    num = micro or asked.get("num", 4)
    plan = plan_dict(
        topology=asked["topology"],
        schedule={
            "num_micro_batches": num,
            "micro_batch_size": 1,
            **asked.get("schedule", {}),
        },
        memory=asked.get("memory", {}),
        run={"backend": backend, "steps": 9, "optimizer": "adamw", **run},
    )
    plan["model"] = {"kind": "gpt", "seq_length": 4, **(WITH_ALL if model is None else model)}
    path.write_text(yaml.safe_dump(plan))
    return path


def subject_of(path: Path):
    return make_subject(load_plan(path))


def state_of(path: Path, root: Path, steps_done=3) -> Path:
    """The state that runs of a plan save, whose values do not depend on its topology."""
    return write_state(subject_of(path), root, steps_done)


reshard = functools.partial(printed, "state", "reshard")
"""Output of the command; options ``status``."""


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.safetensors"))}
