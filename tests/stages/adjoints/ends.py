"""Table rows: embedding and head on two MTP streams."""

from __future__ import annotations

from functools import partial
from typing import Any

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.embedding_and_head import EmbeddingAndHead, Positions
from pipeproof.stages.common.work_items import MtpStream, split_mtp_streams
from pipeproof.stages.describe.mtp_streams import shifted_batch
from pipeproof.stages.describe.synthetic import DropoutKeys, micro_batch
from tests.stages.adjoints.rows import per_layout
from tests.stages.adjoints.world import Backend, Case, Rank, make_plan

SIZES = {"hidden_size": 16, "vocab_size": 12, "seq_length": 4}
PLAN = make_plan(model={**SIZES, "mtp": {"num_modules": 1}}, run={"dtype": "float64"})
LEARNED = make_plan(model={**SIZES, "positions": "learned"}, run={"dtype": "float64"})
BATCHES = [shifted_batch(micro_batch(PLAN, 0, 2), distance) for distance in (0, 1)]


def ends(fw: Backend) -> list[Case]:
    """The lookup of rows, once for all streams and again, and the losses."""
    cases = []
    for place, (words, positions) in enumerate(((12, 4), (6, 4), (6, 2))):  # of a rank: one, two, sequences cut
        table, head = ((words, 16), "own", "weight"), ((16, words), "own", "weight")
        streams = ((positions, 4, 16), "between")
        of_layouts = (
            per_layout("ends: embedding", "EmbeddingAndHead.embed", partial(_embedded, fw), table, output="between"),
            per_layout(
                "ends: positions",
                "EmbeddingAndHead.embed Positions.embedded",
                partial(_positioned, fw),
                table,
                ((4, 16), "between", "weight"),
                output="between",
            ),
            per_layout(
                "ends: again",
                "EmbeddingAndHead.embed_for_module",
                partial(_embedded_again, fw),
                table,
                output="between",
            ),
            per_layout(
                "ends: losses",
                "EmbeddingAndHead.losses PaddleVocabulary.losses",
                partial(_losses, fw),
                streams,
                head,
                output="replicated",
            ),
        )
        cases += [rows[place] for rows in of_layouts]
    return cases


def _streams(fw: Backend) -> list[MtpStream]:
    return [MtpStream(*(fw.tensor(words.T.copy()) for words in (one.tokens, one.labels))) for one in BATCHES]


def _of(fw: Backend, rank: Rank, *weights: Any, plan: PlanSpec = PLAN) -> tuple[EmbeddingAndHead, Dropouts]:
    dropouts = Dropouts(fw.ops, DropoutKeys(plan, 0, 0), 0, rank.region)
    vocabulary = fw.vocabulary(rank.weights, tied=False)

    def weight_of(layer: str, name: str) -> Any:
        return weights[name == "embed.positions.weight"]

    positions = Positions(fw.ops, plan, rank.weights, fw.rotary_tables(4, 4))
    return EmbeddingAndHead(fw.ops, plan, rank.region, weight_of, vocabulary, positions), dropouts


def _embedded(fw: Backend, rank: Rank, weight: Any) -> list[Any]:
    own, dropouts = _of(fw, rank, weight)
    return own.embed(_streams(fw), dropouts)


def _positioned(fw: Backend, rank: Rank, table: Any, positions: Any) -> list[Any]:
    own, dropouts = _of(fw, rank, table, positions, plan=LEARNED)
    return [stream.tanh() for stream in own.embed(_streams(fw)[:1], dropouts)]


def _embedded_again(fw: Backend, rank: Rank, weight: Any) -> Any:
    own, dropouts = _of(fw, rank, weight)
    return own.embed_for_module("mtp.0", _streams(fw)[1], dropouts)


def _losses(fw: Backend, rank: Rank, x: Any, weight: Any) -> list[Any]:
    own, _ = _of(fw, rank, weight)
    return own.losses(split_mtp_streams(fw.ops, x, 2, 1), _streams(fw))
