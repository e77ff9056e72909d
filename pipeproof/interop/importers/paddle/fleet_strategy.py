"""Importer of Fleet's ``DistributedStrategy``: saved as prototxt, or the Python object.

Defaults are those of Paddle 3.3.1's ``distributed_strategy.proto``, which
``save_to_prototxt`` omits. The text has no order of the mesh's axes, and a
strategy has neither virtual stages nor sequence parallelism: those belong to
the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath, nearest_name, shortened
from pipeproof.diagnostics.source import LINE_BREAK, PlanFileError, read_text
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop.importers.draft import Draft
from pipeproof.interop.importers.imported import Flags, Imported, repeatable
from pipeproof.interop.importers.paddle.fleet_job import FleetJob, SourcedValue
from pipeproof.interop.importers.paddle.fleet_plan import lay_out, refuse, rephrasing
from pipeproof.interop.importers.paddle.training_file import unreadable

# --- Protocol buffers' text format, as far as strategies use it: scalar fields and nested messages ---
# The grammar is that of https://protobuf.dev/reference/protobuf/textformat-spec.
# Extensions, ``Any`` and lists do not occur in strategies, and are refused.


_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\f\v]+|\#[^\n]*)
      | (?P<line>\n)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?[fF]?))
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<mark>[{}<>:,;])""",
    re.VERBOSE | re.ASCII,
)
_MESSAGE = re.compile(r"^\s*\w+\s*\{", re.MULTILINE)
_CLOSES = {"{": "}", "<": ">"}
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value as it is written, with its location; for strings, ``quoted`` is True, and the quotes are removed."""

    text: str
    location: Location
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """The fields of a message, in order, with repetitions."""

    location: Location
    fields: list[tuple[str, Scalar | Message, Location]] = field(default_factory=list)

    def only(self, name: str) -> Scalar | Message | None:
        """Return the field of that name, or None.

        Raises:
            PlanFileError: PP170, there are several.
        """
        matches = [(value, location) for known, value, location in self.fields if known == name]
        if len(matches) > 1:
            raise unreadable(f"`{name}` is repeated here, and a message has it once", matches[1][1])
        return matches[0][0] if matches else None


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    location: Location


def parse_prototxt(text: str, file: str) -> Message:
    """Parse the fields of a text.

    Raises:
        PlanFileError: PP170, at the location of the syntax error.
    """
    tokens = [*_tokens(text, file)]
    top = Message(Location(file))
    end = _fields(tokens, 0, top, None, 0)
    assert tokens[end].kind == "end", "the top-level fields end with the text"
    return top


def _parse_mapping(text: str, file: str) -> Message:
    """The message of a strategy's mappings in YAML, of which JSON and the literal of a Python dict are parts."""
    tree = parse_text(text, file)
    if tree.problems or not isinstance(tree.data, Mapping):
        raise (
            PlanFileError(*tree.problems, source=tree.source)
            if tree.problems
            else unreadable("a mapping of the strategy's fields is expected", Location(file))
        )

    def message(mapping: Mapping[Any, Any], path: KeyPath) -> Message:
        result = Message(tree.source.locate(path, key=True))
        for name, value in mapping.items():
            below = (*path, name)
            at = tree.source.locate(below)
            if isinstance(value, Mapping):
                field: Scalar | Message = message(value, below)
            elif value is None or value == "None":
                continue
            elif isinstance(value, bool) or value in ("True", "False"):
                field = Scalar(str(value).lower(), at)
            else:
                field = Scalar(str(value), at, quoted=isinstance(value, str))
            result.fields.append((str(name), field, tree.source.locate(below, key=True)))
        return result

    return message(tree.data, ())


def _tokens(text: str, file: str) -> Iterator[_Token]:
    line, begin, position = 1, 0, 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        column = position - begin + 1
        if match is None:
            shown = shortened(text[position:].split(maxsplit=1)[0])
            raise unreadable(f"`{shown}` is not valid in protobuf's text format", Location(file, line, column))
        kind = str(match.lastgroup)
        if kind == "line":
            line, begin = line + 1, match.end()
        elif kind != "space":
            yield _Token(kind, match[0], Location(file, line, column).part(0, len(match[0])))
        position = match.end()
    yield _Token("end", "", Location(file, line, position - begin + 1))


def _fields(tokens: list[_Token], index: int, message: Message, closes: str | None, depth: int) -> int:
    """Read fields into ``message`` up to its closing token, and return the index of that token."""
    while not (tokens[index].kind == "end" if closes is None else tokens[index].text == closes):
        name = tokens[index]
        if name.kind != "name":
            raise _unexpected(name, "the name of a field" if closes is None else f"the name of a field or `{closes}`")
        colon = tokens[index + 1].text == ":"
        index += 2 if colon else 1
        value: Scalar | Message
        if tokens[index].text in _CLOSES:
            if depth >= _MAX_DEPTH:
                raise unreadable(f"more than {_MAX_DEPTH} nested messages", tokens[index].location)
            value = Message(name.location)
            index = _fields(tokens, index + 1, value, _CLOSES[tokens[index].text], depth + 1) + 1
        elif colon:
            value, index = _scalar(tokens, index)
        else:
            raise _unexpected(tokens[index], f"`:` or `{{` after `{name.text}`")
        message.fields.append((name.text, value, name.location))
        if tokens[index].text in (",", ";"):
            index += 1
    return index


def _scalar(tokens: list[_Token], index: int) -> tuple[Scalar, int]:
    """Read a number, a name, or adjacent strings, which are joined."""
    first = tokens[index]
    if first.kind in ("name", "number"):
        return Scalar(first.text, first.location), index + 1
    if first.kind != "string":
        raise _unexpected(first, "a value")
    text = ""
    while tokens[index].kind == "string":
        text += re.sub(r"\\(.)", r"\1", tokens[index].text[1:-1])
        index += 1
    return Scalar(text, first.location, quoted=True), index


def _unexpected(token: _Token, expected: str) -> Exception:
    found = f"`{shortened(token.text)}`" if token.text else "the end of the text"
    return unreadable(f"{expected} is expected, found {found}", token.location)


Value = bool | int | str
_Lookup = Callable[[tuple[str, ...], Value], SourcedValue[Any]]

ORDER = ("dp", "pp", "sharding", "sep", "cp", "mp")
"""The order of the mesh's axes where none is sourced, the slowest first."""

_TOP = frozenset(
    {
        "mode", "amp", "recompute", "localsgd", "dgc", "gradient_merge", "lars", "lamb", "pipeline", "elastic",
        "auto", "a_sync", "sync_nccl_allreduce", "nccl_comm_num", "use_hierarchical_allreduce",
        "hierarchical_allreduce_inter_nranks", "sync_batch_norm", "fuse_all_reduce_ops", "fuse_grad_size_in_MB",
        "fuse_grad_size_in_TFLOPS", "cudnn_exhaustive_search", "conv_workspace_size_limit",
        "cudnn_batchnorm_spatial_persistent", "adaptive_localsgd", "fp16_allreduce", "sharding",
        "last_comm_group_size_MB", "find_unused_parameters", "tensor_parallel", "without_graph_optimization",
        "fuse_grad_size_in_num", "calc_comm_same_stream", "asp", "fuse_grad_merge", "semi_auto", "adam_d2sum",
        "auto_search", "heter_ccl_mode", "is_fl_ps_mode", "with_coordinator", "qat", "split_data",
        "recompute_configs", "amp_configs", "localsgd_configs", "gradient_merge_configs", "dgc_configs",
        "pipeline_configs", "a_sync_configs", "lars_configs", "lamb_configs", "adaptive_localsgd_configs",
        "sharding_configs", "hybrid_configs", "tensor_parallel_configs", "trainer_desc_configs",
        "downpour_table_param", "fs_client_param", "qat_configs", "build_strategy", "gradient_scale_configs",
    }
)  # fmt: skip
_PIPELINE = frozenset(
    {
        "micro_batch_size", "accumulate_steps", "schedule_mode", "p2p_cache_shape", "enable_partial_send_recv",
    }
)  # fmt: skip
_HYBRID = frozenset(
    {
        "dp_degree", "mp_degree", "pp_degree", "sharding_degree", "sep_degree", "mp_configs", "pp_configs",
        "sharding_configs", "enable_optimizer_timer", "split_norm_comm", "ep_degree", "moe_sharding_degree",
        "dp_configs", "sep_configs", "dp_sep_configs", "pp_tp_configs", "ep_configs", "moe_sharding_configs",
        "default_comm_group_configs", "cp_degree", "cp_sharding_degree", "cp_configs", "cp_sharding_configs",
        "dp_cp_configs", "cp_mp_configs",
    }
)  # fmt: skip
_PP = frozenset(
    {
        "dp_comm_overlap", "delay_scale_loss", "enable_timer", "sharding_comm_overlap", "profiling",
        "release_gradients", "overlap_p2p_comm", "clear_every_step_cache", "use_batch_p2p_comm",
        "best_unbalanced_scheduler", "enable_offload_queue", "enable_dynamic_shape", "use_dualpipev",
        "forward_backward_overlap_scheduler", "coll_nccl_config", "p2p_nccl_config", "shared_nccl_config",
        "sync_param", "sync_moment", "sync_mode",
    }
)  # fmt: skip
FIELDS: Mapping[tuple[str, ...], frozenset[str]] = MappingProxyType(
    {(): _TOP, ("pipeline_configs",): _PIPELINE, ("hybrid_configs",): _HYBRID, ("hybrid_configs", "pp_configs"): _PP}
)
"""Fields of the messages that are read here."""


def import_fleet(files: Sequence[Path], flags: Flags) -> Imported:
    """Read a strategy: as ``DistributedStrategy.save_to_prototxt`` wrote it, or its mappings as JSON, YAML or a dict.

    Raises:
        PlanFileError: PP100 or PP170 for an invalid text, PP171 for a job that Fleet refuses.
    """
    if len(files) != 1:
        raise unreadable(f"a strategy is one file, found {len(files)}", None)
    name = str(files[0])
    text = read_text(name)
    is_yaml = files[0].suffix in (".yaml", ".yml") and not _MESSAGE.search(text)
    is_mapping = is_yaml or text.lstrip()[:1] == "{"
    message = _parse_mapping(text, name) if is_mapping else parse_prototxt(text, name)
    if not message.fields:
        raise unreadable("the file has no field of a strategy", Location(name), "save it with `save_to_prototxt`")
    for path, known in FIELDS.items():
        _only_known(message, path, known)

    def lookup(path: tuple[str, ...], default: Value) -> SourcedValue[Any]:
        value: Scalar | Message = message
        location = None
        for part in path:
            assert isinstance(value, Message), "the messages on the path were checked"
            inner = value.only(part)
            if inner is None:  # the location is that of the message without it
                return SourcedValue(default, path[-1], location, by_default=True)
            value, location = inner, inner.location
        return SourcedValue(_value(value, path[-1], default), path[-1], location)

    return _imported(lookup, ORDER, flags, name, tuple(LINE_BREAK.split(text)))


def from_strategy(
    strategy: Any,
    *,
    sequence_parallel: bool | None = None,
    num_chunks: int = 1,
    settings: Mapping[str, object] | None = None,
    model_config: Path | None = None,
    world_size: int | None = None,
) -> Imported:
    """Read a ``fleet.DistributedStrategy``, or an object with its mappings ``pipeline_configs`` and ``hybrid_configs``.

    Args:
        strategy: the object; Paddle is not imported.
        sequence_parallel: True if the model is sequence-parallel; without it, the verdict lists what depends on it.
        num_chunks: virtual stages of a rank (``num_virtual_pipeline_stages`` of the ``PipelineLayer``).
        settings: plan keys such as ``"model.hidden_size"`` with their values, which win over the strategy.
        model_config: a ``config.json`` with the sizes of the model.
        world_size: number of processes.

    Raises:
        PlanFileError: PP170 for a value that no strategy has, PP171 for a job that Fleet refuses.
    """
    overrides: dict[KeyPath, object] = {tuple(key.split(".")): value for key, value in (settings or {}).items()}
    if sequence_parallel is not None:
        overrides.setdefault(("topology", "sequence_parallel"), sequence_parallel)
    if num_chunks != 1:
        overrides.setdefault(("schedule", "num_chunks"), num_chunks)

    def lookup(path: tuple[str, ...], default: Value) -> SourcedValue[Any]:
        value: Any = strategy
        for part in path:
            value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
        setting = f"strategy.{'.'.join(path)}"
        if value is None:
            return SourcedValue(default, setting, by_default=True)
        if type(value) is not type(default):
            raise unreadable(f"`{setting}` must be of type {type(default).__name__}, found {value!r}", None)
        return SourcedValue(value, setting)

    order = tuple(getattr(strategy, "hybrid_parallel_order", None) or ORDER)
    flags = Flags(overrides, model_config, world_size)
    return repeatable(lambda flags: _imported(lookup, order, flags, "<strategy>", ()), flags)


def _only_known(message: Message, path: tuple[str, ...], known: frozenset[str]) -> None:
    for part in path:
        field = message.only(part)
        if field is None:
            return
        if not isinstance(field, Message):
            raise unreadable(f"`{part}` must be a message, `{part} {{ ... }}`", field.location)
        message = field
    for name, _, location in message.fields:
        if name not in known:
            near = nearest_name(name, sorted(known))
            owner = f"`{path[-1]}`" if path else "a strategy"
            suggestion = f"did you mean `{near}`?" if near else None
            raise unreadable(f"{owner} has no field `{name}`", location, suggestion)


def _value(value: Scalar | Message, name: str, default: Value) -> Value:
    """Return the value of a scalar field; the type is that of the field's default."""
    text = value.text if isinstance(value, Scalar) and not value.quoted else None
    if isinstance(default, bool):
        literals = {
            "true": True,
            "t": True,
            "True": True,
            "1": True,
            "false": False,
            "f": False,
            "False": False,
            "0": False,
        }
        if text in literals:
            return literals[text]
        raise unreadable(f"`{name}` must be true or false", value.location)
    if text is not None and text.removeprefix("-").isdecimal():
        return int(text)
    raise unreadable(f"`{name}` must be a whole number", value.location)


def _imported(lookup: _Lookup, order: tuple[str, ...], flags: Flags, file: str, lines: tuple[str, ...]) -> Imported:
    job = _job(lookup, order)
    draft = Draft("fleet", flags)
    lay_out(job, draft)
    return draft.imported(file, lines, rephrasing(job))


def _job(lookup: _Lookup, order: tuple[str, ...]) -> FleetJob:
    def pipeline(name: str, default: Value) -> SourcedValue[Any]:
        return lookup(("pipeline_configs", name), default)

    def switch(name: str, *, default: bool = False) -> SourcedValue[bool]:
        return lookup(("hybrid_configs", "pp_configs", name), default)

    def degree(name: str) -> SourcedValue[int]:
        sourced = lookup(("hybrid_configs", f"{name}_degree"), 1)
        if sourced.value < 1:
            if not sourced.by_default and sourced.value != -1:
                refuse(f"{sourced.text} is no number of ranks", sourced.location)
            return SourcedValue(1, sourced.setting, by_default=True)
        return sourced

    def unless_default(sourced: SourcedValue[int]) -> SourcedValue[int | None]:
        return SourcedValue(
            None if sourced.by_default else sourced.value, sourced.setting, sourced.location, sourced.by_default
        )

    for name in ("accumulate_steps", "micro_batch_size"):
        sourced = pipeline(name, 1)
        if sourced.value < 1:
            refuse(f"{sourced.text} is no number of micro-batches or rows", sourced.location)
    return FleetJob(
        pp=degree("pp"),
        tp=degree("mp"),
        dp=unless_default(degree("dp")),
        sharding=unless_default(degree("sharding")),
        sep=degree("sep"),
        cp=degree("cp"),
        ep=degree("ep"),
        order=tuple(axis for axis in order if axis in ORDER),
        accumulate=pipeline("accumulate_steps", 1),
        micro_batch_size=pipeline("micro_batch_size", 1),
        chunks=SourcedValue(1, "schedule.num_chunks", by_default=True),
        partial=pipeline("enable_partial_send_recv", default=True),
        batched=switch("use_batch_p2p_comm", default=True),
        overlapped=switch("overlap_p2p_comm"),
        cached_shapes=pipeline("p2p_cache_shape", default=True),
        variable_lengths=switch("enable_dynamic_shape"),
        balanced=switch("best_unbalanced_scheduler"),
        dualpipe_v=switch("use_dualpipev"),
        overlapped_backward=switch("forward_backward_overlap_scheduler"),
        sequence_parallel=SourcedValue(None, "topology.sequence_parallel", by_default=True),
        guard=False,
    )
