"""Importer of Fleet's ``DistributedStrategy``: saved as prototxt, or the Python object.

Defaults are from Paddle 3.3.1's ``distributed_strategy.proto``, which
``save_to_prototxt`` omits. The text has no order of the mesh's axes, and a
strategy has neither virtual stages nor sequence parallelism: both belong to
the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath, nearest_name, shortened
from pipeproof.diagnostics.source import LINE_BREAK, SourceMap, read_text
from pipeproof.interop.importers.import_codes import one_file, unreadable
from pipeproof.interop.importers.imported import Flags, Imported, repeatable
from pipeproof.interop.importers.model_sizes import read_mapping
from pipeproof.interop.importers.paddle.fleet_job import FleetJob, SourcedValue
from pipeproof.interop.importers.paddle.fleet_plan import lay_out, refuse, rephrasing
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.interop.importers.tree import Node, Placed, Tree, tree_of_data

# --- Protocol buffers' text format, as far as strategies use it: scalar fields and nested messages ---
# For the grammar see https://protobuf.dev/reference/protobuf/textformat-spec.
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
_SWITCHES = {"true": True, "t": True, "True": True, "false": False, "f": False, "False": False}
_WHOLE = re.compile(r"[-+]?(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    location: Location


def parse_prototxt(text: str, file: str) -> Tree:
    """Parse the fields of a text; strings keep their quotes, and a repeated field is a list.

    Raises:
        PlanFileError: PP170, at the location of the syntax error.
    """
    tokens, keys, nodes = [*_tokens(text, file)], dict[KeyPath, Location](), dict[str, Node]()
    end = _fields(tokens, 0, (), nodes, keys, None)
    assert tokens[end].kind == "end", "the top-level fields end with the text"
    return Tree(SourceMap(file, tuple(LINE_BREAK.split(text)), keys, keys), nodes)


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


def _fields(
    tokens: list[_Token], index: int, path: tuple[str, ...], nodes: dict[str, Node], keys: dict[KeyPath, Location],
    closes: str | None,
) -> int:  # fmt: skip
    """Read the fields of the message at ``path`` up to its closing token, and return the index of that token."""
    while not (tokens[index].kind == "end" if closes is None else tokens[index].text == closes):
        name = tokens[index]
        if name.kind != "name":
            raise _unexpected(name, "the name of a field" if closes is None else f"the name of a field or `{closes}`")
        colon = tokens[index + 1].text == ":"
        index += 2 if colon else 1
        node: Node
        if tokens[index].text in _CLOSES:
            if len(path) >= _MAX_DEPTH:
                raise unreadable(f"more than {_MAX_DEPTH} nested messages", tokens[index].location)
            node = {}
            index = _fields(tokens, index + 1, (*path, name.text), node, keys, _CLOSES[tokens[index].text]) + 1
        elif colon:
            node, index = _scalar(tokens, index)
        else:
            raise _unexpected(tokens[index], f"`:` or `{{` after `{name.text}`")
        is_repeated = name.text in nodes
        nodes[name.text] = Placed([], name.location) if is_repeated else node
        keys[*path, name.text] = name.location
        if tokens[index].text in (",", ";"):
            index += 1
    return index


def _scalar(tokens: list[_Token], index: int) -> tuple[Placed, int]:
    """Read a number, a name, or adjacent strings, which are joined."""
    first = tokens[index]
    if first.kind in ("name", "number"):
        base = 16 if "x" in first.text.lower() else 10
        value = int(first.text, base) if _WHOLE.fullmatch(first.text) else first.text
        return Placed(_SWITCHES.get(first.text, value), first.location), index + 1
    if first.kind != "string":
        raise _unexpected(first, "a value")
    while tokens[index].kind == "string":
        index += 1
    return Placed(first.text, first.location), index


def _unexpected(token: _Token, expected: str) -> Exception:
    actual = f"`{shortened(token.text)}`" if token.text else "the end of the text"
    return unreadable(f"{expected} is expected, found {actual}", token.location)


Value = bool | int | str
_Lookup = Callable[[tuple[str, ...], Value], SourcedValue[Any]]

ORDER = ("dp", "pp", "sharding", "sep", "cp", "mp")
"""The default order of the mesh's axes, the slowest first."""

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
    file = one_file(files, "a strategy is one file")
    name = str(file)
    text = read_text(name)
    is_yaml = file.suffix in (".yaml", ".yml") and not _MESSAGE.search(text)
    is_mapping = is_yaml or text.lstrip()[:1] == "{"
    tree = tree_of_data(*read_mapping(name)) if is_mapping else parse_prototxt(text, name)
    if not tree.names():
        raise unreadable("the file has no field of a strategy", Location(name), "save it with `save_to_prototxt`")
    for path, fields in FIELDS.items():
        _only_known(tree, path, fields)

    def lookup(path: tuple[str, ...], default: Value) -> SourcedValue[Any]:
        placed = tree.get(*path)
        if placed is None or placed.value in (None, "None"):  # without it, the location of its message
            nearest = tree.source.locate(path[:-1], key=True) if tree.has(path[0]) else None
            return SourcedValue(default, path[-1], nearest, by_default=True)
        return SourcedValue(_value(placed, path[-1], default), path[-1], placed.location)

    return _imported(lookup, ORDER, flags, name, tree.source.lines)


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
        sequence_parallel: True if the model is sequence-parallel; without it, the verdict lists the dependent values.
        num_chunks: virtual stages of a rank (``num_virtual_pipeline_stages`` of the ``PipelineLayer``).
        settings: plan keys such as ``"model.hidden_size"`` with their values, which replace the strategy's.
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


def _only_known(tree: Tree, path: tuple[str, ...], fields: frozenset[str]) -> None:
    field = tree.get(*path) if path else None
    if field is not None and isinstance(field.value, list):
        raise _repeated(path[-1], field)
    if field is not None and field.value is not None:
        raise unreadable(f"`{path[-1]}` must be a message, `{path[-1]} {{ ... }}`", field.location)
    for name in tree.names(*path):
        if name not in fields:
            near = nearest_name(name, sorted(fields))
            owner = f"`{path[-1]}`" if path else "a strategy"
            suggestion = f"did you mean `{near}`?" if near else None
            raise unreadable(f"{owner} has no field `{name}`", tree.source.locate((*path, name), key=True), suggestion)


def _value(placed: Placed, name: str, default: Value) -> Value:
    """Return the value of a scalar field; its type is the type of the field's default."""
    value = placed.value
    if isinstance(value, list):
        raise _repeated(name, placed)
    if isinstance(default, bool):
        switch = _SWITCHES.get(value) if isinstance(value, str) else value
        if switch in (0, 1):
            return bool(switch)
        raise unreadable(f"`{name}` must be true or false", placed.location)
    if type(value) is int:
        return value
    raise unreadable(f"`{name}` must be a whole number", placed.location)


def _repeated(name: str, placed: Placed) -> Exception:
    return unreadable(f"`{name}` is repeated here, and a message has it once", placed.location)


def _imported(lookup: _Lookup, order: tuple[str, ...], flags: Flags, file: str, lines: tuple[str, ...]) -> Imported:
    job = _job(lookup, order)
    plan = PlanBuilder("fleet", flags)
    lay_out(job, plan)
    return plan.imported(file, lines, rephrasing(job))


def _job(lookup: _Lookup, order: tuple[str, ...]) -> FleetJob:
    def pipeline(name: str, default: Value) -> SourcedValue[Any]:
        return lookup(("pipeline_configs", name), default)

    def switch(name: str, *, default: bool = False) -> SourcedValue[bool]:
        return lookup(("hybrid_configs", "pp_configs", name), default)

    def degree(name: str) -> SourcedValue[int]:
        sourced = lookup(("hybrid_configs", f"{name}_degree"), 1)
        if sourced.value < 1:
            if not sourced.by_default and sourced.value != -1:
                refuse(f"{sourced.text} is not a number of ranks", sourced.location)
            return SourcedValue(1, sourced.setting, by_default=True)
        return sourced

    def unless_default(sourced: SourcedValue[int]) -> SourcedValue[int | None]:
        return SourcedValue(None, sourced.setting, sourced.location, by_default=True) if sourced.by_default else sourced

    for name in ("accumulate_steps", "micro_batch_size"):
        sourced = pipeline(name, 1)
        if sourced.value < 1:
            refuse(f"{sourced.text} is not a number of micro-batches or rows", sourced.location)
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
