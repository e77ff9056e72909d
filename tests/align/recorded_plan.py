"""Records of any plan, all of its ranks in this process."""

from dataclasses import dataclass

from pipeproof.comm.accumulation_order import sum_orders, tied_sums
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.compare.compare_gradients import StepResult, compare_step, gather_sharded_gradients
from pipeproof.exec.compare.run_record import RankStep, Recorder, ReferenceStep
from pipeproof.exec.rank.job_files import RecordOptions
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.reference.ordered import Orders, run_ordered
from tests.exec.in_memory import outcome_of, run_all


@dataclass(frozen=True)
class ReferenceRun:
    """The steps of the reference that adds in the order of a plan, each with the tensors at the boundaries of
    layers."""

    steps: list
    layers: list[dict]


def reference_run(plan: LoweredPlan) -> ReferenceRun:
    """Train the ordered reference of a plan."""
    orders = sum_orders(plan)
    watch = LayerWatch(join_dim=plan.boundary.tp.dim)
    run = ReferenceRun([], [])
    for step in run_ordered(plan.spec, Orders(orders.loss, orders.by_parameter(plan), tied_sums(plan)), watch):
        run.steps.append(step)
        run.layers.append(watch.take())
    return run


def record(
    plan: LoweredPlan, reference: ReferenceRun, directory, *, values: bool = True, prepare=None
) -> list[StepResult]:
    """Train all ranks, write their record and the reference's below ``directory``; how each step compares.

    For ``prepare`` see ``run_all``.
    """
    seen: dict[tuple[int, int], dict] = {}
    outcomes, _ = run_all(plan, seen, prepare=prepare)
    recorder = Recorder(RecordOptions(directory, layers=True, values=values), plan, "d" * 64)
    results = []
    for step, of_step in enumerate(outcomes):
        theirs = reference.steps[step]
        ranks = gather_sharded_gradients(plan, [one.gradients for one in of_step])
        result = compare_step(plan, step, of_step, *[outcome_of(theirs)] * 2)
        recorder.put(
            step,
            result.loss,
            [RankStep(gradients, seen[step, rank]) for rank, gradients in enumerate(ranks)],
            ReferenceStep(theirs.loss, theirs.gradients, reference.layers[step]),
            result.routers,
        )
        results.append(result)
    return results
