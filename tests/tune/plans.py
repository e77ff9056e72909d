"""Plans to tune on their own ranks: four ranks, eight micro-batches, exact times."""

from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict

UNIT = {"forward_us": 1, "backward_input_us": 1, "backward_weight_us": 1}
"""Every forward and each half of a backward takes one microsecond."""


def four_ranks(*, num_layers=4, cost=None, **schedule):
    """1F1B over four ranks with eight micro-batches of one sequence; arguments replace keys."""
    return plan_dict(
        model={"num_layers": num_layers},
        topology={"pp": 4},
        schedule={"num_micro_batches": 8, "micro_batch_size": 1, **schedule},
        cost={**UNIT, **(cost or {})},
    )


def loaded(data):
    return plan_from_dict(data)
