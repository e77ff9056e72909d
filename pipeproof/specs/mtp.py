"""The section ``model.mtp``: modules that predict tokens further ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from pipeproof.specs.problems import KeyPath, Problem, dotted

if TYPE_CHECKING:
    from pipeproof.specs.plan import PlanSpec


class MtpSpec(BaseModel):
    """Multi-token prediction (arXiv:2412.19437, section 2.2).

    Module j joins what comes before it with the embedding of the token j + 1
    positions ahead, and predicts the token after that one. Embedding, last
    norm and head are those of the main model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    num_modules: int = Field(ge=1, le=64, description="Number of modules, one behind the other.")
    loss_weight: float = Field(
        default=0.3, gt=0, le=1e6, description="What the mean of the modules' losses is multiplied by."
    )
    magic_send: bool = Field(
        default=False,
        description="Whether a stage with a module has a copy of the embedding, so that hidden states alone cross "
        "between stages; without it, the first stage embeds for all, and what crosses is (num_modules + 1) times as "
        "large.",
    )


def check_mtp(plan: PlanSpec) -> list[Problem]:
    """PP108: every module has a token to predict in the shortest sequence; PP106: not with hyper-connections."""
    mtp = plan.model.mtp
    if mtp is None:
        return []
    problems = []
    if plan.model.hyper_connections is not None:
        message = (
            "`model.mtp` is given together with `model.hyper_connections`, and it is not defined which of several "
        )
        message += "residual streams a module reads"
        problems.append(Problem("PP106", ("model", "mtp"), message, help="remove one of the two", at_key=True))
    lengths: dict[KeyPath, int] = {("model", "seq_length"): plan.model.seq_length}
    for index, length in enumerate(plan.schedule.seq_lengths or ()):
        lengths["schedule", "seq_lengths", index] = length
    shortest = min(lengths, key=lengths.__getitem__)
    if lengths[shortest] <= mtp.num_modules:
        message = f"the last of model.mtp.num_modules {mtp.num_modules} predicts a token {mtp.num_modules + 1} ahead, "
        message += f"and {dotted(shortest)} is {lengths[shortest]}"
        mend = f"set {dotted(shortest)} to {mtp.num_modules + 1} at least"
        if lengths[shortest] > 1:
            mend += f", or model.mtp.num_modules to at most {lengths[shortest] - 1}"
        problems.append(Problem("PP108", shortest, message, help=mend))
    return problems
