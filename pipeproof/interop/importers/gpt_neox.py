"""gpt-neox: YAML of a training on DeepSpeed's pipeline engine (commit ea7aefd: megatron/neox_arguments, model).

Hyphens in keys are underscores. A training has one file or several, each with other keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath, describe_value
from pipeproof.diagnostics.source import PlanFileError, SourceMap
from pipeproof.interop.importers.deepspeed import DeepSpeedJob
from pipeproof.interop.importers.draft import MAX_LAYERS, Draft, count, stages_of
from pipeproof.interop.importers.import_codes import REFUSED, UNDECIDED
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.model_sizes import read_mapping
from pipeproof.interop.importers.names import MEGATRON, names_of
from pipeproof.interop.importers.settings import Settings
from pipeproof.interop.importers.tree import tree_of_data

_PP, _TP, _METHOD = "pipe_parallel_size", "model_parallel_size", "pipe_partition_method"
_SIZES: Final = (("num_layers", "num_layers"), ("hidden_size", "hidden_size"), ("num_attention_heads", "num_heads"),
                 ("num_kv_heads", "num_kv_heads"), ("seq_length", "seq_length"))  # fmt: skip
_BLOCKS: Final = "type:transformer|mlp"
_GATED: Final = ("swiglu", "geglu", "reglu", "bilinear", "glu")
_OTHER_BLOCKS: Final = re.compile(r"gmlp|amlp|mamba|rwkv")
_WITHOUT_PIPELINE: Final = ("kto", "dpo", "rm")


def import_gpt_neox(files: Sequence[Path], flags: Flags) -> Imported:
    """Import the files of one training of gpt-neox.

    Raises:
        PlanFileError: PP100 or PP170 where they cannot be read or have no pipeline, PP171 if gpt-neox or DeepSpeed
            refuses the settings.
    """
    data, source = _joined(files)
    training = _Training("gpt-neox", tree_of_data(data, source), Draft("gpt-neox", flags))
    training.read()
    section = "`pipeline` of `deepspeed_extra_args`"
    return DeepSpeedJob(tree_of_data(training.deepspeed(data), source), training.draft, section).imported()


def _joined(files: Sequence[Path]) -> tuple[dict[str, Any], SourceMap]:
    """Return the keys of all files, with underscores."""
    joined, keys, sources = dict[str, Any](), dict[KeyPath, Location](), list[SourceMap]()
    for file in files:
        data, source = read_mapping(str(file))
        sources.append(source)
        for name, value in data.items():
            key = name.replace("-", "_")
            if key in joined:
                message = f"gpt-neox refuses this: `{key}` is in two files"
                raise PlanFileError(REFUSED.finding(message, source.locate((name,), key=True)), source=source)
            joined[key] = value
            keys[key,] = source.locate((name,), key=True)
    return joined, SourceMap(sources[0].file, sources[0].lines, keys, keys)


class _Training(Settings):
    def read(self) -> None:
        """Set topology, model and stages."""
        if self.placed(_PP) is None:
            raise self._absent(_PP)
        pp, tp = self._size(_PP) or 0, max(1, self._size(_TP) or 1)
        if pp < 1:
            raise self.refused(f"`{_PP}` 0 trains without a pipeline", _PP)
        if (train_impl := self.value("train_impl")) in _WITHOUT_PIPELINE:
            raise self.refused_by_tool(f"`train_impl` {train_impl} with a pipeline", "train_impl")
        self._set(("topology", "pp"), pp, _PP)
        self._set(("topology", "tp"), tp, _TP)
        if self.value("sequence_parallel") is True and tp > 1:
            self._set(("topology", "sequence_parallel"), value=True, name="sequence_parallel")
        self._model()
        self._undecided(pp)

    def deepspeed(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration that gpt-neox hands to DeepSpeed."""
        data = {"gradient_accumulation_steps": 1, "gradient_clipping": 1.0, **own}
        if not data.get("train_micro_batch_size_per_gpu") and not data.get("train_batch_size"):
            raise self._absent("train_micro_batch_size_per_gpu")
        nodes, each = self._size("num_nodes"), self._size("num_gpus")
        world = self._size("global_num_gpus") or (nodes * each if nodes and each else None)
        ranks = count(self.draft, "topology", "pp") * count(self.draft, "topology", "tp")
        if world and world % ranks == 0 and self.draft.flags.world_size is None:
            self._set(
                ("topology", "dp"), world // ranks, "global_num_gpus" if "global_num_gpus" in data else "num_gpus"
            )
        for name, precision in (("fp16", "fp16"), ("bf16", "bfloat16")):
            if data.get("precision") == precision:
                data[name] = {"enabled": True}
        extra = data.get("deepspeed_extra_args")
        data |= extra if isinstance(extra, dict) else {}
        if data.get("checkpoint_activations") is True:
            interval = {"activation_checkpoint_interval": data.get("checkpoint_num_layers", 1)}
            data["pipeline"] = {**data.get("pipeline", {}), **interval}
        return data

    def _model(self) -> None:
        for name, key in _SIZES:
            size = self._size(name)
            if size is not None:
                self._set(("model", key), size, name)
            elif name != "num_kv_heads":
                raise self._absent(name)
        gated, inner = self.value("activation") in _GATED, self._size("intermediate_size")
        inner = inner or 4 * count(self.draft, "model", "hidden_size")
        if gated:  # two thirds, of which the gate has half, rounded up
            part, multiple = inner * 2 // 3 // 2, self._size("mlp_multiple_of") or 1
            inner = -(-part // multiple) * multiple
        self._set(("model", "ffn_size"), inner, "intermediate_size")
        self._set(("model", "mlp"), "swiglu" if gated else "gelu_tanh" if self._is("bias_gelu_fusion") else "gelu",
                  "activation")  # fmt: skip
        self._set(("model", "tied_embedding"), not self._is("no_weight_tying"), "no_weight_tying")
        self._set(("model", "norm"), "rms" if "rms" in str(self.value("norm")) else "layer", "norm")
        positions = str(self.value("pos_emb", default="learned"))
        self._set(("model", "positions"), "rotary" if positions == "rotary" else "learned", "pos_emb")
        if positions not in ("rotary", "learned"):
            self.draft.ignore("pos_emb", f"positions are learned here, and not {positions}", self.location("pos_emb"))
        has_biases = self.value("use_bias_in_attn_linear", default=True) and self.value("use_bias_in_mlp", default=True)
        self._set(("model", "biases"), "all" if has_biases else "none", "use_bias_in_attn_linear")
        self._set(("model", "qk_norm"), self._is("use_qk_layernorm"), "use_qk_layernorm")
        for name, why in (("gpt_j_residual", "attention and MLP of a block run one after the other here"),
                          ("partition_activations", "each tensor-parallel rank keeps whole inputs of blocks here"),
                          ("curriculum_learning", "sequences have one length here")):  # fmt: skip
            if self._has(name):
                self.draft.ignore(name, why, self.location(name))

    def _undecided(self, pp: int) -> None:
        """Set the stages, and find the keys that may decide and are not read."""
        method = self.value(_METHOD, default=_BLOCKS)
        num_layers = count(self.draft, "model", "num_layers")
        if num_layers > MAX_LAYERS or pp > num_layers:
            raise self.refused(f"{num_layers} blocks on {pp} stages cannot be a plan", "num_layers")
        if method == _BLOCKS:
            sizes = balanced(num_layers, pp)
            if len(set(sizes)) > 1:
                self._set(("stages",), stages_of(sizes), _METHOD if self.placed(_METHOD) is not None else "num_layers")
        reasons = {
            _METHOD: f"the cut by {describe_value(method)} is not read" if method != _BLOCKS else "",
            "attention_config": "blocks other than attention and an MLP are not described"
            if _OTHER_BLOCKS.search(str(self.value("attention_config"))) else "",
            "moe_num_experts": "its experts are sharded over the tensor-parallel ranks, which is not described"
            if (self._size("moe_num_experts") or 1) > 1 else "",
            "soft_prompt_tuning": "it adds a layer" if self._has("soft_prompt_tuning") else "",
            "autotuning": "the tuner changes these settings" if self._has("autotuning") else "",
        }  # fmt: skip
        known = {*names_of("gpt_neox"), *names_of(MEGATRON)}
        unknown = (name for name in self.tree.names() if name not in known)
        reasons |= dict.fromkeys(unknown, "the key is in no list of the arguments of gpt-neox")
        for name, why in reasons.items():
            if why:
                self.draft.find(UNDECIDED.finding(f"`{name}`: {why}", self.location(name)))

    def _size(self, name: str) -> int | None:
        size = self.number(name, default=None, at_least=-1)
        return None if size == -1 else size

    def _has(self, name: str) -> bool:
        return bool(self.value(name) or self.tree.names(name))

    def _is(self, name: str) -> bool:
        return self.value(name) is True

    def _set(self, key: tuple[str, ...], value: object, name: str) -> None:
        origin = name if self.placed(name) is not None else f"no {name}"
        self.draft.set(key, value, origin, self.location(name))

    def _absent(self, name: str) -> PlanFileError:
        message = f"`{name}`, which a training of gpt-neox needs, is not here"
        return self.refused(message, help="give all files that it is started with")


def balanced(num_layers: int, pp: int) -> list[int]:
    """Return the blocks of each stage by ``type:transformer|mlp`` (DeepSpeed, runtime/utils.py: partition_balanced).

    The functions before and after the blocks have `transformer` in their names, so that both count as a block. Stages
    differ by at most one, and the later ones are the smaller.
    """
    even, more = divmod(num_layers + 2, pp)
    sizes = [even + (stage < more) for stage in range(pp)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return sizes
