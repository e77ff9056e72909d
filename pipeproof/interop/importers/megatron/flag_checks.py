"""Checks of Megatron-LM's flags before they are used: values, contradictions, names that are not read.

Conditions are from its parser, ``validate_args`` and ``TransformerConfig`` (commit d98e8a6).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.imported import IgnoredSetting
from pipeproof.interop.importers.megatron.flag_values import Arguments, FlagReader, Setting, is_off
from pipeproof.interop.importers.megatron.flags import (
    DECIDES,
    FLAGS,
    FLAGS_BY_NAME,
    NOT_SHOWN,
    SEVERAL_VALUES,
    SWITCHES,
    WITHOUT_BEARING,
    concerns_parallelism,
)
from pipeproof.interop.importers.names import plain
from pipeproof.interop.importers.plan_builder import misspelt
from pipeproof.interop.importers.tools.tool import Tool

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "--attention-backend": ("flash", "fused", "unfused", "local", "auto"),
        "--cross-entropy-fusion-impl": ("native", "te"),
        "--fp4-format": ("e2m1",),
        "--fp8-format": ("e4m3", "hybrid"),
        "--fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
        "--moe-router-dtype": ("fp32", "fp64"),
        "--moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
        "--moe-token-dispatcher-type": ("allgather", "alltoall", "flex", "alltoall_seq"),
        "--position-embedding-type": ("learned_absolute", "rope", "mrope", "yarn", "relative", "none"),
        "--recompute-granularity": ("full", "selective"),
        "--recompute-method": ("uniform", "block"),
        "--transformer-impl": ("transformer_engine", "local", "inference_optimized"),
    }
)
"""Flags with a choice of values, and all values of current and older versions."""

_GRANULARITY, _METHOD, _LAYERS = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
_ACTIVATIONS: Final = "--recompute-activations"
_YAML: Final = "--yaml-cfg"


def check_counts(reader: FlagReader) -> None:
    """Refuse values of a switch, such as ``--sequence-parallel False``, and several values of a single-valued flag.

    Words that only a run determines may be flags: the words after the values of a flag are listed.

    Raises:
        PlanFileError: PP171, because Megatron-LM's parser refuses them; PP170, all arguments are in another file.
    """
    if reader.has(_YAML):
        fix = "give the block of arguments that Megatron-LM prints at its start"
        why = f"{_YAML} replaces all arguments by another file, which is not read"
        reader.refuse(why, reader.arguments.flags[_YAML].location, fix)
    for name, setting in reader.arguments.flags.items():
        texts = [value for value in setting.values if value is not None]
        if name in SWITCHES and texts:
            fix = "remove the value; without the flag it is off"
            reader.megatron_refuses(f"{name} has no value, found `{texts[0]}`", name, fix)
        if name in FLAGS and name not in SWITCHES | SEVERAL_VALUES and len(texts) > 1:
            reader.megatron_refuses(f"{name} has one value, found `{' '.join(texts)}`", name)
        has_list = name in SEVERAL_VALUES or name.endswith("-path")
        if not has_list and None in setting.values[0 if name in SWITCHES else 1 :]:
            why = f"a word after {name} is {setting.why}: flags in it are not read"
            reader.plan.ignore("the script", why, setting.location)


def check_choices(reader: FlagReader) -> None:
    """Refuse a value that the flag does not have: it would be taken for another.

    Raises:
        PlanFileError: PP170.
    """
    for name, choices in _CHOICES.items():
        text = reader.text(name)
        if text is not None and text not in choices:
            setting = reader.arguments.flags[name]
            reader.refuse(f"{name} is none of {', '.join(choices)}, found `{text}`", setting.value_location)


def check_contradictions(reader: FlagReader) -> None:
    """Refuse flags that exclude each other, or lack another one. The topology is in the plan.

    No flag is missing if the file leaves some arguments to a run or to another program.

    Raises:
        PlanFileError: PP171.
    """
    has, is_sharded = reader.has, bool(reader.plan.get("topology", "sequence_parallel"))
    tp, cp = (reader.plan.number("topology", axis) for axis in ("tp", "cp"))
    length = reader.number("--seq-length")
    selective = _ACTIVATIONS if has(_ACTIVATIONS) else f"{_GRANULARITY} selective"
    is_selective = has(_ACTIVATIONS) or reader.text(_GRANULARITY) == "selective"
    is_full = not is_selective and reader.text(_GRANULARITY) == "full"
    excluded = (
        (has("--bf16") and has("--fp16"), "--fp16", "it is given with --bf16"),
        (has("--fp8-format") and has("--fp4-format"), "--fp4-format", "it is given with --fp8-format"),
        *((is_selective and has(flag), flag, f"it is given with {selective}") for flag in (_METHOD, _LAYERS)),
        (cp > 1 and (length or 0) % (2 * cp) != 0, "--seq-length",
         f"{length} is not a multiple of 2 x --context-parallel-size {cp}"),
    )  # fmt: skip
    gathers, sequence = "--overlap-param-gather", "--sequence-parallel"
    missing = (
        *((is_full and not has(flag), _GRANULARITY, f"full needs {flag}") for flag in (_METHOD, _LAYERS)),
        *(
            (has(gathers) and not has(flag) and not has("--use-megatron-fsdp"), gathers, f"it needs {flag}")
            for flag in ("--use-distributed-optimizer", "--overlap-grad-reduce")
        ),
        (has("--tp-comm-overlap") and not is_sharded, "--tp-comm-overlap", f"it needs {sequence} and several tp ranks"),
        (has("--num-experts") and tp > 1 and not is_sharded, "--num-experts",
         f"with several tp ranks it needs {sequence}"),
    )  # fmt: skip
    arguments = reader.arguments
    knows_all = not arguments.has_all and all(None not in setting.values for setting in arguments.flags.values())
    for is_refused, flag, why in (*excluded, *(missing if knows_all else ())):
        if is_refused:
            reader.megatron_refuses(f"{flag}: {why}", flag)


_MOST_NAMED: Final = 6
_OTHER_MODELS: Final = re.compile(
    r"(pretrain|finetune|train|posttrain)_?\w*(mamba|hybrid|t5|vlm?|vision|multimodal|llava|retro|ict|sora|dit|clip|rwkv"
    r"|diffusion|flux|omni|audio)\w*\.py$"
)
"""Programs that train other models than GPT."""


_NO_TRAINING: Final = re.compile(
    r"(^|[/_])(eval(uat\w+)?|inference\w*|generat\w+|(run_)?text_generation\w*|convert\w*|preprocess\w*|tasks/main|export\w*)\.py$"
)
"""Programs that evaluate, generate or convert."""


def refuse_other_programs(arguments: Arguments) -> None:
    """Refuse a command that trains nothing.

    Raises:
        PlanFileError: PP170.
    """
    if _NO_TRAINING.search(arguments.program):
        message = f"`{arguments.program}` trains nothing, and plans are of trainings"
        raise unreadable(message, Location(arguments.file))


def refuse_misspelt(reader: FlagReader, tool: Tool) -> None:
    """Refuse a flag that is in no list and is almost one that is read, before its default is taken for its value.

    Raises:
        PlanFileError: PP170.
    """
    for name, setting in reader.arguments.flags.items():
        if name in FLAGS or name in NOT_SHOWN or tool.knows(name):
            continue
        similar_name = misspelt(name, sorted(FLAGS))
        if similar_name is not None:
            reader.refuse(f"{name} is not a flag of {tool.name}", setting.location, f"did you mean `{similar_name}`?")


def undecided_names(reader: FlagReader, tool: Tool) -> Iterator[IgnoredSetting]:
    """Yield the names on which the verdict may depend, with the reason: unknown ones, and those that are not read."""
    arguments = reader.arguments
    yield from arguments.open
    if _OTHER_MODELS.search(arguments.program):
        yield IgnoredSetting(arguments.program, "it trains another model than GPT", Location(arguments.file))
    for name, setting in arguments.flags.items():
        key = plain(name)
        why = None
        if name in FLAGS or name in NOT_SHOWN or WITHOUT_BEARING.fullmatch(key) or _is_default(key, setting):
            continue
        if key == "spec" and tool.blocks.fullmatch(setting.value or ""):
            continue
        if key in DECIDES:
            why = DECIDES[key]
        elif tool.decides.fullmatch(key):
            why = f"an argument of {tool.name} that decides order, cut or blocks, and is not read"
        elif key in FLAGS_BY_NAME:
            why = f"Megatron-LM has {FLAGS_BY_NAME[key]} for it, and the name itself is not a flag"
        elif not tool.knows(name):
            why = f"the name is in {tool.lists}"
        elif tool.owns(name) and concerns_parallelism(name) and not tool.without.fullmatch(key):
            why = f"an argument of {tool.name} with a term of parallelism, which is not read"
        if why is not None:
            yield IgnoredSetting(name, why, setting.location)


def _is_default(key: str, setting: Setting) -> bool:
    """True for a value that changes nothing."""
    value = setting.value
    return value is not None and (is_off(value) or (key, value) == ("spec", "local"))


def note_others(reader: FlagReader, tool: Tool, undecided: frozenset[str]) -> None:
    """List the known names that a plan does not show; names with a term of parallelism one by one."""
    plan, others, harmless = reader.plan, [], (WITHOUT_BEARING, tool.without)
    for name, setting in reader.arguments.flags.items():
        if name in NOT_SHOWN:
            plan.ignore(name, NOT_SHOWN[name], setting.location)
        elif name in FLAGS or name in undecided or any(one.fullmatch(plain(name)) for one in harmless):
            continue
        elif concerns_parallelism(plain(name)) and not _is_default(plain(name), setting):
            plan.ignore(name, "the plan does not show it", setting.location)
        else:
            others.append(setting)
    if others:
        names = ", ".join(setting.name for setting in others[:_MOST_NAMED]) + (", .." if others[_MOST_NAMED:] else "")
        why = f"{len(others)}, without a term of parallelism in their names, are not read ({names})"
        plan.ignore("other flags", why, others[0].location)
    for note, location in reader.arguments.notes:
        plan.ignore("the script", note, location)
