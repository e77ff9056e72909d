"""One of two processes that rehearse a pipeline with the world that Paddle has on GPUs, here over gloo.

``python -m tests.exec.gloo_posts PLAN``, with Paddle's environment of the rank, writes its observations.
"""

import json
import os
import sys
from types import SimpleNamespace

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.paddle.runtime import start_paddle
from pipeproof.verify.subject import make_subject


def main(plan):
    start_paddle()
    from pipeproof.exec.rank.adapter import RankAdapter, RankProgram
    from pipeproof.exec.rank.paddle import nccl
    from pipeproof.exec.rank.paddle.arrays import PaddleArrays
    from pipeproof.exec.rehearse.rehearsal_framework import RehearsalFramework

    rank = int(os.environ["PADDLE_TRAINER_ID"])
    subject = make_subject(plan_from_dict(plan)).unfolded()
    graph = subject.graph
    world = nccl.connect(rank, graph.num_ranks, graph.channels, graph.groups, lambda what: None, computes=False)
    real = SimpleNamespace(arrays=PaddleArrays(), num_threads=lambda: 1)
    framework = RehearsalFramework(real, subject, rank)
    adapter = RankAdapter(subject.plan, rank, framework, framework.world(world), lambda step, op: None)
    program = RankProgram(graph, rank, adapter)
    for step in range(2):
        adapter.begin(step)
        program.run(step)
        world.barrier()
    world.channels.close()
    checked = framework.checked
    sys.stdout.write(json.dumps([checked.messages, checked.elements, checked.num_faults]) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
