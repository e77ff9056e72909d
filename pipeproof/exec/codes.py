"""9xx: what can be wrong with a run, documented."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc

LOG_DIFFERS = RuleDoc(
    code="PP901",
    title="the executed operations differ from the verified graph",
    severity="error",
    explanation=(
        "After a run the log of what each rank did (operations, communicators, element counts, dtypes) is "
        "compared with the graph that was verified, queue by queue; rows that go to experts are compared with what "
        "ranks announced to each other. A difference means that the proof does not "
        "speak of what ran: a bug of pipeproof's executor, or of a backend that reorders."
    ),
    wrong="graph: 1RECV_F0 1F0      log: 1F0 1RECV_F0",
    right="graph: 1RECV_F0 1F0      log: 1RECV_F0 1F0",
    kind=ExampleKind.OUTCOME,
)
DIED = RuleDoc(
    code="PP902",
    title="a worker died or raised",
    severity="error",
    explanation=(
        "A worker process ended before its program did. All others were stopped. The message names the rank, "
        "the operation it was at, the peer of that operation, and what the graph expected there."
    ),
    wrong="rank 1 was killed by SIGKILL at 0F2",
    right="every rank comes to the end of its program",
    kind=ExampleKind.OUTCOME,
)
HUNG = RuleDoc(
    code="PP903",
    title="a worker hangs",
    severity="error",
    explanation=(
        "No rank has made progress within the watchdog's time. The ranks that only wait for others are told "
        "apart from the one that the others wait for, by the verified graph."
    ),
    wrong="rank 1 has been at 0F2 for 60 s",
    right="every operation ends within the watchdog's time (`--timeout`)",
    kind=ExampleKind.OUTCOME,
)
MISMATCH = RuleDoc(
    code="PP904",
    title="the run differs from the single-process reference",
    severity="error",
    explanation=(
        "The same weights and data, run in one uncut process, give other bits for the loss or a gradient than "
        "the distributed run. Where tensor or data parallelism adds in another order, the reference adds in that "
        "order too, so that equal bits can be asked for."
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
        "The plan does not pass `check`; `--unsafe` ran it all the same. Whatever the run shows, the plan is not "
        "proved, and the exit status is not 0."
    ),
    wrong="pipeproof run --unsafe PLAN",
    right="pipeproof run PLAN",
    kind=ExampleKind.COMMAND,
)
BACKEND_MISSING = RuleDoc(
    code="PP906",
    title="the plan's backend is not installed",
    severity="error",
    explanation="The framework that `run.backend` names cannot be imported by the Python that runs pipeproof.",
    wrong="pip install pipeproof",
    right="pip install 'pipeproof[cpu]'",
    kind=ExampleKind.COMMAND,
)
WORLD_SIZE = RuleDoc(
    code="PP907",
    title="a launcher started other processes than the plan has ranks",
    severity="error",
    explanation=(
        "Under a launcher such as `paddle.distributed.launch` each process is one rank of the plan, so there must "
        "be as many as the product of the topology's sizes, and it must be the launcher of the plan's backend: "
        "`torchrun` for torch."
    ),
    wrong="python -m paddle.distributed.launch --nproc_per_node 2 ..   # topology: {pp: 2, tp: 2}",
    right="python -m paddle.distributed.launch --nproc_per_node 4 ..   # topology: {pp: 2, tp: 2}",
    kind=ExampleKind.COMMAND,
)

BEYOND_BOUND = RuleDoc(
    code="PP908",
    title="a gradient is farther from the plain uncut model than rounding explains",
    severity="error",
    explanation=(
        "Besides the reference that adds in the plan's order, each step is taken by the plain uncut model from the "
        "same weights. The distance has a stated first-order bound, which presumes layers that do not amplify "
        "relative errors. In the first step, from initial weights, going beyond it is an error; later, when "
        "training may have made the model ill-conditioned, it is a warning."
    ),
    wrong="step 0, layer.0.attn.qkv.weight: 3e-2 from the uncut model, the bound is 5e-5",
    right="step 0, layer.0.attn.qkv.weight: 4e-7 from the uncut model, the bound is 5e-5",
    kind=ExampleKind.OUTCOME,
)

NOT_CARRIED_OUT = RuleDoc(
    code="PP909",
    title="the plan asks for what the executor does not carry out yet",
    severity="error",
    explanation=(
        "Such a plan is checked and simulated like any other; running it would train something else than it says, "
        "so it is refused."
    ),
    wrong="pipeproof run plan.yaml   # model: {moe: {dispatch_dtype: float8, ..}}",
    right="pipeproof check plan.yaml",
    kind=ExampleKind.COMMAND,
)

DEVICE_MISSING = RuleDoc(
    code="PP913",
    title="the plan's device is not there",
    severity="error",
    explanation=(
        "With `run.device: gpu` each rank has a GPU of its own, or, with `--share-gpus`, its share of one. There is no "
        "driver, the framework's build has no code for GPUs, or there are fewer of them than ranks. Each rank of a run "
        "then computes a product of known matrices before anything else, and ends with PP902 where it is wrong: a "
        "build without code for the very GPU may do nothing, and say nothing. Such a build can still rehearse, which "
        "only copies and communicates."
    ),
    wrong="run: {backend: torch, device: gpu}   # on a machine without a GPU",
    right="run: {backend: torch, device: cpu}",
    kind=ExampleKind.COMMAND,
)

NOT_FINITE = RuleDoc(
    code="PP921",
    title="a loss or a gradient is no number",
    severity="error",
    explanation=(
        "A step came to NaN or infinity. The run is stopped, for there is nothing to train on with. The message names "
        "the first micro-batch whose loss it is, the weights, and whether the single-process reference has it, too: "
        "then the model diverges, else the plan's run is wrong. A run with `--unsafe` goes on."
    ),
    wrong="step 3: the loss is not a number, on rank 1 first at 1F2",
    right="every loss and every gradient is finite",
    kind=ExampleKind.OUTCOME,
)

OUT_OF_MEMORY = RuleDoc(
    code="PP922",
    title="a worker ran out of memory",
    severity="error",
    explanation=(
        "A framework could not allocate what an operation needs, on the GPU or the host. All workers were stopped. The "
        "message names the rank and the operation, what the process held and what it asked for."
    ),
    wrong="rank 0 ran out of memory: its tensors held 138.1 GiB of the GPU, and 2.00 GiB more were asked for, at 0F3",
    right="every rank has room for its peak (`pipeproof simulate PLAN --memory`)",
    kind=ExampleKind.OUTCOME,
)

RUN_CODES = (
    LOG_DIFFERS, DIED, HUNG, MISMATCH, UNVERIFIED, BACKEND_MISSING, WORLD_SIZE, BEYOND_BOUND, NOT_CARRIED_OUT,
    DEVICE_MISSING, NOT_FINITE, OUT_OF_MEMORY,
)  # fmt: skip
