"""Documentation of the 9xx codes: findings of runs, rehearsals and Fleet runs."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, RuleDoc

LOG_DIFFERS = RuleDoc(
    code="PP901",
    title="the executed operations differ from the verified graph",
    explanation=(
        "After a run the log of each rank (operations, communicators, element counts, dtypes) is compared with the "
        "verified graph, queue by queue. Rows that go to experts are compared with the counts that ranks exchanged. "
        "Between hosts, a receive must not end before its send is posted by more than the error of the clocks "
        "(validation/results/clocks.md). A difference means that the proof does not describe the execution: a bug of "
        "pipeproof's executor, or of a backend that reorders."
    ),
    wrong="graph: 1RECV_F0 1F0      log: 1F0 1RECV_F0",
    right="graph: 1RECV_F0 1F0      log: 1RECV_F0 1F0",
    kind=ExampleKind.OUTCOME,
)
DIED = RuleDoc(
    code="PP902",
    title="a worker died or raised",
    explanation=(
        "A worker process ended before its program. All others were stopped. The message names the rank, its current "
        "operation, the peer of that operation, and what the graph expects there."
    ),
    wrong="rank 1 was killed by SIGKILL at 0F2",
    right="every rank reaches the end of its program",
    kind=ExampleKind.OUTCOME,
)
HUNG = RuleDoc(
    code="PP903",
    title="a worker hangs",
    explanation=(
        "No rank has made progress within the watchdog's time. The verified graph shows which ranks only wait for "
        "others, and which rank the others wait for."
    ),
    wrong="rank 1 has been at 0F2 for 60 s",
    right="every operation ends within the watchdog's time (`--timeout`)",
    kind=ExampleKind.OUTCOME,
)
MISMATCH = RuleDoc(
    code="PP904",
    title="the run differs from the single-process reference",
    explanation=(
        "The unpartitioned model, run in one process with the same weights and data, has other bits in the loss or in "
        "a gradient than the distributed run. Where tensor or data parallelism adds in another order, the reference "
        "adds in that order too: equal bits can then be required."
    ),
    wrong="layer.0.attn.qkv.weight: md5 1f0c.. against the reference's 9ab2..",
    right="every MD5 equal",
    kind=ExampleKind.OUTCOME,
)
UNVERIFIED = RuleDoc(
    code="PP905",
    title="the plan was run without a certificate",
    severity="warning",
    explanation=(
        "The plan does not pass `check`, and `--unsafe` ran it without a certificate. The run proves nothing about the "
        "plan, and the exit status is not 0."
    ),
    wrong="pipeproof run --unsafe PLAN",
    right="pipeproof run PLAN",
    kind=ExampleKind.COMMAND,
)
BACKEND_MISSING = RuleDoc(
    code="PP906",
    title="the plan's backend is not installed, or this is not Linux",
    explanation=(
        "The framework that `run.backend` names cannot be imported by the Python that runs pipeproof. Or this is not "
        "Linux: ranks start on Linux only, and everything else works on macOS and Windows, too."
    ),
    wrong="pip install pipeproof",
    right="pip install 'pipeproof[cpu]'",
    kind=ExampleKind.COMMAND,
)
WORLD_SIZE = RuleDoc(
    code="PP907",
    title="the launcher does not fit the plan",
    explanation=(
        "Under a launcher such as `paddle.distributed.launch` or `srun` each process is one rank of the plan. The "
        "number of processes must be the product of the topology's sizes. `torchrun` only starts plans of "
        "the backend torch, and Paddle's launcher only plans of paddle. The launcher's variables must name a rank "
        "below the number of ranks, the rank on its host, and the address of rank 0 (docs/running.md lists them)."
    ),
    wrong="python -m paddle.distributed.launch --nproc_per_node 2 ..   # topology: {pp: 2, tp: 2}",
    right="python -m paddle.distributed.launch --nproc_per_node 4 ..   # topology: {pp: 2, tp: 2}",
    kind=ExampleKind.COMMAND,
)

BEYOND_BOUND = RuleDoc(
    code="PP908",
    title="a gradient is farther from the plain unpartitioned model than rounding explains",
    explanation=(
        "In addition to the reference that adds in the plan's order, the plain unpartitioned model computes each step "
        "from the same weights. The distance has a stated first-order bound, which presumes layers that do not amplify "
        "relative errors. In the first step, from initial weights, a larger distance is an error. Later, when training "
        "may have made the model ill-conditioned, it is a warning."
    ),
    wrong="step 0, layer.0.attn.qkv.weight: 3e-2 from the unpartitioned model, the bound is 5e-5",
    right="step 0, layer.0.attn.qkv.weight: 4e-7 from the unpartitioned model, the bound is 5e-5",
    kind=ExampleKind.OUTCOME,
)

NOT_EXECUTED = RuleDoc(
    code="PP909",
    title="the executor does not support a feature of the plan yet",
    explanation=(
        "The plan is checked and simulated like any other. A run would train another model than the plan states, so it "
        "is refused."
    ),
    wrong="pipeproof run plan.yaml   # model: {moe: {dispatch_dtype: float8, ..}}",
    right="pipeproof check plan.yaml",
    kind=ExampleKind.COMMAND,
)

DEVICE_MISSING = RuleDoc(
    code="PP913",
    title="the plan's device is missing",
    explanation=(
        "With `run.device: gpu` each rank has its own GPU, or shares one with `--share-gpus`. There is no driver, the "
        "framework's build has no code for GPUs, or there are fewer GPUs than ranks. At the start of a run each rank "
        "computes a product of known matrices and ends with PP902 if it is wrong: a build without code for this type "
        "of GPU may fail silently. Such a build can still rehearse, which only copies and communicates."
    ),
    wrong="run: {backend: torch, device: gpu}   # on a machine without a GPU",
    right="run: {backend: torch, device: cpu}",
    kind=ExampleKind.COMMAND,
)

NOT_FINITE = RuleDoc(
    code="PP921",
    title="a loss or a gradient is not finite",
    explanation=(
        "A step computed NaN or infinity, and the run is stopped. The message names the first micro-batch with such a "
        "loss, the weights with such gradients, and whether the single-process reference has them too. If it does, the "
        "model diverges; if not, the plan's run is wrong. A run with `--unsafe` continues."
    ),
    wrong="step 3: the loss is not a number, on rank 1 first at 1F2",
    right="every loss and every gradient is finite",
    kind=ExampleKind.OUTCOME,
)

OUT_OF_MEMORY = RuleDoc(
    code="PP922",
    title="a worker ran out of memory",
    explanation=(
        "A framework could not allocate memory for an operation, on the GPU or the host. All workers were stopped. The "
        "message names the rank and the operation, the memory that the process held and the memory that it requested."
    ),
    wrong="rank 0 ran out of memory: its tensors held 138.1 GiB of the GPU, and it requested 2.00 GiB more, at 0F3",
    right="every rank has room for its peak (`pipeproof simulate PLAN --memory`)",
    kind=ExampleKind.OUTCOME,
)


NOT_TOGETHER = RuleDoc(
    code="PP947",
    title="the processes of a run do not belong together",
    explanation=(
        "Under a launcher all ranks of a rehearsal meet at the store of rank 0 before the first step. Each rank comes "
        "once, within the start-up time, with the same plan, options and version of pipeproof. A rank did not come, "
        "two processes came as one rank (two jobs at one address), or a host was started with another plan. Every rank "
        "that came ends with the same message."
    ),
    wrong="torchrun --nnodes 2 ..   # the plan files of the two hosts differ",
    right="torchrun --nnodes 2 ..   # one plan file",
    kind=ExampleKind.COMMAND,
)

RUN_CODES = (
    LOG_DIFFERS, DIED, HUNG, MISMATCH, UNVERIFIED, BACKEND_MISSING, WORLD_SIZE, BEYOND_BOUND, NOT_EXECUTED,
    DEVICE_MISSING, NOT_FINITE, OUT_OF_MEMORY, NOT_TOGETHER,
)  # fmt: skip


NOT_AS_SENT = RuleDoc(
    code="PP914",
    title="the elements that arrived are not the elements that were sent",
    explanation=(
        "In a rehearsal each element identifies the rank that made it, the operation and the index. A receive, a "
        "gather or another collective ended on a rank with other elements than the graph states: of another message, "
        "another rank or another step, moved, cut off, or never written. The finding names the operation, the first "
        "wrong range, and the elements found there. The graph is proved, so the fault is in its execution: an order of "
        "ranks, a launcher's environment, a backend, a link."
    ),
    wrong="rank 1, step 0, 1RECV_F1 over pp 0->1: elements 0..256 are elements 0..256 of 0SEND_F2 of rank 0",
    right="every range of every message has the elements that its sender put there",
    kind=ExampleKind.OUTCOME,
)
NOT_AS_PROMISED = RuleDoc(
    code="PP915",
    title="the tensor that arrived does not match the receiver's layout",
    explanation=(
        "Every message of a rehearsal has the elements of its sender, but together they are not the tensor that the "
        "receiver's layout states. This is a fault of the plan, which `check` predicts (PP201): it occurs only for a "
        "plan that does not pass and is rehearsed with `--unsafe`. The witness has the same ranges, as they were "
        "found."
    ),
    wrong="pipeproof rehearse --unsafe PLAN   # topology: {pp: 2, tp: 2, sequence_parallel: true}, transport: partial",
    right="pipeproof rehearse PLAN   # topology: {pp: 2, tp: 2, sequence_parallel: true}, transport: full",
    kind=ExampleKind.OUTCOME,
)
REHEARSAL_CODES = (NOT_AS_SENT, NOT_AS_PROMISED)


SPLIT_NODE = RuleDoc(
    code="PP950",
    title="ranks that the plan puts on one node are on several",
    severity="warning",
    explanation=(
        "The plan puts consecutive ranks on one host. The launcher numbered them otherwise, so a group of an axis is "
        "on several hosts that would be on one. All values are correct, and the step is slower than predicted. The "
        "finding names the axis, two ranks and their hosts. A rehearsal on several hosts reports it."
    ),
    wrong="srun --nodes 2 --ntasks-per-node 8 --distribution=cyclic ..   # topology: {tp: 8, pp: 2}",
    right="srun --nodes 2 --ntasks-per-node 8 --distribution=block ..    # topology: {tp: 8, pp: 2}",
    kind=ExampleKind.COMMAND,
)
PLACEMENT_CODES = (SPLIT_NODE,)
