"""The nodes of NeMo-RL's cluster that train (commit 7ea279a: nemo_rl/algorithms/grpo.py)."""

from typing import Final

from pipeproof.interop.importers.tools.job import Job
from pipeproof.interop.importers.tree import Tree

_RESOURCES: Final = "policy.generation.colocated.resources"
_TEACHERS: Final = "on_policy_distillation.non_colocated_teachers"


def training_processes(job: Job) -> int | None:
    """Return the processes that train the policy; None if the file does not have their number.

    Raises:
        PlanFileError: PP170, no node is left for the training.
    """
    tree = job.tree
    nodes, gpus = tree.number("cluster.num_nodes"), tree.number("cluster.gpus_per_node")
    if nodes is None or gpus is None:
        return None
    reward = _reward_model(tree)
    if nodes > 1:
        nodes -= reward[0]
    else:
        gpus -= reward[1]
    nodes -= _teacher_nodes(tree)
    if tree.value("policy.generation.colocated.enabled") is False:
        if nodes == 1:
            gpus -= tree.number(_RESOURCES, "gpus_per_node") or 0
        else:
            nodes -= tree.number(_RESOURCES, "num_nodes") or 0
    if nodes < 1 or gpus < 1:
        job.refuse(
            f"no process is left for training: {max(nodes, 0)} nodes with {max(gpus, 0)} GPUs after those that "
            "generate and score", job.place("cluster.num_nodes"), "raise `cluster.num_nodes`, or give `--world-size N`",
        )  # fmt: skip
    return nodes * gpus


def _reward_model(tree: Tree) -> tuple[int, int]:
    """Return the nodes, and the GPUs of a node, of a reward model that is an environment of the data."""
    names = [tree.value("data", part, "env_name") for part in ("", "train", "default", "validation")]
    resources = "env.reward_model.resources"
    if "reward_model" not in names:
        return 0, 0
    return tree.number(resources, "num_nodes") or 0, tree.number(resources, "gpus_per_node") or 0


def _teacher_nodes(tree: Tree) -> int:
    """Return the nodes of teachers that do not share those of the policy; one checkpoint is one teacher."""
    if tree.value(_TEACHERS, "enabled") is not True:
        return 0
    named = tree.section("on_policy_distillation.teacher_model_by_agent_name")
    teachers = {model.value: alias for alias, model in named.items()}
    default = tree.number(_TEACHERS, "default_teacher_cfg.num_nodes", default=1)
    own = (
        tree.number(_TEACHERS, "teacher_overrides", alias, "num_nodes", default=default) for alias in teachers.values()
    )
    return sum(number or 1 for number in own)
