"""Manifests for Kubernetes: a JobSet, and a TrainJob of Kubeflow; one pod per host starts the ranks of its host."""

from __future__ import annotations

from typing import Any

import yaml

from pipeproof.interop.job_files.host_launchers import host_commands
from pipeproof.interop.job_files.job import HOST_0_PORT, IMAGE, WORK_DIR, Job, JobFile, Placeholder, header

_PLACEHOLDERS = (IMAGE, WORK_DIR)
_GPU = "nvidia.com/gpu"
_RESOLVE = """\
# Paddle's launcher needs the address of host 0, which has a name as soon as its pod exists.
HOST_0_NAME="$HOST_0"
until HOST_0="$(getent ahostsv4 "$HOST_0_NAME" | awk 'NR == 1 {print $1}')" && [ -n "$HOST_0" ]; do
    sleep 1
done"""


_NODE: dict[str, Any] = {"name": "PIPEPROOF_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
"""The host of a pod, for the placement that a rehearsal reports; no field has the labels of the node, as its rack."""


class _ManifestDumper(yaml.SafeDumper):
    """Writes scripts as blocks, and a placeholder once, at its first place, with an alias at the others."""

    def ignore_aliases(self, data: Any) -> bool:
        return not isinstance(data, Placeholder)

    def generate_anchor(self, node: yaml.Node) -> str:
        return str(node.value).removeprefix("FILL_IN_").lower()


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style=style)


_ManifestDumper.add_representer(str, _represent_text)
_ManifestDumper.add_representer(Placeholder, _represent_text)


def _manifest(job: Job, content: dict[str, Any]) -> JobFile:
    text = yaml.dump(content, Dumper=_ManifestDumper, sort_keys=False, width=1000, allow_unicode=True)
    return JobFile(header(job, "kubectl apply -f FILE", _PLACEHOLDERS) + "\n" + text, _PLACEHOLDERS)


def _metadata(job: Job) -> dict[str, Any]:
    """Metadata whose annotations have the values to fill in; the rest of the manifest refers to them."""
    return {"name": job.name, "annotations": {"fill-in-image": IMAGE, "fill-in-work-dir": WORK_DIR}}


def _script(job: Job, host: str, *lines: str) -> str:
    """Shell script of a pod, whose variable ``host`` is the number of its host; ``lines`` set ``HOST_0``."""
    parts = ["set -euo pipefail", 'cd "$WORK_DIR"']
    if job.num_hosts > 1:
        parts += [*lines, *([_RESOLVE] if job.backend == "paddle" else [])]
    return "\n".join([*parts, host_commands(job, f'"${host}"')])


def jobset(job: Job) -> JobFile:
    """JobSet with one indexed Job of one pod per host, in a headless service of the JobSet's name."""
    environment: list[dict[str, Any]] = [{"name": "WORK_DIR", "value": WORK_DIR}]
    if job.num_hosts > 1:
        environment += [
            {"name": "HOST_0", "value": f"{job.name}-hosts-0-0.{job.name}"},
            {"name": "HOST_0_PORT", "value": str(HOST_0_PORT)},
            _NODE,
        ]
    container: dict[str, Any] = {
        "name": "ranks",
        "image": IMAGE,
        "env": environment,
        "command": ["bash", "-c", _script(job, "JOB_COMPLETION_INDEX")],
    }
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    if job.on_gpus:
        container["resources"] = {"limits": {_GPU: job.ranks_per_host}}
        # NCCL connects the ranks of a pod by shared memory, of which a container has 64 MiB by default
        container["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108 - no temporary file
        pod["volumes"] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    hosts = {
        "completionMode": "Indexed",
        "parallelism": job.num_hosts,
        "completions": job.num_hosts,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": hosts}}],
    }
    content = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _metadata(job), "spec": spec}
    return _manifest(job, content)


def trainjob(job: Job) -> JobFile:
    """TrainJob on the runtime that Kubeflow installs for torchrun; its variables serve Paddle's launcher, too."""
    host_0 = 'HOST_0="$PET_MASTER_ADDR" HOST_0_PORT="$PET_MASTER_PORT"'
    trainer: dict[str, Any] = {
        "image": IMAGE,
        "env": [{"name": "WORK_DIR", "value": WORK_DIR}, *([_NODE] if job.num_hosts > 1 else [])],
        "command": ["bash", "-c", _script(job, "PET_NODE_RANK", host_0)],
        "numNodes": job.num_hosts,
        "numProcPerNode": job.ranks_per_host,
    }
    if job.on_gpus:
        trainer["resourcesPerNode"] = {"limits": {_GPU: job.ranks_per_host}}
    content = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job),
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
    }
    return _manifest(job, content)
