"""What mends a Fleet job whose boundary tensors are corrupted, and what each mend costs on the wire."""

from __future__ import annotations

from dataclasses import replace

from pipeproof.interop.imported import Retell
from pipeproof.interop.paddle.job import FleetJob
from pipeproof.interop.paddle.lay_out import turn_off
from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.finding import Finding
from pipeproof.specs.plan import PlanSpec

LOSSY_CODE = "PP201"


def retelling(job: FleetJob) -> Retell:
    """How findings of ``check`` are told in the words of the job's own settings; the costs stand there once."""

    def retell(plan: PlanSpec, findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
        told: list[Finding] = []
        first = True
        for finding in findings:
            if finding.code == LOSSY_CODE:
                told.append(replace(finding, help=mend(job, plan) if first else f"write `{turn_off(job.partial)}`"))
                first = False
            else:
                told.append(finding)
        return tuple(told)

    return retell


def mend(job: FleetJob, plan: PlanSpec) -> str:
    """The ways to send, each with the bytes that one pipeline moves in a step over all its tensor-parallel ranks."""
    whole, tp = step_bytes(job, plan), plan.topology.tp
    intro = (
        f"write `{turn_off(job.partial)}`, so that tensors are sent whole; a step of one pipeline then moves, forward "
    )
    intro += f"and backward, over all {tp} TP ranks:"
    ways = (
        ("full sends, sequence parallel", whole, 0, " (this mend)"),
        ("partial sends, sequence parallel", whole // tp, (tp - 1) * whole // tp, ", and wrong"),
        ("partial sends, without it", whole, (tp - 1) * whole, ""),
        ("full sends, without it", tp * whole, 0, ""),
    )
    lines = [
        f"{way + ':':<34} {sent} bytes between stages" + (f" + {gathered} in all-gathers" if gathered else "") + remark
        for way, sent, gathered, remark in ways
    ]
    return "\n".join([intro, *lines])


def step_bytes(job: FleetJob, plan: PlanSpec) -> int:
    """Bytes of all boundary tensors of a step of one pipeline, each counted once, activations and gradients.

    A boundary tensor has sequence / cp x rows x hidden elements for each
    residual stream, and once more for each module that predicts further
    ahead, where those are embedded on the first stage.
    """
    model, topology, schedule = plan.model, plan.topology, plan.schedule
    ahead = 0 if model.mtp is None or model.mtp.magic_send else model.mtp.num_modules
    elements = model.seq_length // topology.cp * schedule.micro_batch_size * model.hidden_size
    elements *= model.num_streams * (1 + ahead)
    dtype = plan.run.dtype if job.dtype is None else job.dtype.value
    return 2 * schedule.num_micro_batches * (plan.num_stages - 1) * elements * dtype_bytes(dtype)
