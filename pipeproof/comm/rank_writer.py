"""The whole program of one rank, written with blocks around its computations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeproof.comm.rank_blocks import RankBlocks, Work
from pipeproof.schedule.blocks import ANY, ANY_OTHER, Blocks
from pipeproof.schedule.columns import NONE, Row
from pipeproof.schedule.ops import Op, OpKind
from pipeproof.specs.schedule import Side


class RankWriter:
    """Uses the blocks of one rank, each written when it is first used.

    ``posts`` has for some places of the rank's program whose inputs are to be
    received before the computation there; before any other one its own is.
    ``turns`` is the cycle in which overlapped computations take turns; without
    it each of them is whole.
    """

    def __init__(
        self,
        rank: RankBlocks,
        blocks: Blocks,
        posts: Mapping[int, Sequence[Op]],
        turns: Sequence[Side] | None = None,
    ) -> None:
        self._rank, self._blocks, self._posts, self._turns = rank, blocks, posts, turns
        self._single: dict[Work, tuple[int, int | None]] = {}
        self._others: dict[tuple[tuple[Work, ...], bool], int] = {}
        self._receives: dict[Work, int] = {}
        self._waits: dict[Work, int | None] = {}
        self._alike: dict[tuple[OpKind, int], Work] = {}
        """The keys of a stage's computations that are the same for all work items."""
        self._late: list[tuple[int, int, int]] = []

    def write(self, rows: Sequence[Row] | None, reduce_axes: Sequence[str]) -> None:
        """Append the rank's program.

        ``rows`` are its computations where they have places in a file, or
        overlap: then the two are in one batch.
        """
        step_end = self._rank.step_end
        ready_behind = step_end.ready_behind(reduce_axes)
        if rows is None and not self._posts:
            for op in self._rank.program:
                self._use_one(op)
                if stages := ready_behind.get(op):
                    self._blocks.use(self._blocks.add(list(step_end.reduce_concurrently(op, stages, reduce_axes))))
        else:
            place = 0
            for computations in _overlapping(rows if rows is not None else map(Row, self._rank.program)):
                self._use(computations, place)
                place += len(computations)
                for row in computations:
                    if stages := ready_behind.get(row.op):
                        self._blocks.use(
                            self._blocks.add(list(step_end.reduce_concurrently(row.op, stages, reduce_axes)))
                        )
        for block, work_item, origin in self._late:  # sends that are waited for at the end of the step, in their order
            self._blocks.use(block, work_item, origin)
        for update in step_end.updates(reduce_axes):
            self._blocks.use(self._blocks.add(update))
        self._blocks.end_rank()

    def _use_one(self, op: Op, origin: int = NONE) -> None:
        """One computation, with all rows around it."""
        work_item, work = self._work(op)
        blocks = self._single.get(work)
        if blocks is None:
            blocks = self._single[work] = self._blocks.add(list(self._rows([work]))), self._wait_block(work)
        block, wait = blocks
        self._blocks.use(block, work_item, origin)
        if wait is not None:
            self._late.append((wait, work_item, origin))

    def _use(self, rows: Sequence[Row], place: int) -> None:
        """One computation, or two that overlap, from a place of the program on."""
        posts = [self._posts.get(place + i) for i in range(len(rows))]
        if len(rows) == 1 and posts[0] is None:
            self._use_one(rows[0].op, rows[0].origin)
            return
        work_items, works = zip(*(self._work(row.op) for row in rows), strict=True)
        is_posted = any(users is not None for users in posts)
        if is_posted:
            for users, row in zip(posts, rows, strict=True):
                for computed in (row.op,) if users is None else users:
                    self._receive(computed, row.origin)
        block = self._others.get((works, is_posted))
        if block is None:
            block = self._blocks.add(list(self._rows(works, received=is_posted)))
            self._others[works, is_posted] = block
        self._blocks.use(
            block, work_items[0], rows[0].origin, other=work_items[1] if len(rows) > 1 else NONE, batch=rows[0].batch
        )
        for work, row, work_item in zip(works, rows, work_items, strict=True):
            wait = self._wait_block(work)
            if wait is not None:
                self._late.append((wait, work_item, row.origin))

    def _receive(self, computed: Op, origin: int) -> None:
        """Post the receives of what a computation needs, if it needs any."""
        work_item, work = self._work(computed)
        block = self._receives.get(work)
        if block is None:
            block = self._receives[work] = self._blocks.add(list(self._rank.receive(work, ANY)))
        self._blocks.use(block, work_item, origin)

    def _work(self, op: Op) -> tuple[int, Work]:
        """The work item of a computation, and the key of the rows around it."""
        work_item = self._rank.work_item(op)
        if self._rank.work_items_differ:
            return work_item, self._rank.work(op, work_item)
        work = self._alike.get((op.kind, op.stage))
        if work is None:
            work = self._alike[op.kind, op.stage] = self._rank.work(op, 0)
        return work_item, work

    def _rows(self, works: Sequence[Work], *, received: bool = False) -> Iterator[Row]:
        batches = (ANY, ANY_OTHER)[: len(works)]
        before = self._rank.ready if received else self._rank.before
        for work, batch in zip(works, batches, strict=True):
            yield from before(work, batch)
        if self._turns is not None and len(works) > 1:
            yield from self._rank.take_turns(works, batches, self._turns)
        else:
            for work, batch in zip(works, batches, strict=True):
                yield from self._rank.compute(work, batch)
        for work, batch in zip(works, batches, strict=True):
            yield from self._rank.after(work, batch)

    def _wait_block(self, work: Work) -> int | None:
        if work not in self._waits:
            send = self._rank.send_of(work, ANY)
            late = send is not None and self._rank.waits_late(send)
            rows = list(self._rank.wait(send, work.variant)) if send is not None and late else []
            self._waits[work] = self._blocks.add(rows) if rows else None
        return self._waits[work]


def _overlapping(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Computations one by one, those that overlap in twos."""
    pair: list[Row] = []
    for row in rows:
        pair.append(row)
        if row.batch == NONE or len(pair) > 1:
            yield pair
            pair = []
