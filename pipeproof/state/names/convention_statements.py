"""AOA statements from one convention's tensors to another's, as a person would write them.

Both conventions list tensors by role. For a role that both have, a statement renames and transposes; where one fuses
tensors that the other keeps separate, it merges or splits. Similar layers share one statement with ``$LAYER_ID``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.specs.model import ModelSpec
from pipeproof.state.names.convention import BIAS, OWN_NAMES, Convention
from pipeproof.state.names.convention_tables import OWN_CONVENTION, convention_of
from pipeproof.state.names.convention_tensors import ConventionTensor, convention_tensors, is_table, weights_of
from pipeproof.state.names.name_codes import NoNamesError

_LAYER, _EXPERT = "$LAYER_ID", "$EXPERT_ID"
_QKV = ("q", "k", "v")
_FUSED_HEADS = frozenset({"qkv", "qkv_by_kind"})


def statements_between(source: str, target: str, model: ModelSpec) -> str:
    """Return statements that make the tensors of convention ``target`` of those of ``source``, one per line.

    Raises:
        NoNamesError: PP928, a convention has no names for the model, or no statements exist between the two.
    """
    sides = _named_model(source, model), _named_model(target, model)
    if sides[0].convention.padded != sides[1].convention.padded and model.num_token_ids != model.vocab_size:
        raise NoNamesError(
            f"no statement adds or removes the padding of a vocabulary, as needed between `{source}` and `{target}`",
            "go by names alone: `pipeproof state reshard --names`",
        )
    return "".join(f"{statement.text}\n" for statement in _Statements(*sides, model).statements())


@dataclass(frozen=True, slots=True)
class _Statement:
    left: tuple[str, ...]
    right: str
    transposed: bool = False
    attributes: str = ""

    @property
    def text(self) -> str:
        names = ", ".join(f"{name}^T" if self.transposed else name for name in self.left)
        return f"{names} -> {self.right}{self.attributes}"


@dataclass(frozen=True, slots=True)
class _NamedModel:
    convention: Convention
    roles: Mapping[str, Mapping[str, ConventionTensor]]
    """By block and role; of experts the last one."""
    names: frozenset[str]
    num_layers: int

    def name(self, role: str, block: str) -> str:
        return self.convention.name_of(role, block, self.num_layers, _EXPERT)


def _named_model(name: str, model: ModelSpec) -> _NamedModel:
    if name == OWN_NAMES and (model.moe is not None or model.mla is not None):
        what = "one expert of a tensor" if model.moe is not None else "the pairs of rotary positions"
        message = f"no statement takes {what} apart, as pipeproof's own names need it"
        raise NoNamesError(message, "go by names alone: `pipeproof state reshard --names`")
    convention = OWN_CONVENTION if name == OWN_NAMES else convention_of(name, model)
    shapes = {ours: entry.shape for ours, entry in weights_of(model, "float32").items()}
    tensors = convention_tensors(model, shapes, convention, {})
    roles: dict[str, dict[str, ConventionTensor]] = {}
    for tensor in tensors:
        roles.setdefault(tensor.block, {})[tensor.role] = tensor
    names = (convention.name_of(tensor.role, tensor.block, model.num_layers, tensor.expert) for tensor in tensors)
    return _NamedModel(convention, roles, frozenset(names), model.num_layers)


class _Statements:
    def __init__(self, source: _NamedModel, target: _NamedModel, model: ModelSpec) -> None:
        self.source, self.target, self.model = source, target, model

    def statements(self) -> Iterator[_Statement]:
        """Yield all statements, those with ``$LAYER_ID`` where the first layer needs them."""
        blocks = dict.fromkeys((*self.source.roles, *self.target.roles))
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
        """Return the numbers of layers for which the source has a tensor of such a name."""
        number = re.escape(pattern).replace(re.escape(_LAYER), "([0-9]+)", 1).replace(re.escape(_EXPERT), "[0-9]+")
        matches = (re.fullmatch(number, name) for name in self.source.names)
        return {match[1] for match in matches if match is not None}

    def _block(self, block: str, label: str) -> list[_Statement]:
        return [] if block not in self.target.roles else list(self._roles(block, label))

    def _roles(self, block: str, label: str) -> Iterator[_Statement]:
        """Yield the statements of a block, with ``label`` for its name."""
        source, target = self.source.roles[block], self.target.roles[block]
        for role, tensor in target.items():
            kind = role.removesuffix(BIAS)
            suffix = role.removeprefix(kind)
            if role == "proj" and self.source.convention.hidden_first != self.target.convention.hidden_first:
                yield from self._halves_exchanged(label)
            elif role in source:
                yield from self._same_role(role, label, tensor)
            elif tensor.copy_of is not None:
                transposed = self.source.convention is OWN_CONVENTION and tensor.copy_of == "head"
                yield _Statement((self.source.name(tensor.copy_of, ""),), self.target.name(role, label), transposed)
            elif kind == "qkv" and f"q{suffix}" in source:
                yield self._merged([each + suffix for each in _QKV], role, label)
            elif kind in _FUSED_HEADS:
                (other,) = _FUSED_HEADS - {kind}
                yield from self._regrouped(other + suffix, role, label)
            elif kind == "q":
                yield from self._split(f"qkv{suffix}", [each + suffix for each in _QKV], label)
            elif kind.endswith("gate_up"):
                apart = kind.removesuffix("_up"), kind.removesuffix("gate_up") + "up"
                yield self._merged([each + suffix for each in apart], role, label)
            elif kind.endswith("gate"):
                apart = kind, kind.removesuffix("gate") + "up"
                yield from self._split(f"{kind}_up{suffix}", [each + suffix for each in apart], label)
        for role, tensor in source.items():
            if tensor.copy_of is not None and role not in target:
                yield _Statement((self.source.name(role, label),), "_")

    def _same_role(self, role: str, label: str, tensor: ConventionTensor) -> Iterator[_Statement]:
        names = self.source.name(role, label), self.target.name(role, label)
        is_matrix = len(tensor.views[0].shape) == 2 and not is_table(tensor.views[0].source)
        layouts = {named_model.convention.is_transposed(role) for named_model in (self.source, self.target)}
        transposed = is_matrix and len(layouts) > 1
        cut_otherwise = (
            len({role in named_model.convention.fused_by_rank for named_model in (self.source, self.target)}) > 1
        )
        if cut_otherwise:  # with tensor parallelism Paddle's columns differ: each rank has its own
            yield from self._regrouped(role, role, label)
        elif transposed or names[0] != names[1]:
            yield _Statement((names[0],), names[1], transposed)

    def _is_transposed(self, role: str) -> bool:
        return not role.endswith(BIAS) and self.source.convention.transposed != self.target.convention.transposed

    def _merged(self, roles: Sequence[str], role: str, label: str) -> _Statement:
        left = tuple(self.source.name(each, label) for each in roles)
        attributes = self._columns(self.target, role)
        return _Statement(left, self.target.name(role, label), self._is_transposed(role), attributes)

    def _split(self, role: str, roles: Sequence[str], label: str) -> Iterator[_Statement]:
        names = [self.target.name(each, label) for each in roles]
        attributes = self._columns(self.source, role)
        yield _Statement((self.source.name(role, label),), ", ".join(names), attributes=attributes)
        if self._is_transposed(role):
            yield from (_Statement((name,), name, transposed=True) for name in names)

    def _regrouped(self, role: str, role_there: str, label: str) -> Iterator[_Statement]:
        """Take a fused tensor apart, and fuse its parts in the target's order."""
        name = self.source.name(role, label)
        parts = tuple(f"{name}.{part}" for part in (_QKV if role.startswith("qkv") else ("gate", "up")))
        yield _Statement((name,), ", ".join(parts), attributes=self._columns(self.source, role))
        there, attributes = self.target.name(role_there, label), self._columns(self.target, role_there)
        yield _Statement(parts, there, self._is_transposed(role), attributes)

    def _columns(self, named_model: _NamedModel, role: str) -> str:
        """Return the attributes that describe the order of a fused tensor's columns."""
        axis = 0 if named_model.convention.transposed or role.endswith(BIAS) else 1
        if role.removesuffix(BIAS) == "qkv":
            heads = f"num_heads={self.model.num_heads}, num_key_value_groups={self.model.kv_heads}"
            return f", fused_qkv, {heads}{', axis=0' if axis == 0 else ''}"
        return ", fused_ffn" if role in named_model.convention.fused_by_rank else f", axis={axis}"

    def _halves_exchanged(self, label: str) -> Iterator[_Statement]:
        """Swap the halves of the projection that joins hidden state and embedding."""
        names = self.source.name("proj", label), self.target.name("proj", label)
        halves = f"{names[0]}.first", f"{names[0]}.second"
        axes = [1 if named_model.convention.transposed else 0 for named_model in (self.source, self.target)]
        yield _Statement((names[0],), ", ".join(halves), attributes=f", axis={axes[0]}")
        transposed = self.source.convention.transposed != self.target.convention.transposed
        yield _Statement((halves[1], halves[0]), names[1], transposed, f", axis={axes[1]}")
