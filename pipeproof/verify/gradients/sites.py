"""What forwards multiply their losses by, against what is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pipeproof.schedule.derive import BoolColumn
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.optable import NONE, IntColumn
from pipeproof.stages.describe.gradient_facts import MAIN_LOSS, Loss
from pipeproof.verify.gradients.coefficient import ONE, Coefficient, parse_scale
from pipeproof.verify.gradients.ledgers import micro_batch_places
from pipeproof.verify.gradients.model import Model


@dataclass(frozen=True, eq=False)
class Site:
    """One loss on its stage.

    ``rows`` are the forwards there, ``place`` their micro-batches' places and
    ``code`` what each multiplies a token's loss by, as an index into
    ``ratios``: over what is declared, or as it is written where nothing is.
    A forward without a scale applies what is declared.
    """

    loss: Loss
    declared: Coefficient | None
    rows: IntColumn
    place: IntColumn
    code: IntColumn
    ratios: tuple[Coefficient, ...]

    def seen(self, model: Model, coords: Mapping[str, int]) -> list[tuple[int, BoolColumn]]:
        """(index of a ratio, micro-batches with it) of the tokens at some coordinates; any on an axis not given."""
        num = len(model.micro_batches)
        if len(self.ratios) == 1:
            return [(0, np.ones(num, dtype=bool))]
        here = (self.place != NONE) & self._at(model, coords)
        result = []
        for code in range(len(self.ratios)):
            mask = np.zeros(num, dtype=bool)
            mask[self.place[here & (self.code == code)]] = True
            if mask.any():
                result.append((code, mask))
        return result

    def row(self, model: Model, code: int, place: int, coords: Mapping[str, int]) -> int | None:
        """The first forward of a micro-batch that names a scale of its own, of those that apply a ratio."""
        named = (self.code == code) & (self.place == place) & (model.graph.scale[self.rows] != 0)
        found = self.rows[named & self._at(model, coords)]
        return int(found[0]) if len(found) else None

    def _at(self, model: Model, coords: Mapping[str, int]) -> BoolColumn:
        here = np.ones(len(self.rows), dtype=bool)
        for axis, place in coords.items():
            here &= model.grid.same(model.graph.rank[self.rows], axis, place)
        return here


@dataclass(frozen=True, eq=False)
class Sites:
    """All losses, in the order of the facts. ``unreadable`` has the forwards whose scale means nothing, and why."""

    all: tuple[Site, ...]
    unreadable: Mapping[int, str] = field(default_factory=dict)

    def reaching(self, stage: int, name: str | None) -> list[Site]:
        """The losses on a stage or after it, of one name or of any."""
        return [site for site in self.all if site.loss.stage >= stage and name in (None, site.loss.name)]


def read_sites(model: Model) -> Sites:
    """The losses of the facts with what the graph's forwards make of them.

    Raises:
        ValueError: the facts declare a scale that cannot be read, or zero.
    """
    graph = model.graph
    forwards = np.flatnonzero(graph.is_kind(frozenset({OpKind.FORWARD})) & (graph.unit != NONE))
    losses = model.facts.losses
    names_at: dict[int, set[str]] = {}
    for loss in losses:
        names_at.setdefault(loss.stage, set()).add(loss.name)
    unreadable: dict[int, str] = {}
    values = _values(model, forwards, names_at, unreadable)
    sites = []
    for loss in losses:
        declared = model.declared(loss)
        if declared is not None and not declared.terms:
            raise ValueError(f"the loss {loss.name!r} on stage {loss.stage} is declared to count zero: leave it out")
        rows = forwards[graph.stage[forwards] == loss.stage]
        texts, code = np.unique(graph.scale[rows], return_inverse=True)
        written = [values.get(text, {}).get(loss.name) for text in texts.tolist()]
        apply = ONE if declared is None else declared.inverse
        ratios = tuple(ONE if value is None else value * apply for value in written) or (ONE,)
        place = micro_batch_places(model.micro_batches, graph.unit[rows])
        sites.append(Site(loss, declared, rows, place, code, ratios))
    return Sites(tuple(sites), unreadable)


def _values(
    model: Model, forwards: IntColumn, names_at: Mapping[int, set[str]], unreadable: dict[int, str]
) -> dict[int, dict[str, Coefficient]]:
    """By scale code of the graph what is written for each loss."""
    graph = model.graph
    values: dict[int, dict[str, Coefficient]] = {}
    scaled = forwards[graph.scale[forwards] != 0]
    pairs, first = np.unique(np.stack([graph.stage[scaled], graph.scale[scaled]], axis=1), axis=0, return_index=True)
    for (stage, code), at in zip(pairs.tolist(), first.tolist(), strict=True):
        here = names_at.get(stage, set())
        try:
            written = {name or MAIN_LOSS: factors for name, factors in parse_scale(graph.scales[code]).items()}
            values[code] = {name: model.product(factors, model.block_sizes) for name, factors in written.items()}
            if not written.keys() <= here:
                unknown = ", ".join(sorted(written.keys() - here))
                known = ", ".join(sorted(here)) or "none"
                raise ValueError(f"stage {stage} has no loss `{unknown}`; it has {known}")  # noqa: TRY301
        except ValueError as error:
            unreadable[int(scaled[at])] = str(error)
    return values
