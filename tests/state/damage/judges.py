"""Everybody who reads states: what each makes of a directory, whatever was done to it."""

import numpy as np

from pipeproof.specs.finding import PipeproofError
from pipeproof.state.checkpoint import open_checkpoint
from pipeproof.state.faults import faults_of
from pipeproof.state.fits import require_fits
from pipeproof.state.layout import pieces_of
from pipeproof.state.load import find_state, read_whole
from pipeproof.state.parts import read_part
from pipeproof.state.stream import tensor_blocks
from pipeproof.verify.certificate import plan_digest
from tests.state.tiny import cut


class OtherValuesError(AssertionError):
    """A wrong value was taken."""


def resumed(at, place, whole, steps_done):
    """What ``run --resume`` looks at, and then each rank's part, and the reference's tensors: the right ones."""
    state = find_state(place)
    require_fits(state, at.plan, plan_digest(at))
    require_same(state.steps_done, steps_done)
    for rank in range(at.plan.mesh.num_ranks):
        parts = read_part(state, at.plan, rank)
        for piece in pieces_of(at.plan, rank):
            require_same(parts[piece.weight, piece.slot].content.tobytes(), cut(piece.shard, whole).tobytes())
    require_equal({name: array.content.tobytes() for name, array in read_whole(state).items()}, whole)


def verified(at, place, whole, steps_done):
    """``state --verify``, and what is there if it finds nothing."""
    faults = faults_of(place)
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


JUDGES = (resumed, verified)


def refusal_of(judge, *arguments):
    """The findings of a judge that refuses, none of one that found the right values; anything else is a failure."""
    try:
        judge(*arguments)
    except PipeproofError as error:
        for finding in error.findings:
            assert finding.help, finding
        return error.findings
    return ()


def opened_or_refused(place):
    """Without looking at content: it is opened, or refused, and nothing else happens."""
    return refusal_of(open_checkpoint, place)
