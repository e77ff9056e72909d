"""Faults planted into compressed attention on two ranks with sequence parallelism, and where ``align`` finds them."""

import numpy as np
import pytest

from pipeproof.stages.common import compressed_attention
from pipeproof.stages.common.compressed_attention import CompressedAttention
from tests.align.test_faults import located, recorded
from tests.features import FEATURES

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

TYPES = ["heavily_compressed_attention", "compressed_sparse_attention"]
MODEL = {
    "compressed_attention": {**FEATURES["packed documents"]["model"]["compressed_attention"], "layer_types": TYPES},
    "activation_order": "bsh",
}


def wider_window(patch):
    """One more token in the window of the last block's type."""
    right = compressed_attention._tables

    def tables(ops, spec, kind, length, like):
        update = {"sliding_window": spec.sliding_window + 1} if kind == TYPES[1] else {}
        return right(ops, spec.model_copy(update=update), kind, length, like)

    patch.setattr(compressed_attention, "_tables", tables)


def no_overlap(patch):
    """Entries without the window before: the first half of a token's products is read by none."""
    right = CompressedAttention._overlapped

    def alone(self, windows, missing, begins=None):
        slots = right(self, windows, missing, begins)
        first, second = self._ops.chunk(slots, 2, 2)
        return self._ops.concat([self._ops.zeros_like(first) + missing, second], 2)

    patch.setattr(CompressedAttention, "_overlapped", alone)


def index_of_another_document(patch):
    """The indexer chooses among all earlier entries, whatever their document."""
    right = CompressedAttention._unseen

    def unseen(self, x, low, name, tables):
        rows, length = tables.unseen.shape[0], tables.unseen.shape[1]
        tokens = tables.tokens.reshape([rows, -1, self._spec.rate_of(TYPES[1])]).numpy()
        ends = tokens[:, None, :, -1] - np.arange(rows)[:, None, None] * length
        far = np.where(ends <= np.arange(length)[None, :, None], 0.0, -np.inf)
        near = tables.unseen[:, :, :length]
        return right(
            self, x, low, name, tables._replace(unseen=self._ops.concat([near, self._ops.constant(far, near)], -1))
        )

    patch.setattr(CompressedAttention, "_unseen", unseen)


def window_of_another_document(patch):
    """The first entry of a document has the slots of the last window of the document before."""
    right = CompressedAttention._overlapped
    patch.setattr(
        CompressedAttention, "_overlapped", lambda self, windows, missing, _=None: right(self, windows, missing)
    )


def rotated_output(patch):
    """The rotation of the output is not undone in the last block."""
    right = CompressedAttention._compressed

    def compressed(self, mixed, name):
        if name.startswith("layer.1."):
            tables = self._tables[TYPES[1], mixed.shape[2]]
            mixed = self._rotated(mixed, tables.cos, tables.sin)
        return right(self, mixed, name)

    patch.setattr(CompressedAttention, "_compressed", compressed)


def sinkless_backward(patch):
    """Forward is right; backward is that of probabilities that add up to one without the sink."""
    right = CompressedAttention._mixed

    def mixed(self, query, keys, *, sinks, unseen):
        value = right(self, query, keys, sinks=sinks, unseen=unseen)
        if unseen.shape[0] == 1:  # in the first block all rows see the same
            return value
        absent = self._ops.zeros_like(sinks) - np.inf
        other = right(self, query, keys, sinks=absent, unseen=unseen)
        return other - other.detach() + value.detach()

    patch.setattr(CompressedAttention, "_mixed", mixed)


def unmoved_sinks(patch):
    """The sinks get no gradient."""
    from pipeproof.stages.paddle.weights import SplitWeights

    right = SplitWeights.deferred
    patch.setattr(SplitWeights, "deferred", lambda self, w: right(self, w) if len(w.shape) > 1 else self.fixed(w))


OUTPUT = {"kind": "tensor", "layer": "layer.1", "direction": "forward", "side": "output"}
FAULTS = {
    "window off by one": (wider_window, OUTPUT),
    "compressor without overlap": (no_overlap, OUTPUT),
    "index of another document": (index_of_another_document, OUTPUT),
    "window of another document": (window_of_another_document, OUTPUT),
    "output left rotated": (rotated_output, OUTPUT),
    "sink left out of the backward": (sinkless_backward, {**OUTPUT, "direction": "backward"}),
    "sinks without a gradient": (
        unmoved_sinks, {"kind": "gradient", "layer": "layer.1", "parameter": "layer.1.attn.sinks.weight"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_a_fault_is_found_in_its_block_and_nothing_without_one(name, tmp_path, monkeypatch):
    if name is not None:
        FAULTS[name][0](monkeypatch)
    recorded(**MODEL).record(tmp_path)
    found = located(tmp_path, status=0 if name is None else 1)["tensors"]
    if name is None:
        assert found["equal"] == found["compared"]
    else:
        first = found["first_difference"]
        assert first["step"] == 0
        assert {key: first["tensor"].get(key) for key in FAULTS[name][1]} == FAULTS[name][1]
