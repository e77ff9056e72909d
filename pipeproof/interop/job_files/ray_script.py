"""Python script for ``ray job submit``: one actor per rank in a placement group with one bundle per host."""

from __future__ import annotations

from pipeproof.interop.job_files.job import Job, JobFile, Placeholder, header, python_words

_ADDRESS = Placeholder("RAY_ADDRESS", "address of the cluster, such as http://HOST:8265; in the command above")

_CONSTANTS = """
import os
import socket
import subprocess
import sys
import time

NUM_HOSTS = {num_hosts}
RANKS_PER_HOST = {ranks_per_host}
GPUS_PER_RANK = {gpus_per_rank}
STEPS = (
    {rehearsal!r},
    {training!r},
)
"""
_RANK = '''

class Rank:
    """The process of one rank, on the host of its bundle."""

    def describe(self):
        """Return the address of the host, two free ports, and the GPUs of this actor."""
        import ray

        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            second.bind(("", 0))
            ports = first.getsockname()[1], second.getsockname()[1]
        return ray.util.get_node_ip_address(), ports, ray.get_runtime_context().get_accelerator_ids().get("GPU", [])

    def start(self, words, environment):
        """Start the process."""
        self.process = subprocess.Popen([sys.executable, *words], env={**os.environ, **environment})

    def status(self):
        """Return the exit status, None while the process runs."""
        return self.process.poll()

    def stop(self):
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def gpus_of_host(host, described):
    """Return the GPUs of all ranks of a host."""
    neighbours = described[host * RANKS_PER_HOST : (host + 1) * RANKS_PER_HOST]
    return ",".join(gpu for _, _, gpus in neighbours for gpu in gpus)

'''
_ENVIRONMENTS = {
    "torch": '''
def environment(rank, described):
    """Return the variables that torchrun would set, and all GPUs of the host, of which LOCAL_RANK is the index."""
    host, local_rank = divmod(rank, RANKS_PER_HOST)
    address, (port, _), _ = described[0]
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(described)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(RANKS_PER_HOST),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    if GPUS_PER_RANK:
        variables["CUDA_VISIBLE_DEVICES"] = gpus_of_host(host, described)
    return variables
''',
    "paddle": '''
def environment(rank, described):
    """Return the variables that Paddle's launcher would set, and all GPUs of the host, of which the rank has one."""
    host, local_rank = divmod(rank, RANKS_PER_HOST)
    endpoints = [f"{address}:{port}" for address, (_, port), _ in described]
    address, (port, _), _ = described[0]
    variables = {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(described)),
        "PADDLE_LOCAL_RANK": str(local_rank),
        "PADDLE_LOCAL_SIZE": str(RANKS_PER_HOST),
        "PADDLE_MASTER": f"{address}:{port}",
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_DISTRI_BACKEND": "nccl" if GPUS_PER_RANK else "gloo",
    }
    if GPUS_PER_RANK:
        variables["CUDA_VISIBLE_DEVICES"] = gpus_of_host(host, described)
        variables["FLAGS_selected_gpus"] = str(local_rank)
    return variables
''',
}
_MAIN = '''

def run_step(ray, ranks, words):
    """Run one step on all ranks; return 0, or the exit status of the first rank that failed, and end the others."""
    described = ray.get([rank.describe.remote() for rank in ranks])
    ray.get([actor.start.remote(words, environment(rank, described)) for rank, actor in enumerate(ranks)])
    while True:
        statuses = ray.get([rank.status.remote() for rank in ranks])
        failed = [status for status in statuses if status]
        if failed:
            ray.get([rank.stop.remote() for rank in ranks])
            return failed[0]
        if None not in statuses:
            return 0
        time.sleep(1.0)


def main():
    """Reserve the hosts, rehearse, train; return the exit status of the job."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init()
    bundle = {"CPU": RANKS_PER_HOST, "GPU": RANKS_PER_HOST * GPUS_PER_RANK}
    group = placement_group([{name: n for name, n in bundle.items() if n}] * NUM_HOSTS, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    actor = ray.remote(num_cpus=1, num_gpus=GPUS_PER_RANK)(Rank)
    ranks = []
    for rank in range(NUM_HOSTS * RANKS_PER_HOST):
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=rank // RANKS_PER_HOST
        )
        ranks.append(actor.options(scheduling_strategy=strategy).remote())
    for words in STEPS:
        status = run_step(ray, ranks, words)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
'''


def ray_script(job: Job) -> JobFile:
    """Script that the entry point of a Ray job runs; it imports Ray only in ``main`` and in actors."""
    start = f"RAY_ADDRESS={_ADDRESS} ray job submit --working-dir . -- python FILE"
    constants = _CONSTANTS.format(
        num_hosts=job.num_hosts,
        ranks_per_host=job.ranks_per_host,
        gpus_per_rank=int(job.on_gpus),
        rehearsal=list(python_words(job.rehearsal)),
        training=list(python_words(job.training)),
    )
    return JobFile(
        header(job, start, (_ADDRESS,)) + constants + _RANK + _ENVIRONMENTS[job.backend] + _MAIN, (_ADDRESS,)
    )
