"""Multi-token prediction: what each lane reads and predicts, and what its loss counts."""

from __future__ import annotations

import numpy as np

from pipeproof.specs.mtp import MtpSpec
from pipeproof.stages.describe.synthetic import IGNORED, Batch


def ahead(batch: Batch, distance: int) -> Batch:
    """The micro-batch as lane ``distance`` reads it: tokens and labels that many positions further on.

    Behind the end of the sequence stand the token 0 and labels that are not
    counted; all others keep whether they are counted. What is behind the end
    is read by no position that is counted, for positions look back.
    """
    if distance == 0:
        return batch
    tokens, labels = np.zeros_like(batch.tokens), np.full_like(batch.labels, IGNORED)
    tokens[:, :-distance] = batch.tokens[:, distance:]
    labels[:, :-distance] = batch.labels[:, distance:]
    return Batch(tokens, labels)


def module_weight(mtp: MtpSpec) -> float:
    """What each module's loss is multiplied by: the weight of their mean (arXiv:2412.19437, equation 25)."""
    return mtp.loss_weight / mtp.num_modules
