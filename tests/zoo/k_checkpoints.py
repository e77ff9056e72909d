"""Family K: checkpoints and resharding: stated maps from local to global indices, and states that are moved."""

from pipeproof.stages.describe.index_map import IndexMap, expert_map
from pipeproof.verify.declared_facts import HeldTensor, LoadedParameter, MapUse
from tests.zoo.case import Case
from tests.zoo.facts import stated
from tests.zoo.reshards import by_name, fused, offsets_from_0

RANKS = range(2)


def saved_experts(part_of):
    """Four experts of eight elements on two expert-parallel ranks, saved with these maps."""
    return stated(num_ranks=2, held_tensors=(HeldTensor("experts", 32, {rank: part_of(rank) for rank in RANKS}),))


def qkv_map(rank, *, grouped):
    """The rows of a fused weight of two key-value heads on one of two ranks, 4 elements per head.

    The local weight is [its two queries, its key, its value]. If ``grouped``, the whole weight has for each key-value
    head its queries, key and value (Megatron-LM's order); otherwise all queries, all keys, all values.
    """
    firsts = (4 * rank, 4 * rank + 2, 4 * rank + 3) if grouped else (2 * rank, 4 + rank, 6 + rank)
    return IndexMap.of(
        [(4 * at, 4 * first, 4 * num) for at, first, num in zip((0, 2, 3), firsts, (2, 1, 1), strict=True)]
    )


def sliced_qkv(part_of):
    """A fused weight of two key-value groups of two queries each, loaded by two TP ranks."""
    holds = {rank: qkv_map(rank, grouped=True) for rank in RANKS}
    return stated(num_ranks=2, map_uses=(MapUse("qkv", {rank: part_of(rank) for rank in RANKS}, holds),))


def loaded_into(target):
    """One weight, read from a checkpoint into this memory."""
    return stated(loads=(LoadedParameter("weight", 0, target, "weight"),))


CASES = (
    Case(
        "K2",
        "each rank numbers its experts from 0, and the checkpoint lacks its offset",
        lambda: saved_experts(lambda rank: expert_map(4, 8, 2, rank)),
        lambda: saved_experts(lambda rank: expert_map(4, 8, 2, 0)),
        kills=("PP210",),
    ),
    Case(
        "K3",
        "the fused weight is split into equal runs of rows, although its rows interleave by key-value group",
        lambda: sliced_qkv(lambda rank: qkv_map(rank, grouped=True)),
        lambda: sliced_qkv(lambda rank: qkv_map(rank, grouped=False)),
        kills=("PP211",),
    ),
    Case(
        "K2.index",
        "the index of a saved state numbers every rank's experts from 0",
        lambda: offsets_from_0(False),
        lambda: offsets_from_0(True),
        kills=("PP210",),
    ),
    Case(
        "K2.names",
        "expert e is read by the name of expert e modulo the number on a rank",
        lambda: by_name(lambda e: e),
        lambda: by_name(lambda e: e % 6),
        kills=("PP211", "PP213"),
    ),
    Case(
        "K2.strings",
        "experts are stacked in the order of their names as strings: 0, 1, 10, 11, 2",
        lambda: by_name(lambda e: e),
        lambda: by_name(sorted(range(12), key=str).__getitem__),
        kills=("PP211",),
    ),
    Case(
        "K3.map",
        "queries, keys and values are concatenated into a weight that is grouped",
        lambda: fused(grouped=True),
        lambda: fused(grouped=False),
        kills=("PP211",),
    ),
    Case(
        "K4",
        "the checkpoint is read into a cast copy of the weight",
        lambda: loaded_into("weight"),
        lambda: loaded_into("cast of weight"),
        kills=("PP212",),
    ),
)
