"""Bad inputs and failures of ``Pipeline`` that all ranks survive: each rank prints its result, one JSON line a case.

Arguments: names of cases; none: all. Every case makes a pipeline of its own in the same two processes.
"""

import json
import os
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import nn

from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.exec.train import train_rank
from pipeproof.exec.train.torch.model_stages import ModelStages
from pipeproof.torch import Pipeline, PipelineError, PlanRefused

NUM, ROWS, WIDTH = 4, 2, 8
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


class Block(nn.Module):
    """Two layers; ``fault`` is called with the number of its forward (the shape inference is number 0)."""

    def __init__(self, width=WIDTH, fault=None):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, width))
        self.fault, self.calls = fault, 0

    def forward(self, x):
        self.calls += 1
        x = self.inner(x)
        return x if self.fault is None else self.fault(self.calls - 1, x)


def example():
    return (torch.zeros(ROWS, WIDTH),)


def data(rank):
    torch.manual_seed(3)
    x = torch.randn(NUM * ROWS, WIDTH)
    return {"args": (x,) if rank == 0 else (), "target": x if rank == 1 else None}


def pipeline(stages=None, **options):
    stages = {dist.get_rank(): Block()} if stages is None else stages
    usual = {"num_micro_batches": NUM, "loss_fn": F.mse_loss, "example": example(), "timeout_s": 20.0}
    return Pipeline(stages, **{**usual, **options})


def step(pipe, **changes):
    given = {**data(pipe.rank), **changes}
    return pipe.step(*given["args"], target=given["target"])


def refused_step(pipe, **changes):
    """A step that is refused, and a right one after it."""
    try:
        step(pipe, **changes)
    except PipelineError:
        step(pipe)
        raise


def stages_of(rank, by_rank):
    return {number: Block() for number in by_rank[rank]}


def plan(**changes):
    """A plan of the blocks, with declared layers."""
    names = [f"inner.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
    parameters = [{"name": n, "shape": [WIDTH, WIDTH] if n.endswith("weight") else [WIDTH]} for n in names]
    out = {"out": [{"shape": ["b", WIDTH], "dtype": "float32"}]}
    layers = [
        {"name": f"stage.{n}", "kind": "Block", "parameters": parameters, **(out if not n else {})} for n in (0, 1)
    ]
    schedule = {"kind": "1f1b", "num_micro_batches": NUM, "micro_batch_size": ROWS}
    content = {
        "pipeproof": 1,
        "model": {"kind": "layers", "layers": layers},
        "topology": {"pp": 2},
        "schedule": schedule,
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = content
        for key in parents:
            section = section[int(key) if key.isdigit() else key]
        section[last] = value
    return content


def file_of(text):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", delete=False) as file:
        file.write(text)
    return file.name


# --- the start: stages and arguments ---


@case
def on_meta(rank):
    with torch.device("meta" if rank else "cpu"):
        block = Block()
    pipeline({rank: block})


@case
def buffer_without_values(rank):
    with torch.device("meta"):
        block = Block()
        block.register_buffer("frequencies", torch.arange(3.0), persistent=False)
    pipeline({rank: block.to_empty(device="cpu")})


@case
def on_meta_elsewhere(rank):
    stages = []
    for number in (0, 1):
        with torch.device("cpu" if number == rank else "meta"):
            stages.append(Block())
    step(pipeline(ModelStages(stages)))


@case
def shared_weight_is_not_tied(rank):
    stages = {n: Block() for n in ((0, 3) if rank == 0 else (1, 2))}
    if rank == 0:
        stages[3].inner[1].weight = stages[0].inner[0].weight
    pipeline(stages, schedule="zb_v")


@case
def group_without_this_rank(rank):
    group = dist.new_group([0])
    pipe = pipeline({0: Block()} if rank == 0 else {1: Block()}, group=group)
    assert pipe.num_ranks == 1


# --- the start: plans ---


WRONG = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1B1", "1F1"]]


@case
def plan_refused(rank):
    with pytest.raises(PlanRefused) as raised:
        pipeline(schedule=WRONG, num_micro_batches=2)
    assert [finding.code for finding in raised.value.findings] == ["PP123"]
    raise raised.value


@case
def unsafe(rank):
    """A plan that a rule refuses, and that runs: there is none for modules, so the rule is made up."""
    finding = Finding("PP999", Severity.ERROR, "made up", help="none")
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings(record=True) as caught:
        check = train_rank.check_subject
        patched.setattr(train_rank, "check_subject", lambda subject: replace(check(subject), findings=(finding,)))
        warnings.simplefilter("always")
        pipe = pipeline(unsafe=True)
        assert pipe.plan.certificate.verdict == "refused"
        step(pipe)
        pipe.eval_step(*data(rank)["args"])
    ours = [warning for warning in caught if "PP999" in str(warning.message)]
    assert {Path(warning.filename).name for warning in ours} <= {Path(__file__).name}
    if rank == 0:
        raise UserWarning(str(ours[0].message))
    assert not ours
    pipe.close()


# --- steps ---


def raising(at):
    def fault(call, x):
        if call == at:
            raise ValueError("no such expert")
        return x

    return fault


@case
def module_exits(rank):
    def fault(call, x):
        if call == 2:
            sys.exit("bad batch")
        return x

    step(pipeline({rank: Block(fault=fault if rank else None)}))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no gradient for this")


@case
def not_finite(rank):
    pipe = pipeline(check_finite=True)
    if rank == 0:
        pipe.stages[0].inner[1].weight.data[0, 0] = torch.inf
    step(pipe)


@case
def without_gradients(rank):
    with torch.no_grad():
        step(pipeline())


@case
def unfrozen(rank):
    pipe = pipeline({rank: Block().requires_grad_(False) if rank == 0 else Block()})
    pipe.stages[rank].requires_grad_(True)
    step(pipe)


@case
def parameters_replaced(rank):
    pipe = pipeline()
    if rank:
        pipe.stages[1].load_state_dict(pipe.stages[1].state_dict(), assign=True)
        pipe.stages[1].inner[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    step(pipe)


class Counted(Block):
    """Returns a buffer, which the next forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x, count=None):
        self.count += 1
        return super().forward(x), self.count


@case
def optimizer_in_hook(rank):
    block = Block()
    weight = block.inner[0].weight
    optimizer = torch.optim.SGD([weight], 0.1)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    step(pipeline({rank: block}))


@case
def step_after_failure(rank):
    pipe = pipeline({rank: Block(fault=raising(1) if rank else None)})
    try:
        step(pipe)
    except RuntimeError:
        step(pipe)


@case
def eval_raises(rank):
    pipe = pipeline({rank: Block(fault=raising(1) if rank else None)})
    pipe.eval_step(*data(rank)["args"], target=data(rank)["target"])


@case
def optimizer_step_on_one(rank):
    pipe = pipeline(timeout_s=2)
    step(pipe)
    if rank:
        time.sleep(4)
        pipe.eval_step()
    else:
        step(pipe)


@case
def hook_with_messages(rank):
    """A hook sends messages of its own over the script's group: they cannot get between the pipeline's."""
    pipe = pipeline()
    seen, sent = [], []

    def hook(module, args, output):
        value = torch.full((3,), float(len(seen)))
        if rank == 0:
            sent.append(dist.isend(value, 1))  # stage 1 receives it after what stage 0 sends
        else:
            dist.recv(value, 0)
        seen.append(value[0].item())

    expected = step(pipe)
    handle = pipe.stages[rank].register_forward_hook(hook)
    loss = step(pipe)
    handle.remove()
    assert seen == [0.0, 1.0, 2.0, 3.0], seen
    assert expected is loss is None or torch.equal(expected, loss)
    pipe.close()


@case
def after_all_failures(rank):
    pipe = pipeline()
    loss = step(pipe)
    assert (loss is None) == (rank == 0)
    pipe.close()


@case  # the last one: its pipelines have other numbers on the ranks
def never_constructed(rank):
    if rank:
        time.sleep(3)
    else:
        pipeline(timeout_s=2)


CALLS = {
    "stage_missing": lambda rank: pipeline(stages_of(rank, [[0], [2]])),
    "stage_on_two_ranks": lambda rank: pipeline(stages_of(rank, [[0, 1], [1]]), schedule="gpipe"),
    "stages_of_another_schedule": lambda rank: pipeline(stages_of(rank, [[0, 1], [2, 3]]), schedule="zb_v"),
    "no_stage": lambda rank: pipeline(stages_of(rank, [[0, 1], []])),
    "keys_are_names": lambda rank: pipeline({f"stage{rank}": Block()}),
    "no_modules": lambda rank: pipeline({rank: "block"}),
    "unknown_schedule": lambda _: pipeline(schedule="zb_x"),
    "no_such_sizes": lambda rank: pipeline(
        stages_of(rank, [[0, 2], [1, 3]]), schedule="interleaved", num_micro_batches=5
    ),
    "three_stages_in_a_v": lambda _: pipeline(ModelStages([Block() for _ in range(3)]), schedule="zb_v"),
    "no_micro_batches": lambda _: pipeline(num_micro_batches=None),
    "zero_micro_batches": lambda _: pipeline(num_micro_batches=0),
    "other_micro_batches": lambda rank: pipeline(num_micro_batches=4 + rank),
    "other_arguments": lambda rank: pipeline(scale_grads=bool(rank)),
    "unknown_split": lambda _: pipeline(split="parts"),
    "no_example": lambda _: pipeline(example=None),
    "example_of_no_tensor": lambda _: pipeline(example=(3,)),
    "example_is_a_tensor": lambda _: pipeline(example=example()[0]),
    "stages_are_a_list": lambda _: pipeline([Block()]),
    "no_time": lambda _: pipeline(timeout_s=0),
    "model_of_other_size": lambda rank: pipeline(ModelStages([Block() for _ in range(2 + rank)])),
    "unknown_tied_weight": lambda _: pipeline(tied=[{0: "inner.0.weight", 1: "embedding.weight"}]),
    "module_fails_on_example": lambda rank: pipeline({rank: Block(7) if rank == 0 else Block()}),
    "module_returns_text": lambda rank: pipeline({rank: Block(fault=lambda call, x: (x, "text"))}),
    "module_returns_complex": lambda rank: pipeline({rank: Block(fault=lambda call, x: torch.fft.fft(x))}),
    "module_returns_empty": lambda rank: pipeline({rank: Block(fault=lambda call, x: (x, x[:, :0]))}),
    "module_returns_no_gradient": lambda rank: pipeline({rank: Block(fault=lambda call, x: x.argmax(-1))}),
    "plan_declared": lambda _: step(pipeline(plan=plan(), num_micro_batches=None)),
    "plan_file_missing": lambda _: pipeline(plan="no such plan.yaml"),
    "plan_file_missing_on_one": lambda rank: pipeline(
        plan="no such plan.yaml" if rank else file_of(yaml.safe_dump(plan()))
    ),
    "plan_syntax": lambda _: pipeline(plan=file_of("pipeproof: 1\ntopology: {pp: 2\n")),
    "plan_is_no_plan": lambda _: pipeline(plan=7),
    "plan_section": lambda _: pipeline(plan=plan(topology=[2])),
    "plan_key": lambda _: pipeline(plan=plan(schedule__kindness="1f1b")),
    "plan_other_pp": lambda _: pipeline(plan=plan(topology__pp=4)),
    "plan_of_gpt": lambda _: pipeline(plan={"pipeproof": 1, "model": {"kind": "gpt", "num_layers": 2}}),
    "plan_of_other_widths": lambda _: pipeline(
        plan=plan(model__layers__0__out=[{"shape": ["b", WIDTH + 1], "dtype": "float32"}])
    ),
    "plan_of_other_weights": lambda _: pipeline(
        plan=plan(model__layers__1__parameters=[{"name": "head", "shape": [3]}])
    ),
    "plans_differ": lambda rank: pipeline(plan=plan(memory={"budget_gib": 8 + rank}), num_micro_batches=None),
    "plan_deadlocks": lambda _: pipeline(
        schedule=[["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]], num_micro_batches=2
    ),
    "rows_on_one_rank": lambda rank: refused_step(
        pipeline(), **({"args": (torch.zeros(7, WIDTH),)} if rank == 0 else {})
    ),
    "no_arguments": lambda _: refused_step(pipeline(), args=()),
    "no_target": lambda _: refused_step(pipeline(), target=None),
    "target_rows": lambda rank: refused_step(pipeline(), **({"target": torch.zeros(9, WIDTH)} if rank else {})),
    "module_raises": lambda rank: step(pipeline({rank: Block(fault=raising(3) if rank else None)})),
    "module_raises_on_first": lambda rank: step(pipeline({rank: Block(fault=None if rank else raising(2))})),
    "loss_raises": lambda _: step(pipeline(loss_fn=lambda output, target: output[:, 99])),
    "loss_no_scalar": lambda _: step(pipeline(loss_fn=lambda output, target: output - target)),
    "backward_raises": lambda rank: step(
        pipeline({rank: Block(fault=None if rank else lambda call, x: Failing.apply(x))})
    ),
    "output_changes": lambda rank: step(
        pipeline({rank: Counted()}, loss_fn=lambda output, target: F.mse_loss(output[0], target))
    ),
    "input_in_place": lambda rank: step(
        pipeline({rank: nn.Sequential(nn.ReLU(inplace=True), Block()) if rank else Block()})
    ),
    "shape_changes": lambda rank: step(pipeline({rank: Block(fault=lambda call, x: x if call != 3 else x[:1])})),
    "type_changes": lambda rank: step(pipeline({rank: Block(fault=lambda call, x: x if call != 3 else x.double())})),
}
"""Cases of one call."""


def main(names):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cases = {**CALLS, **CASES}
    for name in names or cases:
        dist.barrier()
        begin, kind, text, cause = time.monotonic(), "", "", ""
        try:
            cases[name](rank)
        except BaseException as error:  # noqa: BLE001 - also SystemExit
            kind, text = type(error).__name__, str(error)
            shown = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
            cause = "" if shown is None else type(shown).__name__
            if os.environ.get("TRACEBACK"):
                import traceback

                traceback.print_exc()
        seconds = round(time.monotonic() - begin, 2)
        outcome = {"case": name, "rank": rank, "s": seconds, "kind": kind, "text": text, "cause": cause}
        sys.stdout.write(f"{json.dumps(outcome)}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
