"""Gradients in numbers: every block of tokens has a random gradient, and the rows add, scale and sum them.

Exact fractions in place of floats. It reads rows, mesh and facts only, and shares no code with the rules.
"""

import random
import re
from fractions import Fraction
from itertools import product

from pipeproof.schedule.ops import OpKind

AXES = ("dp", "ep", "cp", "tp")
ADDED_BY = {OpKind.BACKWARD: "backward", OpKind.BACKWARD_WEIGHT: "backward", OpKind.FORWARD: "forward"}
REDUCING = (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER)


class Numbers:
    """One drawing of token counts and gradients for a graph with its mesh and facts."""

    def __init__(self, rows, groups, mesh, facts, num_micro_batches, seed):
        self.rows, self.groups, self.mesh, self.facts = rows, groups, mesh, facts
        self.num = num_micro_batches
        self.seed = seed
        self.coords = [mesh.coords(rank) for rank in range(len(rows))]
        self.scales = {
            (rank, row.op.stage, row.op.micro_batch): row.scale
            for rank, program in enumerate(rows)
            for row in program
            if row.op.kind is OpKind.FORWARD
        }
        self.owners = {}
        for rank, stage, micro_batch in self.scales:
            self.owners.setdefault((stage, micro_batch), set()).add(rank)

    def size(self, axis):
        return self.mesh.size(axis) if axis in self.mesh.axes else 1

    def draw(self, *key):
        return Fraction(random.Random(f"{self.seed}{key}").randint(1, 10**9))

    def tokens(self, dp, ep, cp, micro_batch):
        return self.draw("tokens", dp, ep, cp, micro_batch)

    def named(self, name, place, micro_batch):
        cps, mbs = range(self.size("cp")), range(self.num)
        dp, ep, cp = place
        match name:
            case "rank_tokens":
                return self.tokens(dp, ep, cp, micro_batch)
            case "micro_batch_tokens":
                return sum(self.tokens(dp, ep, c, micro_batch) for c in cps)
            case "step_tokens":
                return sum(self.tokens(dp, ep, c, m) for c in cps for m in mbs)
            case "global_tokens":
                data = product(range(self.size("dp")), range(self.size("ep")))
                return sum(self.tokens(d, e, c, m) for d, e in data for c in cps for m in mbs)
            case "num_micro_batches":
                return Fraction(self.num)
            case "data_ranks":
                return Fraction(self.size("dp") * self.size("ep"))
        return Fraction(self.size(name))

    def value(self, text, place, micro_batch, loss=""):
        """A written scale as a number; None if it does not scale the loss."""
        for entry in text.split(",") if text else ():
            name, _, body = entry.rpartition(":")
            if name == loss or (name == "" and loss in ("", "main")):
                result, sign = Fraction(1), 1
                for part in re.split(r"([*/])", body):
                    if part in "*/":
                        sign = 1 if part == "*" else -1
                    else:
                        number = Fraction(part) if part[0].isdigit() else self.named(part, place, micro_batch)
                        result = result * number if sign > 0 else result / number
                return result
        return None

    def paths(self, parameter, stage):
        """(loss, axes over which its share is partial) of the gradients of a parameter's copy."""
        data = [a for a in ("dp", "ep", "cp") if a not in parameter.sharded_over]
        if parameter.losses == ():
            return [(None, {*data, *parameter.partial_over})]
        reaching = [loss for loss in self.facts.losses if loss.stage >= stage]
        if parameter.losses is None:
            return [(loss, {*data, *parameter.partial_over}) for loss in reaching]
        return [
            (loss, {*data, *parameter.partial_over, *path.partial_over} - set(parameter.sharded_over))
            for path in parameter.losses
            for loss in reaching
            if loss.name == path.loss
        ]

    def block(self, parameter, stage, loss, partial, at, micro_batch, *, declared):
        """Gradient of a parameter from one loss of the tokens at some coordinates.

        Over an axis where all ranks hold the same, all draw the same; an
        expert draws for the tokens of every ``ep`` rank.
        """
        total = Fraction(0)
        key = tuple((a, at[a]) for a in AXES if a in partial or a in parameter.sharded_over)
        for ep in range(self.size("ep")) if "ep" in parameter.sharded_over else [at["ep"]]:
            of_loss = loss and (loss.name, loss.stage)
            gradient = self.draw("gradient", parameter.name, stage, of_loss, key, ep, micro_batch)
            place = at["dp"], ep, at["cp"]
            total += gradient * self.scale(loss, stage, place, at["tp"], micro_batch, declared=declared)
        return total

    def scale(self, loss, stage, place, tp, micro_batch, *, declared):
        """Factor of one token's loss on a stage: as declared, or as the rows at its coordinates do it."""
        if loss is None:
            return Fraction(1)
        wanted = (*place, tp)
        result, way = None, Fraction(1)
        if not declared:
            for rank in self.owners.get((loss.stage, micro_batch), ()):
                if tuple(self.at(rank).values()) == wanted and result is None:
                    text = self.scales[rank, loss.stage, micro_batch]
                    result = self.value(text, place, micro_batch, loss.name)
                    way = self.way(rank, loss.stage, stage, micro_batch, place)
        return way * (self.value(loss.scale, place, micro_batch) if result is None else result)

    def way(self, rank, top, stage, micro_batch, place):
        """Product of the scales that a gradient meets from stage ``top``, computed by ``rank``, down to ``stage``."""
        result = Fraction(1)
        for here in range(top, stage, -1):
            sent = self.transfer(rank, OpKind.SEND_BACKWARD, here, micro_batch)
            rows = [self.transfer(rank, OpKind.BACKWARD_INPUT, here, micro_batch), sent]
            if sent is not None:
                rank = sent.peer
                rows.append(self.transfer(rank, OpKind.RECV_BACKWARD, here - 1, micro_batch))
            for row in rows:
                if row is not None and row.scale:
                    result *= self.value(row.scale, place, micro_batch)
        return result

    def transfer(self, rank, kind, stage, micro_batch):
        """The row of a kind for a stage and micro-batch on a rank; None where there is none."""
        wanted = (kind, stage, micro_batch)
        return next((row for row in self.rows[rank] if row.op[:3] == wanted), None)

    def at(self, rank):
        return {axis: self.coords[rank].get(axis, 0) for axis in AXES}

    def expected(self, parameter, rank):
        """The declared gradient of a parameter as ``rank`` should read it."""
        total, here = Fraction(0), self.at(rank)
        for stage in parameter.stages:
            for loss, partial in self.paths(parameter, stage):
                lines = [range(self.size(axis)) if axis in partial else [here[axis]] for axis in AXES]
                for point, micro_batch in product(product(*lines), range(self.num)):
                    at = dict(zip(AXES, point, strict=True))
                    total += self.block(parameter, stage, loss, partial, at, micro_batch, declared=True)
        return total

    def wrong(self):
        """The names of parameters that any rank updates with something else than is declared.

        None where ranks wait for each other in a cycle: the sum is then undefined.
        """
        run = _Run(self)
        states = run.final()
        if run.stuck:
            return None
        return {
            self.facts.parameters[p].name
            for (rank, p), value in states.items()
            if value != self.expected(self.facts.parameters[p], rank)
        }


class _Run:
    """All ranks' programs, as far as they touch gradients."""

    def __init__(self, numbers):
        self.numbers, self.facts = numbers, numbers.facts
        self.moves = [list(self._moves(rank, program)) for rank, program in enumerate(numbers.rows)]
        self.gradient = {}
        self.read = {}
        self.stuck = False

    def _moves(self, rank, program):
        """(what, row, parameters) in order, each reduction with the key under which its members meet."""
        turns = {}
        listed = {row.op.axis for program in self.numbers.rows for row in program if _is_child(row)}
        for i, row in enumerate(program):
            kind, stage = row.op.kind, row.op.stage
            here = [p for p, parameter in enumerate(self.facts.parameters) if stage in parameter.stages]
            named = [p for p in here if f"grad[{self.facts.parameters[p].name}]" in row.reads + row.writes]
            if kind is OpKind.STEP:
                yield kind, row, named or here, None
                continue
            if kind is OpKind.SCALE_GRAD:
                gradients = [p for p in here if self.facts.parameters[p].made_by == "backward"]
                yield kind, row, named or gradients, None
                continue
            if kind in ADDED_BY:
                yield kind, row, [p for p in here if self.facts.parameters[p].made_by == ADDED_BY[kind]], None
                continue
            if kind is OpKind.REDUCE_GRAD and row.group >= 0 and row.op.axis not in listed:
                covered = named or self._owed(here, row.op.axis)
            elif _is_child(row) and kind in REDUCING:
                owed = self._owed(here, row.op.axis)
                covered = named or owed[row.op.index : row.op.index + 1]
            else:
                continue
            for p in covered:
                turn = turns[row.group, p] = turns.get((row.group, p), -1) + 1
                parent = next((r for r in reversed(program[:i]) if r.op == row.op.target), None)
                yield kind, row, [p], (row.group, p, turn, parent.scale if parent else "")

    def _owed(self, here, axis):
        if axis == "pp":
            return [p for p in here if len(self.facts.parameters[p].stages) > 1]
        return [
            p
            for p in here
            if any(
                axis in partial
                for _, partial in self.numbers.paths(self.facts.parameters[p], self.facts.parameters[p].stages[0])
            )
        ]

    def final(self):
        places = [0] * len(self.moves)
        while any(place < len(moves) for place, moves in zip(places, self.moves, strict=True)):
            moved = False
            for rank, moves in enumerate(self.moves):
                while places[rank] < len(moves) and moves[places[rank]][3] is None:
                    self._alone(rank, *moves[places[rank]][:3])
                    places[rank] += 1
                    moved = True
                if places[rank] < len(moves) and self._meet(rank, places, force=False):
                    moved = True
            if not moved:
                self.stuck = True
                rank = next(r for r, moves in enumerate(self.moves) if places[r] < len(moves))
                self._meet(rank, places, force=True)
        return {key: self.read.get(key, value) for key, value in self.gradient.items()}

    def _alone(self, rank, kind, row, parameters):
        numbers, stage = self.numbers, row.op.stage
        place = tuple(numbers.at(rank)[axis] for axis in ("dp", "ep", "cp"))
        for p in parameters:
            parameter, key = self.facts.parameters[p], (rank, p)
            if kind is OpKind.STEP:
                self.read.setdefault(key, self.gradient.get(key, Fraction(0)))
            elif kind is OpKind.SCALE_GRAD:
                scale = numbers.value(row.scale, place, row.op.micro_batch)
                self.gradient[key] = self.gradient.get(key, Fraction(0)) * (1 if scale is None else scale)
            else:
                at, micro_batch = numbers.at(rank), row.op.micro_batch
                share = sum(
                    numbers.block(parameter, stage, loss, partial, at, micro_batch, declared=False)
                    for loss, partial in numbers.paths(parameter, stage)
                )
                if row.scale and kind is not OpKind.FORWARD:
                    share *= numbers.value(row.scale, place, micro_batch)
                before = Fraction(0) if row.reduction == "overwrite" else self.gradient.get(key, Fraction(0))
                self.gradient[key] = before + share

    def _meet(self, rank, places, *, force):
        """Sum where all members that will ever come are there; whether that was so."""
        _, _, _, (group, p, turn, _) = self.moves[rank][places[rank]]
        group_ranks = self.numbers.groups[group].ranks
        coming = [
            one
            for one in dict.fromkeys((*group_ranks, rank))
            if any(m[3] is not None and m[3][:3] == (group, p, turn) for m in self.moves[one])
        ]
        there = [
            one
            for one in coming
            if places[one] < len(self.moves[one]) and (self.moves[one][places[one]][3] or ())[:3] == (group, p, turn)
        ]
        if len(there) < len(coming) and not force:
            return False
        total = sum(self.gradient.get((one, p), Fraction(0)) for one in there)
        for one in there:
            _, own, _, (*_, parents) = self.moves[one][places[one]]
            result = total / len(group_ranks) if own.reduction == "avg" else total
            for text in (own.scale, parents):
                result *= self.numbers.value(text, (0, 0, 0), 0) if text else 1
            self.gradient[one, p] = result
            places[one] += 1
        return True


def _is_child(row):
    return row.op.target is not None and row.op.target.kind is OpKind.REDUCE_GRAD
