"""Readers of states: the result of each for a damaged directory."""

import numpy as np

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.state.checkpoint import tensor_blocks
from pipeproof.state.open_checkpoint import file_findings, open_checkpoint
from pipeproof.state.read_state import find_state, read_rank_state, read_whole
from pipeproof.state.resume_check import require_resumable
from pipeproof.state.state_layout import shards_of_rank
from pipeproof.verify.certificate import graph_digest
from tests.state.tiny import cut


class OtherValuesError(AssertionError):
    """A wrong value was taken."""


def resumed(at, place, whole, steps_done):
    """The files that ``run --resume`` reads, then each rank's shard, and the reference's tensors: the right ones."""
    state = find_state(place)
    require_resumable(state, at.plan, graph_digest(at))
    require_same(state.steps_done, steps_done)
    for rank in range(at.plan.mesh.num_ranks):
        parts = read_rank_state(state, at.plan, rank)
        for piece in shards_of_rank(at.plan, rank):
            require_same(parts[piece.weight, piece.slot].content.tobytes(), cut(piece.shard, whole).tobytes())
    require_equal({name: array.content.tobytes() for name, array in read_whole(state).items()}, whole)


def verified(at, place, whole, steps_done):
    """``state --verify``, and the content if it finds nothing."""
    faults = file_findings(place)
    if faults:
        raise PipeproofError(*faults)
    checkpoint = open_checkpoint(place)
    require_equal({name: b"".join(map(bytes, tensor_blocks(checkpoint, name))) for name in checkpoint.tensors}, whole)
    require_same(checkpoint.index.steps_done, steps_done)


def require_equal(found, whole):
    require_same(found, {name: np.ascontiguousarray(array).tobytes() for name, array in whole.items()})


def require_same(found, right):
    if found != right:
        raise OtherValuesError


READERS = (resumed, verified)


def refusal_of(reader, *arguments):
    """The findings of a judge that refuses, none of one that found the right values; anything else is a failure."""
    try:
        reader(*arguments)
    except PipeproofError as error:
        for finding in error.findings:
            assert finding.help, finding
        return error.findings
    return ()


def opened_or_refused(place):
    """Without looking at content: it is opened, or refused, and nothing else happens."""
    return refusal_of(open_checkpoint, place)
