"""Table rows: embedding and head on two MTP streams."""

from __future__ import annotations

import paddle

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.embedding_and_head import EmbeddingAndHead, Positions
from pipeproof.stages.common.work_items import MtpStream, split_mtp_streams
from pipeproof.stages.describe.mtp_streams import shifted_batch
from pipeproof.stages.describe.synthetic import DropoutKeys, micro_batch
from pipeproof.stages.paddle.backend_ops import OPS
from pipeproof.stages.paddle.functional import rotary_tables
from pipeproof.stages.paddle.stage import PaddleVocabulary
from tests.stages.adjoints.rows import per_layout
from tests.stages.adjoints.world import Case, Rank
from tests.stages.staged_run import make_plan

SIZES = {"hidden_size": 16, "vocab_size": 12, "seq_length": 4}
PLAN = make_plan(model={**SIZES, "mtp": {"num_modules": 1}}, run={"dtype": "float64"})
LEARNED = make_plan(model={**SIZES, "positions": "learned"}, run={"dtype": "float64"})
BATCHES = [shifted_batch(micro_batch(PLAN, 0, 2), distance) for distance in (0, 1)]
STREAMS = [MtpStream(*(paddle.to_tensor(words.T.copy()) for words in (one.tokens, one.labels))) for one in BATCHES]


def ends() -> list[Case]:
    """What is looked up, once for all streams and again, and the losses."""
    cases = []
    for place, (words, positions) in enumerate(((12, 4), (6, 4), (6, 2))):  # of a rank: one, two, sequences cut
        table, streams, head = ((words, 16), "own"), ((positions, 4, 16), "between"), ((16, words), "own")
        of_layouts = (
            per_layout("ends: embedding", "EmbeddingAndHead.embed", _embedded, table, output="between"),
            per_layout(
                "ends: positions",
                "EmbeddingAndHead.embed Positions.embedded",
                _positioned,
                table,
                ((4, 16), "between"),
                output="between",
            ),
            per_layout("ends: again", "EmbeddingAndHead.embed_for_module", _embedded_again, table, output="between"),
            per_layout(
                "ends: losses",
                "EmbeddingAndHead.losses PaddleVocabulary.losses",
                _losses,
                streams,
                head,
                output="alike",
            ),
        )
        cases += [rows[place] for rows in of_layouts]
    return cases


def _of(rank: Rank, *weights: paddle.Tensor, plan: PlanSpec = PLAN) -> tuple[EmbeddingAndHead, Dropouts]:
    dropouts = Dropouts(OPS, DropoutKeys(plan, 0, 0), 0, rank.region)
    vocabulary = PaddleVocabulary(rank.weights, tied=False)

    def weight_of(layer: str, name: str) -> paddle.Tensor:
        return weights[name == "embed.positions.weight"]

    positions = Positions(OPS, plan, rank.weights, rotary_tables(4, 4, "float64"))
    return EmbeddingAndHead(OPS, plan, rank.region, weight_of, vocabulary, positions), dropouts


def _embedded(rank: Rank, weight: paddle.Tensor) -> list[paddle.Tensor]:
    own, dropouts = _of(rank, weight)
    return own.embed(STREAMS, dropouts)


def _positioned(rank: Rank, table: paddle.Tensor, positions: paddle.Tensor) -> list[paddle.Tensor]:
    own, dropouts = _of(rank, table, positions, plan=LEARNED)
    return [paddle.tanh(stream) for stream in own.embed(STREAMS[:1], dropouts)]


def _embedded_again(rank: Rank, weight: paddle.Tensor) -> paddle.Tensor:
    own, dropouts = _of(rank, weight)
    return own.embed_for_module("mtp.0", STREAMS[1], dropouts)


def _losses(rank: Rank, x: paddle.Tensor, weight: paddle.Tensor) -> list[paddle.Tensor]:
    own, _ = _of(rank, weight)
    return own.losses(split_mtp_streams(OPS, x, 2, 1), STREAMS)
