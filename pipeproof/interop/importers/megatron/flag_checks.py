"""Checks of Megatron-LM's flags that come before they mean anything: numbers of values, choices, contradictions.

Conditions are those of its parser, of ``validate_args`` and of ``TransformerConfig`` (commit d98e8a6).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pipeproof.interop.importers.draft import count
from pipeproof.interop.importers.megatron.flag_values import FlagReader
from pipeproof.interop.importers.megatron.flags import FLAGS, SEVERAL_VALUES, SWITCHES

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "--attention-backend": ("flash", "fused", "unfused", "local", "auto"),
        "--cross-entropy-fusion-impl": ("native", "te"),
        "--fp4-format": ("e2m1",),
        "--fp8-format": ("e4m3", "hybrid"),
        "--fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
        "--moe-router-score-function": ("softmax", "sigmoid", "sqrtsoftplus"),
        "--moe-token-dispatcher-type": ("allgather", "alltoall", "flex", "alltoall_seq"),
        "--position-embedding-type": ("learned_absolute", "rope", "mrope", "yarn", "relative", "none"),
        "--recompute-granularity": ("full", "selective"),
        "--recompute-method": ("uniform", "block"),
        "--transformer-impl": ("transformer_engine", "local", "inference_optimized"),
    }
)
"""Flags whose values mean something here, with all values of current and older versions."""

_GRANULARITY, _METHOD, _LAYERS = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
_ACTIVATIONS: Final = "--recompute-activations"
_YAML: Final = "--yaml-cfg"


def check_counts(reader: FlagReader) -> None:
    """Refuse values of a switch, such as ``--sequence-parallel False``, and several values of a flag that has one.

    Words that only a run knows may be flags: those after the values of a flag are listed.

    Raises:
        PlanFileError: PP171, because Megatron-LM's parser refuses them; PP170, all arguments are in another file.
    """
    if reader.has(_YAML):
        fix = "give the block of arguments that Megatron-LM prints at its start"
        why = f"{_YAML} replaces all arguments by those of another file, which is not read"
        reader.refuse(why, reader.arguments.flags[_YAML].location, fix)
    for name, setting in reader.arguments.flags.items():
        known = [value for value in setting.values if value is not None]
        if name in SWITCHES and known:
            fix = "remove the value; without the flag it is off"
            reader.megatron_refuses(f"{name} has no value, found `{known[0]}`", name, fix)
        if name in FLAGS and name not in SWITCHES | SEVERAL_VALUES and len(known) > 1:
            reader.megatron_refuses(f"{name} has one value, found `{' '.join(known)}`", name)
        has_list = name in SEVERAL_VALUES or name.endswith("-path")
        if not has_list and None in setting.values[0 if name in SWITCHES else 1 :]:
            why = f"a word after {name} is {setting.why}: flags in it are not read"
            reader.draft.ignore("the script", why, setting.location)


def check_choices(reader: FlagReader) -> None:
    """Refuse a value that is none of those that the flag has: it would be taken for another.

    Raises:
        PlanFileError: PP170.
    """
    for name, choices in _CHOICES.items():
        text = reader.text(name)
        if text is not None and text not in choices:
            setting = reader.arguments.flags[name]
            reader.refuse(f"{name} is none of {', '.join(choices)}, found `{text}`", setting.value_location)


def check_contradictions(reader: FlagReader) -> None:
    """Refuse flags that exclude each other, or lack another one. The topology is in the draft.

    A flag is not missed where the file leaves some arguments to a run or to another program.

    Raises:
        PlanFileError: PP171.
    """
    has, is_sharded = reader.has, bool(reader.draft.get("topology", "sequence_parallel"))
    tp, cp = (count(reader.draft, "topology", axis) for axis in ("tp", "cp"))
    length = reader.number("--seq-length")
    selective = _ACTIVATIONS if has(_ACTIVATIONS) else f"{_GRANULARITY} selective"
    is_selective = has(_ACTIVATIONS) or reader.text(_GRANULARITY) == "selective"
    is_full = not is_selective and reader.text(_GRANULARITY) == "full"
    excluded = (
        (has("--bf16") and has("--fp16"), "--fp16", "it is given with --bf16"),
        (has("--fp8-format") and has("--fp4-format"), "--fp4-format", "it is given with --fp8-format"),
        *((is_selective and has(flag), flag, f"it is given with {selective}") for flag in (_METHOD, _LAYERS)),
        (
            length is not None and cp > 1 and length % (2 * cp) != 0,
            "--seq-length",
            f"{length} is no multiple of 2 x --context-parallel-size {cp}",
        ),
    )
    gathers, sequence = "--overlap-param-gather", "--sequence-parallel"
    missing = (
        *((is_full and not has(flag), _GRANULARITY, f"full needs {flag}") for flag in (_METHOD, _LAYERS)),
        *(
            (has(gathers) and not has(flag) and not has("--use-megatron-fsdp"), gathers, f"it needs {flag}")
            for flag in ("--use-distributed-optimizer", "--overlap-grad-reduce")
        ),
        (has("--tp-comm-overlap") and not is_sharded, "--tp-comm-overlap", f"it needs {sequence} and several tp ranks"),
        (
            has("--num-experts") and tp > 1 and not is_sharded,
            "--num-experts",
            f"with several tp ranks it needs {sequence}",
        ),
    )
    arguments = reader.arguments
    knows_all = not arguments.has_all and all(None not in setting.values for setting in arguments.flags.values())
    for is_refused, flag, why in (*excluded, *(missing if knows_all else ())):
        if is_refused:
            reader.megatron_refuses(f"{flag}: {why}", flag)
