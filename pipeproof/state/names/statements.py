"""AOA statements from one convention's tensors to another's, as a person would write them.

Both conventions say of what a tensor is made by its role. Where a role is the
same a statement renames and transposes; where one fuses what the other keeps
apart it merges or splits. Layers that are alike share one with ``$LAYER_ID``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.specs.model import ModelSpec
from pipeproof.state.names.codes import NoNamesError
from pipeproof.state.names.parts import Part, parts_of, weights_of
from pipeproof.state.names.tables import OURS, OWN, Convention, convention_of

_LAYER, _EXPERT = "$LAYER_ID", "$EXPERT_ID"
_QKV = ("q", "k", "v")


def statements_between(one: str, other: str, model: ModelSpec) -> str:
    """Statements that make the tensors of convention ``other`` of those of ``one``, one a line.

    Raises:
        NoNamesError: PP928, one of the conventions has no names for the model, or what is between the two cannot be
            said by statements.
    """
    sides = _side(one, model), _side(other, model)
    if sides[0].convention.padded != sides[1].convention.padded and model.num_token_ids != model.vocab_size:
        raise NoNamesError(
            f"no statement cuts the padding of a vocabulary off, or adds it, as between `{one}` and `{other}`",
            "go by names alone: `pipeproof reshard --names`",
        )
    return "".join(f"{statement.text}\n" for statement in _Between(*sides, model).statements())


@dataclass(frozen=True, slots=True)
class _Statement:
    left: tuple[str, ...]
    right: str
    turned: bool = False
    attributes: str = ""

    @property
    def text(self) -> str:
        names = ", ".join(f"{name}^T" if self.turned else name for name in self.left)
        return f"{names} -> {self.right}{self.attributes}"


@dataclass(frozen=True, slots=True)
class _Side:
    convention: Convention
    roles: Mapping[str, Mapping[str, Part]]
    """By block and role; of experts the last one."""
    names: frozenset[str]
    num_layers: int

    def name(self, role: str, block: str) -> str:
        return self.convention.name_of(role, block, self.num_layers, _EXPERT)


def _side(name: str, model: ModelSpec) -> _Side:
    if name == OURS and (model.moe is not None or model.mla is not None):
        what = "one expert of a tensor" if model.moe is not None else "the pairs of rotary positions"
        message = f"no statement takes {what} apart, as pipeproof's own names need it"
        raise NoNamesError(message, "go by names alone: `pipeproof reshard --names`")
    convention = OWN if name == OURS else convention_of(name, model)
    shapes = {ours: entry.shape for ours, entry in weights_of(model, "float32").items()}
    parts = parts_of(model, shapes, convention, {})
    roles: dict[str, dict[str, Part]] = {}
    for part in parts:
        roles.setdefault(part.block, {})[part.role] = part
    names = (convention.name_of(part.role, part.block, model.num_layers, part.expert) for part in parts)
    return _Side(convention, roles, frozenset(names), model.num_layers)


class _Between:
    def __init__(self, one: _Side, other: _Side, model: ModelSpec) -> None:
        self.one, self.other, self.model = one, other, model

    def statements(self) -> Iterator[_Statement]:
        """Every statement, one with ``$LAYER_ID`` where the first layer needs it."""
        blocks = dict.fromkeys((*self.one.roles, *self.other.roles))
        patterns = {block: self._block(block, f"layer.{_LAYER}") for block in blocks if block.startswith("layer.")}
        numbers: dict[_Statement, set[str]] = {}
        for block, found in patterns.items():
            for pattern in found:
                numbers.setdefault(pattern, set()).add(block.removeprefix("layer."))
        shared = {pattern for pattern, own in numbers.items() if all(self._there(name) <= own for name in pattern.left)}
        done = set[_Statement]()
        for block in blocks:
            statements = self._block(block, block)
            for statement, pattern in zip(statements, patterns.get(block, statements), strict=True):
                if pattern not in shared:
                    yield statement
                elif pattern not in done:
                    done.add(pattern)
                    yield pattern

    def _there(self, pattern: str) -> set[str]:
        """The numbers of layers for which the source has a tensor of such a name."""
        number = re.escape(pattern).replace(re.escape(_LAYER), "([0-9]+)", 1).replace(re.escape(_EXPERT), "[0-9]+")
        matches = (re.fullmatch(number, name) for name in self.one.names)
        return {match[1] for match in matches if match is not None}

    def _block(self, block: str, label: str) -> list[_Statement]:
        return [] if block not in self.other.roles else list(self._roles(block, label))

    def _roles(self, block: str, label: str) -> Iterator[_Statement]:
        """What a block needs, with ``label`` for its name."""
        one, other = self.one.roles[block], self.other.roles[block]
        for role, part in other.items():
            if role == "proj" and self.one.convention.hidden_first != self.other.convention.hidden_first:
                yield from self._halves_exchanged(label)
            elif role in one:
                yield from self._same_role(role, label, part)
            elif part.copy_of is not None:
                turned = self.one.convention is OWN and part.copy_of == "head"
                yield _Statement((self.one.name(part.copy_of, ""),), self.other.name(role, label), turned)
            elif role == "qkv":
                yield self._merged(_QKV, role, label, self._heads(self.other))
            elif role == "q":
                yield from self._split("qkv", _QKV, label, self._heads(self.one))
            elif role.endswith("gate_up"):
                apart = role.removesuffix("_up"), role.removesuffix("gate_up") + "up"
                yield self._merged(apart, role, label, self._gate_and_up(self.other, role))
            elif role.endswith("gate"):
                yield from self._split(f"{role}_up", (role, role.removesuffix("gate") + "up"), label, None)
        for role, part in one.items():
            if part.copy_of is not None and role not in other:
                yield _Statement((self.one.name(role, label),), "_")

    def _turned(self, role: str, part: Part) -> bool:
        is_matrix = len(part.views[0].shape) == 2 and part.views[0].source != "embed.weight"
        return is_matrix and self.one.convention.turns(role) != self.other.convention.turns(role)

    def _same_role(self, role: str, label: str, part: Part) -> Iterator[_Statement]:
        names = self.one.name(role, label), self.other.name(role, label)
        turned = self._turned(role, part)
        cut_otherwise = len({role in side.convention.fused_by_rank for side in (self.one, self.other)}) > 1
        if cut_otherwise:  # cut for tensor parallelism Paddle has other columns: each rank's own
            halves = f"{names[0]}.gate", f"{names[0]}.up"
            yield _Statement((names[0],), ", ".join(halves), attributes=self._gate_and_up(self.one, role))
            yield _Statement(halves, names[1], turned, attributes=self._gate_and_up(self.other, role))
        elif turned or names[0] != names[1]:
            yield _Statement((names[0],), names[1], turned)

    def _merged(self, roles: Sequence[str], role: str, label: str, attributes: str) -> _Statement:
        turned = self.one.convention.turned != self.other.convention.turned
        left = tuple(self.one.name(each, label) for each in roles)
        return _Statement(left, self.other.name(role, label), turned, attributes)

    def _split(self, role: str, roles: Sequence[str], label: str, attributes: str | None) -> Iterator[_Statement]:
        names = [self.other.name(each, label) for each in roles]
        attributes = self._gate_and_up(self.one, role) if attributes is None else attributes
        yield _Statement((self.one.name(role, label),), ", ".join(names), attributes=attributes)
        if self.one.convention.turned != self.other.convention.turned:
            yield from (_Statement((name,), name, turned=True) for name in names)

    def _heads(self, side: _Side) -> str:
        heads = f"num_heads={self.model.num_heads}, num_key_value_groups={self.model.kv_heads}"
        return f", fused_qkv, {heads}{', axis=0' if side.convention.turned else ''}"

    def _gate_and_up(self, side: _Side, role: str) -> str:
        by_rank = role in side.convention.fused_by_rank
        return ", fused_ffn" if by_rank else f", axis={0 if side.convention.turned else 1}"

    def _halves_exchanged(self, label: str) -> Iterator[_Statement]:
        """Of what joins hidden state and embedding, which the two have in different order."""
        names = self.one.name("proj", label), self.other.name("proj", label)
        halves = f"{names[0]}.first", f"{names[0]}.second"
        axes = [1 if side.convention.turned else 0 for side in (self.one, self.other)]
        yield _Statement((names[0],), ", ".join(halves), attributes=f", axis={axes[0]}")
        turned = self.one.convention.turned != self.other.convention.turned
        yield _Statement((halves[1], halves[0]), names[1], turned, f", axis={axes[1]}")
