"""Multi-token prediction: how many activations of a token travel together through the model.

What the main model makes of a token, and what each module makes of it, are
lanes. Lanes that cross between stages are one tensor, joined along the rows of
the micro-batch (b): the main lane's rows first, then those of module 0, and so
on. So sequence parallelism cuts all of them at the same tokens, in either
order of dims, and a rank's part is a part of each lane.

Blocks compute on the main lane. Module j reads lane j and makes lane j + 1.
Embedding, last norm and head compute on all lanes that are there.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeproof.specs.model import ModelSpec
from pipeproof.stages.describe.order import first_word, layer_order

MTP = "mtp"
"""The first word of a module's name; module j is ``mtp.j``."""


def is_mtp(name: str) -> bool:
    """Whether a layer is a module of multi-token prediction."""
    return first_word(name) == MTP


def module_of(name: str) -> int:
    """The number of a module, by its layer's name."""
    return int(name.removeprefix(f"{MTP}."))


def num_modules(model: ModelSpec) -> int:
    """Modules of multi-token prediction."""
    return 0 if model.mtp is None else model.mtp.num_modules


def embeds_again(model: ModelSpec) -> bool:
    """Whether modules look up the embedding themselves."""
    return model.mtp is not None and model.mtp.magic_send


def lanes_after(model: ModelSpec, names: Iterable[str]) -> int:
    """How many lanes there are behind the layers ``names``, the model's first ones in any order.

    Where the first stage embeds for all, every lane is there from the
    beginning: what will be that of a module is the embedding that it will read.
    """
    if not embeds_again(model):
        return 1 + num_modules(model)
    return 1 + sum(map(is_mtp, names))


def lanes_into(model: ModelSpec, name: str) -> int:
    """How many lanes a layer finds; there is none before the embedding."""
    if name == "embed" or model.mtp is None:
        return 0 if name == "embed" else 1
    order = layer_order(model)
    return lanes_after(model, order[: order.index(name)])


def lanes_at(model: ModelSpec, name: str) -> int:
    """On how many lanes a layer computes."""
    if name in ("norm", "head"):
        return lanes_into(model, name)
    return lanes_after(model, [name]) if name == "embed" else 1


def lane_read(name: str) -> int:
    """The lane that a layer takes, the first one of several."""
    return module_of(name) if is_mtp(name) else 0


def lane_made(name: str) -> int:
    """The lane that a layer makes, the first one of several."""
    return module_of(name) + 1 if is_mtp(name) else 0
