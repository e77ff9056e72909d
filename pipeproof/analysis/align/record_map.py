"""Partners of the tensors of two records: names, splits and merges by AOA statements, and layouts that shapes show."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from math import nan, prod, sqrt
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from pipeproof.analysis.align.array_digests import Array
from pipeproof.analysis.align.read_record import Record, Values
from pipeproof.analysis.align.record_format import AlignmentError, Recorded, RecordedStep
from pipeproof.diagnostics.finding import Finding, Location
from pipeproof.diagnostics.source import SourceMap, UnreadableTextError, read_utf8
from pipeproof.diagnostics.yaml_tree import parse_text, read_model
from pipeproof.specs.model import ModelSpec
from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.expand import NameList, nearest
from pipeproof.state.aoa.read_statements import Locator, in_scalar, parse_statement, read_statements
from pipeproof.state.aoa.statements import Name, Program, Statement
from pipeproof.state.aoa.tensor_families import TensorMeta
from pipeproof.state.names.convention_maps import statements_between
from pipeproof.state.names.convention_tables import require_convention
from pipeproof.state.regions import whole_region
from pipeproof.state.state_codes import UNKNOWN_TENSOR, UNREADABLE, AoaError, NoNamesError
from pipeproof.state.tensor_map import TensorMap

_MAX_BYTES = 2**20


class MapFile(BaseModel):
    """The YAML file of ``state align --map``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: dict[str, Any] = {}
    """Keys of a plan's ``model``, where the records do not show them, such as ``num_heads``."""
    statements: tuple[str, ...] = ()
    """AOA statements from A's to B's parameters and modules."""
    swap_dims: tuple[str, ...] = ()
    """Patterns of A's modules whose tensors have their first two dims, sequence and batch, exchanged."""
    scale: dict[str, Fraction] = {}
    """Factors of A's numbers by pattern, of parameters, modules or ``main``, the losses."""
    alone: tuple[str, ...] = ()
    """Patterns of modules and parameters of either side that have no partner on purpose."""
    _source: SourceMap | None = PrivateAttr(None)

    def location(self, *path: str | int) -> Location | None:
        """Line of a key or an entry; None for a map that was not read from a file."""
        return None if self._source is None else self._source.locate(path)

    def program(self) -> Iterator[Statement]:
        """Parse the statements.

        Raises:
            AoaError: PP180, one cannot be read.
        """
        source = self._source
        for number, text in enumerate(self.statements):
            location = self.location("statements", number)
            in_text: Locator = Location("", number + 1).part
            yield parse_statement(
                text, in_text if source is None or location is None else in_scalar(source, location, text)
            )


def read_map(path: Path) -> MapFile:
    """Read a map.

    Raises:
        AoaError: PP180, it cannot be read, or has other keys.
    """
    fix = "its keys are model, statements, swap_dims, scale and alone; `state align --draft` proposes one"
    try:
        tree = parse_text(read_utf8(str(path), _MAX_BYTES, "map"), str(path))
    except UnreadableTextError as error:
        raise AoaError(UNREADABLE.finding(error.message, error.location, fix)) from None
    map_file = read_model(tree, MapFile, "a map", lambda message, at: UNREADABLE.finding(message, at, fix))
    if isinstance(map_file, list):
        raise AoaError(*map_file)
    map_file._source = tree.source  # noqa: SLF001 - where its keys are
    return map_file


@dataclass(slots=True)
class Side:
    """One side of a pair: a tensor in the partner's names and layout, and the changes."""

    recorded: Recorded
    load: Callable[[], Values | None]
    how: str = ""
    is_oriented: bool = False
    """True if statements transposed it, or deliberately did not."""

    def values(self) -> Values | None:
        """The tensor itself, None where it was not kept; it is read at the first call."""
        loaded = self.load()
        self.load = lambda: loaded
        return loaded


Pair: TypeAlias = tuple[Side, Side]


@dataclass(slots=True)
class Pairs:
    """The tensors of a step with their partners, in A's order, and those without."""

    pairs: list[Pair]
    only_a: list[Recorded]
    only_b: list[Recorded]
    on_purpose: int = 0


class RecordMap:
    """Map of the tensors of record ``a`` to the tensors of ``b``.

    Args:
        a: the record whose tensors are renamed, split, merged and transposed.
        b: the record whose names and shapes count.
        names: the naming conventions of both, if given.
        file: a person's map.

    Raises:
        AlignmentError: a convention is unknown, or does not have such a model, or its sizes are unknown.
        AoaError: PP180, a statement cannot be read.
    """

    def __init__(self, a: Record, b: Record, names: tuple[str, str] | None = None, file: MapFile | None = None) -> None:
        self._a, self._b, self._file = a, b, file or MapFile()
        statements = [] if names is None else [*convention_statements(a, b, names, self._file.model)]
        conventions = read_statements("\n".join(statements), "").statements
        self._weights = Program((*conventions, *self._file.program()))
        self._modules = Program(tuple(_of_modules(self._weights)))
        self._maps: dict[Any, Mapping[str, TensorMap]] = {}
        self._alone: set[tuple[str, str]] = set()
        """(``A`` or ``B``, module) of inputs that another input with the same tensor represents."""
        self._is_checked = False

    def paired(self, a: RecordedStep, b: RecordedStep, is_compared: Callable[[Recorded], bool]) -> Pairs:
        """Partners of a step's tensors.

        Raises:
            AoaError: a statement does not fit the tensors.
        """
        if not self._is_checked:
            self._require_names(a, b)
            self._is_checked = True
        ours = self._mapped([t for t in a.tensors if is_compared(t)])
        theirs = {t.key: t for t in b.tensors if is_compared(t)}
        calls = [Counter(map(_call, each)) for each in ((side.recorded for side in ours), theirs.values())]
        pairs, lonely = list[Pair](), list[Recorded]()
        for side in ours:
            partner = theirs.get(side.recorded.key)
            pair = None if partner is None else self._fitted(side, _of_record(self._b, partner))
            call = _call(side.recorded)
            is_one_call = not self._weights.statements and calls[0][call] == calls[1][call]  # else one may have a mask
            forms = [(each.recorded.shape, each.recorded.dtype) for each in pair or ()]
            if pair is None or (side.recorded.piece and not (is_one_call and forms[0] == forms[1])):
                lonely.append(side.recorded)
            else:
                pairs.append(pair)
                del theirs[side.recorded.key]
        keys = {side.recorded.key for side in ours} | {t.key for t in b.tensors}
        only_a = [t for t in lonely if not self._is_alone(t, "A", keys)]
        only_b = [t for t in theirs.values() if not self._is_alone(t, "B", keys)]
        return Pairs(pairs, only_a, only_b, len(lonely) - len(only_a) + len(theirs) - len(only_b))

    def _require_names(self, a: RecordedStep, b: RecordedStep) -> None:
        """Raise unless every pattern and statement of a person's map names a tensor.

        Raises:
            AoaError: PP180, two patterns scale one tensor; PP181, a name of the map is in neither record.
        """
        names = [
            dict.fromkeys(name for t in step.tensors for name in (t.parameter, t.layer) if name) for step in (a, b)
        ]
        either = {**names[0], **names[1]}
        file, findings = self._file, list[Finding]()
        scaled = [(key, name) for key in file.scale for name in ("main", *names[0]) if fnmatchcase(name, key)]
        patterns: list[tuple[str, str | int, str, Mapping[str, None], str]] = [
            *(("swap_dims", i, pattern, names[0], "A") for i, pattern in enumerate(file.swap_dims)),
            *(("scale", key, key, {**names[0], "main": None}, "A") for key in file.scale),
            *(("alone", i, pattern, either, "A or B") for i, pattern in enumerate(file.alone)),
        ]
        for key, index, pattern, candidates, side in patterns:
            if not any(fnmatchcase(name, pattern) for name in candidates):
                findings.append(_unknown(f"`{key}`: `{pattern}`", side, pattern, candidates, file.location(key, index)))
        name, count = max(Counter(name for _, name in scaled).items(), key=lambda each: each[1], default=("", 0))
        if count > 1:
            keys = " and ".join(f"`{key}`" for key, each in scaled if each == name)
            fix = "let one pattern match it, and no other"
            findings.append(UNREADABLE.finding(f"`scale`: {keys} match `{name}`", file.location("scale"), fix))
        statements = [*file.program()]
        left = [name for statement in statements for name in statement.left]
        right = [name for statement in statements for name in statement.right]
        findings += [*_unknown_names("A", left, right, names[0]), *_unknown_names("B", right, left, names[1])]
        if findings:
            raise AoaError(*findings)

    def loss_factor(self) -> Fraction:
        """Factor of A's losses."""
        return self._file.scale.get("main", Fraction(1))

    def _is_alone(self, tensor: Recorded, side: str, keys: set[str]) -> bool:
        """True if a tensor needs no partner.

        A pattern lists it; it is a further tensor of one call, such as a mask; or it belongs to a module without a
        partner, if names are mapped: an implementation may have modules of its own, but no weights.
        """
        name = tensor.parameter or tensor.layer
        if any(fnmatchcase(name, pattern) for pattern in self._file.alone) or (side, name) in self._alone:
            return True
        if self._weights.statements and not tensor.parameter:
            return True
        return bool(tensor.piece) and replace(tensor, piece=0).key in keys

    def _mapped(self, tensors: Sequence[Recorded]) -> list[Side]:
        """A's tensors under B's names."""
        groups: dict[tuple[Any, ...], dict[str, Recorded]] = {}
        for tensor in tensors:
            group = ("",) if tensor.parameter else (tensor.direction, tensor.side, tensor.micro_batch, tensor.piece)
            groups.setdefault(group, {})[tensor.parameter or tensor.layer] = tensor
        order = {id(tensor): position for position, tensor in enumerate(tensors)}
        weights_first = sorted(
            groups.items(), key=lambda each: len(each[0])
        )  # groups that do not fit have a person's names
        sides = [
            (order[id(last)], side) for group, named in weights_first for last, side in self._of_group(group, named)
        ]
        return [side for _, side in sorted(sides, key=lambda each: each[0])]

    def _of_group(self, group: tuple[Any, ...], named: Mapping[str, Recorded]) -> Iterator[tuple[Recorded, Side]]:
        """Each side of a group of tensors whose names differ, with the last tensor that it is made of."""
        is_whole = len(group) == 1
        makes = is_whole or ((group[0] == "forward") == (group[1] == "output") and group[3] == 0)
        key = (is_whole, makes, tuple((name, tensor.shape) for name, tensor in named.items()))
        if key not in self._maps:
            program = self._weights if is_whole else self._modules
            statements = [*_applicable(program if makes else self._first_of_each(program), named)]
            metas = {name: TensorMeta(tensor.dtype, tensor.shape) for name, tensor in named.items()}
            self._maps[key] = program_map(Program(tuple(statements)), metas, None).tensors if statements else {}
        made = self._maps[key]
        if not made:
            yield from ((t, self._scaled(_of_record(self._a, t), t.parameter or t.layer)) for t in named.values())
        for name, tensor_map in made.items():
            yield self._made(name, tensor_map, named)

    def _first_of_each(self, program: Program) -> Program:
        """Statements for the inputs of modules: a split or merged module has the same input as each of its parts."""
        renames = []
        for statement in program.statements:
            renames.append(Statement((statement.left[0],), (statement.right[0],)))
            self._alone |= {("A", name.text) for name in statement.left[1:]}
            self._alone |= {("B", name.text) for name in statement.right[1:]}
        return Program(tuple(renames))

    def _made(self, name: str, made: TensorMap, named: Mapping[str, Recorded]) -> tuple[Recorded, Side]:
        sources = [named[copy.source] for copy in made.copies if copy.source is not None]
        last = max(sources, key=lambda tensor: tensor.time)
        to = _renamed(last, name)
        only = made.copies[0]
        if len(made.copies) == 1 and only.region == whole_region(last.shape) and only.permutation is None:
            return last, self._scaled(Side(to, lambda: self._a.values(last)), last.parameter or last.layer)
        taken: dict[str, int] = {}
        for copy in made.copies:
            taken[copy.source or ""] = taken.get(copy.source or "", 0) + copy.region.numel
        is_all = all(
            source and named[source].norm >= 0 and prod(named[source].shape) == n for source, n in taken.items()
        )
        norm = sqrt(sum(named[source].norm ** 2 for source in taken)) if is_all else nan
        recorded = replace(to, shape=made.shape, md5="", norm=norm, shards=())

        def load() -> Values | None:
            arrays = {source: self._a.values(named[source]) for source in taken}
            whole = np.zeros(made.shape, dtype=next((v.whole.dtype for v in arrays.values() if v is not None), None))
            for copy in made.copies:
                values = arrays[copy.source or ""]
                if values is None:
                    return None
                part = values.whole[copy.source_region.slices]
                whole[copy.region.slices] = part if copy.permutation is None else part.transpose(copy.permutation)
            return Values(whole, {})

        side = Side(recorded, load, f"made of {', '.join(taken)}", is_oriented=True)
        return last, self._scaled(side, sources[0].parameter or sources[0].layer)

    def _scaled(self, side: Side, name: str) -> Side:
        factor = next((f for pattern, f in self._file.scale.items() if fnmatchcase(name, pattern)), Fraction(1))
        if factor == 1:
            return side
        recorded = replace(side.recorded, md5="", norm=side.recorded.norm * float(abs(factor)), shards=())
        return _changed(side, recorded, lambda x: (x * float(factor)).astype(x.dtype), f"times {factor}")

    def _fitted(self, a: Side, b: Side) -> Pair:
        """Both sides in one shape, as shapes, ranks' parts or the map require."""
        swap = not a.recorded.parameter and any(fnmatchcase(a.recorded.layer, p) for p in self._file.swap_dims)
        if swap and len(a.recorded.shape) > 1:
            a = _swapped(a)
        if a.recorded.shape != b.recorded.shape:
            a, b = _concatenated(a, b), b
            b = _concatenated(b, a)
        turned = not a.is_oriented and a.recorded.in_first != b.recorded.in_first
        if a.recorded.parameter:
            is_matrix = turned and a.recorded.shape[::-1] == b.recorded.shape and len(b.recorded.shape) == 2
            return (_swapped(a, "transposed") if is_matrix else a), b
        return _fitted_to(a, b.recorded) if a.recorded.shape != b.recorded.shape else a, b


def _unknown_names(
    side: str, written: Iterable[Name], others: Iterable[Name], names: Mapping[str, None]
) -> Iterator[Finding]:
    """Names of statements that a side does not have, except intermediate tensors."""
    listed, intermediate = NameList(names), {name.text for name in others}
    for name in written:
        forms = name, Name(_module(name.text))
        if not (name.is_nothing or name.text in intermediate or any(map(listed.ids_of, forms))):
            yield _unknown(f"`{name.text}`", side, name.text, names, name.location)


def _unknown(what: str, side: str, name: str, candidates: Iterable[str], location: Location | None) -> Finding:
    near = nearest(name, candidates)
    fix = f"did you mean `{near}`?" if near else "names are as in `state align --draft` and the lines of a record"
    return UNKNOWN_TENSOR.finding(f"{what} matches no module or parameter of {side} in the first step", location, fix)


def _call(tensor: Recorded) -> tuple[str, ...]:
    """The part of a key that all tensors of one side of a call share."""
    return tensor.parameter, tensor.layer, tensor.direction, tensor.side, str(tensor.micro_batch)


def _renamed(tensor: Recorded, name: str) -> Recorded:
    if not tensor.parameter:
        return replace(tensor, layer=name)
    return replace(tensor, parameter=name, layer=name.rpartition(".")[0])


def _of_record(record: Record, tensor: Recorded) -> Side:
    return Side(tensor, lambda: record.values(tensor))


def _changed(side: Side, recorded: Recorded, change: Callable[[Array], Array], how: str) -> Side:
    def load() -> Values | None:
        values = side.values()
        if values is None:
            return None
        return Values(change(values.whole), {rank: change(part) for rank, part in values.others.items()})

    return Side(recorded, load, ", ".join(filter(None, (side.how, how))), side.is_oriented)


def _swapped(side: Side, how: str = "dims 0 and 1 exchanged") -> Side:
    shape = side.recorded.shape
    recorded = replace(side.recorded, shape=(shape[1], shape[0], *shape[2:]), md5="", shards=())
    return _changed(side, recorded, lambda x: np.swapaxes(x, 0, 1), how)


def _fitted_to(side: Side, other: Recorded) -> Side:
    """The side in the other's shape, if one exchange of dims or one merge of them makes it; else unchanged."""
    mine, theirs = side.recorded.shape, other.shape
    for candidate in (side, _swapped(side)) if len(mine) > 1 else (side,):
        shape = candidate.recorded.shape
        if shape == theirs:
            return candidate
        if mine and theirs and prod(mine) == prod(theirs) and mine[-1] == theirs[-1] and _merges(shape, theirs):
            recorded = replace(candidate.recorded, shape=theirs, shards=())
            return _changed(candidate, recorded, lambda x: x.reshape(theirs), f"as {list(theirs)}")
    return side


def _merges(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """True if one shape is the other with dims merged, or with dims of one element."""
    short, long = sorted(([n for n in each if n > 1] for each in (shape, other)), key=len)
    position = 0
    for size in short:
        product = 1
        while product < size and position < len(long):
            product *= long[position]
            position += 1
        if product != size:
            return False
    return position == len(long)


def _concatenated(side: Side, other: Side) -> Side:
    """The parts of ranks, joined along the dim that is longer by their number on the other side."""
    shards = side.recorded.shards
    ranks = list(dict.fromkeys(shard.rank for shard in shards))
    shape, theirs = side.recorded.shape, other.recorded.shape
    if len({shard.md5 for shard in shards}) < 2 or len({shard.index for shard in shards}) > 1:
        return side
    for target in (theirs, (theirs[1], theirs[0], *theirs[2:]) if len(theirs) > 1 else theirs):
        longer = [d for d in range(len(shape)) if len(target) == len(shape) and target[d] != shape[d]]
        if len(longer) == 1 and target[longer[0]] == len(ranks) * shape[longer[0]]:
            break
    else:
        return side
    dim = longer[0]

    def load() -> Values | None:
        values = side.values()
        if values is None:
            return None
        return Values(np.concatenate([values.others.get(rank, values.whole) for rank in ranks], axis=dim), {})

    recorded = replace(side.recorded, shape=target, md5="", norm=nan, shards=())
    return Side(recorded, load, ", ".join(filter(None, (side.how, f"parts of {len(ranks)} ranks along dim {dim}"))))


# --- Statements ---


def _of_modules(weights: Program) -> Iterator[Statement]:
    """Statements for the outputs of modules, from the statements of their weights: split weights make split results.

    Modules that hold such modules are renamed with them, up to the block.
    """
    above: dict[str, str] = {}
    made: set[str] = set()
    for statement in weights.statements:
        if any(name.text.endswith((".bias", "_bias")) for name in statement.names):
            continue
        left, right = ([Name(_module(n.text)) for n in side] for side in (statement.left, statement.right))
        if [n.text for n in left] == [n.text for n in right] or made & {n.text for n in right}:
            continue
        made |= {n.text for n in right}
        is_cut = len(left) > 1 or len(right) > 1
        axis = _LAST if is_cut and (statement.fused is not None or statement.axis is not None) else None
        yield Statement(tuple(left), tuple(right), axis, fused=statement.fused, location=statement.location)
        mine, theirs = left[0].text, right[0].text
        are_modules = mine != statement.left[0].text and theirs != statement.right[0].text
        while are_modules and not is_cut and _LAYER in _parent(mine) and _LAYER in _parent(theirs):
            mine, theirs = _parent(mine), _parent(theirs)
            if mine != theirs and mine not in above and theirs not in above.values():
                above[mine] = theirs
                yield Statement((Name(mine),), (Name(theirs),))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


_LAYER = "$LAYER_ID"
_LAST = 2
"""The last dim of a linear layer's output, [batch, sequence, ..] or [sequence, batch, ..]."""


def _module(name: str) -> str:
    return name.removesuffix(".weight").replace(".weight.", ".")


def _applicable(program: Program, named: Iterable[str]) -> Iterator[Statement]:
    """Statements whose tensors exist, or are made by an earlier one."""
    names, made = NameList(named), set[str]()
    for statement in program.statements:
        if all(name.text in made or names.ids_of(name) for name in statement.left if not name.is_nothing):
            made |= {name.text for name in statement.right}
            yield statement


_LOCAL_MEGATRON = {
    f"decoder.layers.{_LAYER}.input_layernorm": f"decoder.layers.{_LAYER}.self_attention.linear_qkv.layer_norm_",
    f"decoder.layers.{_LAYER}.pre_mlp_layernorm": f"decoder.layers.{_LAYER}.mlp.linear_fc1.layer_norm_",
}
"""Megatron-Core's norms in its local layers, and the names of Transformer Engine's, as in the convention."""


def convention_statements(a: Record, b: Record, names: tuple[str, str], declared: Mapping[str, Any]) -> Iterator[str]:
    """Statements between two conventions for the model that records show, with ``declared`` keys of a plan's model.

    Raises:
        AlignmentError: the records do not show the model, or a convention is unknown or does not have it.
    """
    try:
        for name in names:
            require_convention(name)
    except NoNamesError as error:
        raise AlignmentError(f"{error}; {error.findings[0].help}") from error
    model = _model_of(a, b, declared)
    local = [
        (f"{mine}.{kind}", f"{theirs}{kind}") for kind in ("weight", "bias") for mine, theirs in _LOCAL_MEGATRON.items()
    ]
    if names[0] == "megatron":
        yield from (f"{mine} -> {theirs}" for mine, theirs in local)
    try:
        yield from statements_between(*names, model).splitlines()
    except NoNamesError as error:
        raise AlignmentError(f"{error}: name the partners in a map, `--map`") from error
    if names[1] == "megatron":
        yield from (f"{theirs} -> {mine}" for mine, theirs in local)


def _model_of(a: Record, b: Record, declared: Mapping[str, Any]) -> ModelSpec:
    """The GPT whose gradients record A has, by its names and shapes."""
    step = next(a.steps(), None)
    shapes = {t.parameter: t.shape for t in step.tensors if t.parameter} if step is not None else {}
    settings: dict[str, Any] = {"kind": "gpt", "seq_length": 1} | dict(b.header.model) | dict(a.header.model)

    def shape(*patterns: str) -> tuple[int, ...] | None:
        names = (name for pattern in patterns for name in shapes if re.search(pattern, name))
        return next((shapes[name] for name in names), None)

    embedding, down = shape(r"embed.*\.weight$", r"wte"), shape(r"(down|fc2|down_proj|mlp\.c_proj)\.weight$")
    numbers = [int(match[1]) for name in shapes if (match := re.search(r"(?:layers?|h)\.(\d+)\.", name))]
    if embedding and down and numbers:
        hidden = embedding[1]
        settings |= {"num_layers": max(numbers) + 1, "hidden_size": hidden, "vocab_size": embedding[0]}
        settings["ffn_size"] = down[0] if down[1] == hidden else down[1]
        fc1 = shape(r"(linear_fc1|up_gate_proj|gate_proj)\.weight$")
        is_gated = shape(r"gate_proj\.weight$") or (fc1 and max(fc1) == 2 * settings["ffn_size"])
        settings["mlp"] = "swiglu" if is_gated else "gelu"
        settings["norm"] = "layer" if shape(r"(norm|ln_\w+)(_|\.)bias$") else "rms"
        settings["positions"] = "learned" if shape(r"position|wpe") else "rotary"
        has_biases = shape(r"(down|fc2|down_proj|c_proj)\.bias$"), shape(r"(qkv|q_proj)\.bias$")
        settings["biases"] = "all" if has_biases[0] else "qkv" if has_biases[1] else "none"
        settings["qk_norm"] = bool(shape(r"q_(layer)?norm\.weight$"))
        settings["tied_embedding"] = shape(r"(lm_head|output_layer|head)\.weight$") is None
    try:
        return ModelSpec.model_validate(settings | dict(declared))
    except ValidationError as error:
        detail = error.errors()[0]
        raise AlignmentError(
            f"{a.file} does not show the model that names need: `model.{'.'.join(map(str, detail['loc']))}`: "
            f"{detail['msg'].lower()}; give it under `model` in a map, `--map`"
        ) from error
