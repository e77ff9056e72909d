"""Names of operations in Flight Recorder dumps, and the operation of each name.

PyTorch names an entry after its function, and several functions are one
operation: members of a group may mix them. A coalescing block has an entry for
each operation, and one named ``coalesced`` that ends it.
"""

from __future__ import annotations

from typing import Final

END_OF_BATCH: Final = "coalesced"
"""Name of the entry that ends a batch of messages, or a block of coalesced collectives."""

WITHOUT_PEER: Final = frozenset({"send", "recv", "recvAnySource"})
"""Messages that gloo names without their ends: no other entry can be matched with them."""

_OPS: Final = {
    "all_reduce": ("all_reduce", "allreduce_coalesced", "sparse_all_reduce"),
    "all_gather": (
        "all_gather", "_all_gather_base", "all_gather_single", "all_gather_v", "all_gather_into_tensor_coalesced",
        "ALLGATHER_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_v",
        "reduce_scatter_tensor_coalesced", "REDUCE_SCATTER_coalesced",
    ),
    "all_to_all": (
        "all_to_all", "alltoall", "alltoall_base", "all_to_all_single", "all_to_all_v_single", "all_to_allv",
    ),
    "broadcast": ("broadcast", "_broadcast_oop"),
    "reduce": ("reduce", "_reduce_oop"),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "barrier": ("barrier", "all_reduce_barrier"),
    "split": ("split",),
    "new_window": ("new_window",),
}  # fmt: skip
_OP_BY_NAME: Final = {name: op for op, names in _OPS.items() for name in names}

UNEVEN: Final = frozenset({
    "all_gather_v", "reduce_scatter_v", *_OPS["all_to_all"], *_OPS["gather"], *_OPS["scatter"], *_OPS["barrier"],
})  # fmt: skip
"""Names whose members may have tensors of different sizes, or none."""


def op_of(name: str) -> str:
    """Return the operation of an entry by its name without the backend; an unknown name is an operation of its own."""
    return _OP_BY_NAME.get(name, name)


def num_elements(op: str, num_inputs: int, num_outputs: int) -> int:
    """Return the number of elements that the members of a collective have in common, or that a message has.

    Members of an all-gather may have inputs of different sizes; their outputs have the same size.
    """
    return (num_outputs or num_inputs) if op == "all_gather" else (num_inputs or num_outputs)
