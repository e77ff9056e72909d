"""Train every model family of ``transformers`` as a pipeline under three schedules, against the unpartitioned model.

Each family is a tiny model with random weights, made from its config class. Two ranks train it under each schedule; the
reference is the model in a plain loop over micro-batches. The bits of the loss and of every gradient are compared.

    python validation/families.py                       # all families: validation/results/families.json
    python validation/families.py --only llama gpt2     # some, printed

A result is ``right`` (all bits), ``bound: ..`` (all but weights that stages share, which are added in another order),
``refused: ..`` (the user's text), ``WRONG: ..`` or ``crash: ..``; ``not built: ..`` if there is no tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "validation" / "results" / "families.json"
SCHEDULES = {"1f1b": 2, "interleaved": 4, "zb_v": 4}
"""Schedules, with their numbers of stages on two ranks."""
NUM_MICRO_BATCHES = 4
MOST_PARAMETERS = 5_000_000
SECONDS = 400
"""Time for one family and schedule."""

NUM_BLOCKS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    # other names of the same
    "n_embd": 32, "n_layer": NUM_BLOCKS, "n_head": 4, "n_positions": 64, "n_ctx": 64, "d_model": 32, "d_ff": 48,
    "d_kv": 8, "num_layers": NUM_BLOCKS, "num_heads": 4, "encoder_layers": NUM_BLOCKS, "decoder_layers": NUM_BLOCKS,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "embedding_size": 32, "num_decoder_layers": NUM_BLOCKS, "n_inner": 48,
    "num_ln_in_parallel_attn": None, "rotary_dim": 8, "d_head": 8, "d_inner": 48, "emb_dim": 32, "n_layers": NUM_BLOCKS,
    "n_heads": 4, "decoder_hidden_size": 32, "attention_hidden_size": 32, "dff": 48, "max_seq_len": 64,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_topk": 2, "moe_k": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "shared_intermediate_size": 16,
    "num_expert_group": 1, "top_k_experts": 2, "expert_ffn_hidden_size": 16, "zero_expert_num": 1,
    # latent attention
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "o_lora_rank": 16, "index_head_dim": 8, "index_n_heads": 4, "index_topk": 8,
    # state spaces and convolutions
    "state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1, "mamba_chunk_size": 4, "chunk_size": 4, "mamba_dt_rank": 4, "time_step_rank": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "ssm_state_size": 8, "mamba_d_ssm": 64, "lru_width": 32, "attention_window_size": 8, "n_groups": 1,
    "sliding_window": 4, "local_attention": 4, "query_pre_attn_scalar": 8, "n_mamba_heads": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99, "laurel_rank": 4, "altup_num_inputs": 2,
    "num_kv_shared_layers": 0, "hc_mult": 2, "num_mem_blocks": 1,
    # images and sound
    "image_size": 8, "patch_size": 4, "num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64,
    "spatial_merge_size": 1, "temporal_patch_size": 1, "out_hidden_size": 32, "depth": 2, "embed_dim": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A class of ``transformers`` and values of its tiny config apart from ``SIZES``."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    kind: str = "causal"


IMAGE, IMAGE_TOKENS = 90, 4
"""The token that stands for a part of an image, and the number of them in an image of 8 x 8."""
TOKENS = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": 91, "vision_start_token_id": 92,
          "vision_end_token_id": 93, "boi_token_id": 92, "eoi_token_id": 93, "boi_token_index": 92,
          "eoi_token_index": 93, "mm_tokens_per_image": IMAGE_TOKENS}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
PATCHES = {"patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3, "in_chans": 3}
QWEN = {**TOKENS, "text_config": ROPE, "vision_config": PATCHES}
OTHERS = {
    "llama (sequence classification)": Family("LlamaForSequenceClassification", {"num_labels": 3}, "class"),
    "qwen3 (sequence classification)": Family("Qwen3ForSequenceClassification", {"num_labels": 3}, "class"),
    "llama (token classification)": Family("LlamaForTokenClassification", {"num_labels": 3}, "tokens"),
    "gpt2 (sequence classification)": Family("GPT2ForSequenceClassification", {"num_labels": 3}, "class"),
    "bert (masked LM)": Family("BertForMaskedLM", {}, "tokens"),
    "bert (sequence classification)": Family("BertForSequenceClassification", {"num_labels": 3}, "class"),
    "bert (token classification)": Family("BertForTokenClassification", {"num_labels": 3}, "tokens"),
    "roberta (masked LM)": Family("RobertaForMaskedLM", {}, "tokens"),
    "distilbert (masked LM)": Family("DistilBertForMaskedLM", {"dim": 32, "hidden_dim": 48}, "tokens"),
    "electra (token classification)": Family("ElectraForTokenClassification", {"num_labels": 3}, "tokens"),
    "modernbert (masked LM)": Family("ModernBertForMaskedLM", {}, "tokens"),
    "modernbert (sequence classification)": Family("ModernBertForSequenceClassification", {"num_labels": 3}, "class"),
    "deberta-v2 (masked LM)": Family("DebertaV2ForMaskedLM", {}, "tokens"),
    "vit": Family("ViTForImageClassification", {"num_labels": 3}, "images"),
    "dinov2": Family("Dinov2ForImageClassification", {"num_labels": 3}, "images"),
    "t5": Family("T5ForConditionalGeneration", {}, "seq2seq"),
    "umt5": Family("UMT5ForConditionalGeneration", {}, "seq2seq"),
    "bart": Family("BartForConditionalGeneration", {}, "seq2seq"),
    "mbart": Family("MBartForConditionalGeneration", {}, "seq2seq"),
    "pegasus": Family("PegasusForConditionalGeneration", {}, "seq2seq"),
    "marian": Family("MarianMTModel", {}, "seq2seq"),
    "m2m_100": Family("M2M100ForConditionalGeneration", {}, "seq2seq"),
    "whisper": Family("WhisperForConditionalGeneration", {}, "speech"),
    "qwen2_vl": Family("Qwen2VLForConditionalGeneration", QWEN, "patches"),
    "qwen2_5_vl": Family("Qwen2_5_VLForConditionalGeneration", QWEN, "patches"),
    "qwen3_vl": Family("Qwen3VLForConditionalGeneration", QWEN, "patches"),
    "llava": Family("LlavaForConditionalGeneration", TOKENS, "pictures"),
    "gemma3 (images)": Family("Gemma3ForConditionalGeneration", TOKENS, "pictures"),
}
"""Families other than causal language models."""

CAUSAL: dict[str, dict[str, Any]] = {
    "dots3_note_text": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "cohere_compass_text": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 3], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {
        "pronunciation_vocab_size": 99,
        "shape_vocab_size": 99,
        "pronunciation_embed_dim": 8,
        "shape_embed_dim": 8,
    },
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
"""Values of tiny configs of causal language models apart from ``SIZES``."""


def families() -> dict[str, Family]:
    """All families by name: the causal language models that the library lists, and ``OTHERS``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    causal = {name: Family(found if isinstance(found, str) else found[0], CAUSAL.get(name, {}))
              for name, found in NAMES.items()}  # fmt: skip
    return {**causal, **OTHERS}


class NotBuilt(Exception):
    """The config class makes no tiny model of ``SIZES``."""


def inner(config: Any) -> list[tuple[str, Any]]:
    """The configs inside of a config, by name."""
    from transformers import PretrainedConfig

    return [(name, value) for name, value in vars(config).items() if isinstance(value, PretrainedConfig)]


def model_of(family: Family) -> Any:
    """The model on the CPU in train mode, without dropout; the weights depend on the seed alone."""
    import torch
    import transformers

    model_class = getattr(transformers, family.model, None)
    if model_class is None:
        raise NotBuilt(f"this version has no {family.model}")
    try:
        default = model_class.config_class()
        made = type(default)(**config_values(default, family.config))
        for name in DROPOUTS:
            for part in (made, *(value for _, value in inner(made))):
                if isinstance(getattr(part, name, None), float):
                    setattr(part, name, 0.0)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in model_class(made).parameters())
        torch.manual_seed(0)
        model = model_class(made).train() if size <= MOST_PARAMETERS else None
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}"[:300]) from error
    if model is None:
        raise NotBuilt(f"{size} parameters")
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            noise = torch.randn(weight.shape, generator=generator) * 0.05
            weight.add_(noise.to(weight.dtype))
    return model


DROPOUTS = (
    "dropout", "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "attn_pdrop",
    "embd_pdrop", "resid_pdrop", "activation_dropout", "classifier_dropout", "dropout_rate", "embedding_dropout",
    "attn_dropout", "emb_pdrop", "ffn_dropout", "mlp_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop",
    "drop_path_rate", "residual_dropout", "router_jitter_noise", "input_jitter_noise", "embed_dropout",
    "classifier_dropout_prob",
)  # fmt: skip


def config_values(default: Any, more: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the config class: ``SIZES`` by the names that it has, in its inner configs too, and ``more``."""
    from transformers import PretrainedConfig

    values = {}
    for name, value in vars(default).items():
        if isinstance(value, PretrainedConfig):
            values[name] = type(value)(**config_values(value, more.get(name, {}))).to_dict()
            values[name].pop("model_type", None)
        elif name in SIZES and name not in more:
            values[name] = SIZES[name]
    if "kv_lora_rank" in vars(default) and "num_key_value_heads" not in more:
        values["num_key_value_heads"] = SIZES["num_attention_heads"]  # latent attention has no groups of heads
    mapped = {default.attribute_map.get(name, name): size for name, size in SIZES.items()}
    values = {**{name: size for name, size in mapped.items() if name in vars(default) and name not in more}, **values}
    kinds = getattr(default, "layer_types", None)
    if kinds and "layer_types" in vars(default):
        values["layer_types"] = [kinds[i * len(kinds) // NUM_BLOCKS] for i in range(NUM_BLOCKS)]
    own = vars(default)
    values.update({key: value for key, value in more.items() if not isinstance(own.get(key), PretrainedConfig)})
    return values


def batch_of(family: Family, model: Any) -> tuple[dict[str, Any], Any]:
    """Keyword arguments of the model for all micro-batches, and the targets."""
    import torch

    rows, length = 2 * NUM_MICRO_BATCHES, 12
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 99, (rows, length), generator=generator)
    labels = torch.randint(0, 3, (rows,), generator=generator)
    match family.kind:
        case "causal":
            return {"input_ids": ids}, ids
        case "class":
            mask = torch.ones_like(ids)
            for row in range(rows):
                mask[row, length - row % 3 :] = 0
            return {"input_ids": ids * mask, "attention_mask": mask}, labels
        case "tokens":
            return {"input_ids": ids}, ids % 3
        case "images":
            return {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator)}, labels
        case "seq2seq":
            inputs = torch.randint(3, 99, (rows, 10), generator=generator)
            return {"input_ids": inputs, "decoder_input_ids": ids}, ids
        case "speech":
            sound = torch.randn(rows, 8, 2 * 32, generator=generator)
            return {"input_features": sound, "decoder_input_ids": ids}, ids
        case "pictures" | "patches":
            ids = ids % 80 + 3
            ids[:, 2 : 2 + IMAGE_TOKENS] = IMAGE
            kinds, pictures = (ids == IMAGE).long(), torch.randn(rows, 3, 8, 8, generator=generator)
            if family.kind == "pictures":
                types = {"token_type_ids": kinds} if "gemma" in family.model.lower() else {}
                return {"input_ids": ids, "pixel_values": pictures, **types}, ids
            patches = pictures.view(rows * 4 * IMAGE_TOKENS, -1)
            sides = torch.tensor([[1, 4, 4]] * rows)
            return {
                "input_ids": ids, "pixel_values": patches, "image_grid_thw": sides, "mm_token_type_ids": kinds
            }, ids  # fmt: skip
    raise NotBuilt(f"no batch of kind {family.kind}")


def loss_of(output: Any, target: Any) -> Any:
    """Cross entropy of logits (.., classes) and targets (..): the next token's, where logits are of tokens."""
    import torch

    logits = output if isinstance(output, torch.Tensor) else output.logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), target.flatten())


def expected(model: Any, batch: dict[str, Any], target: Any) -> tuple[Any, dict[str, Any]]:
    """Loss and gradients by name of the unpartitioned model in a plain loop over micro-batches."""
    import torch

    model.zero_grad()
    losses = []
    keywords = {} if getattr(model.config, "use_cache", None) is None else {"use_cache": False}
    for index in range(NUM_MICRO_BATCHES):
        part = {key: value.chunk(NUM_MICRO_BATCHES)[index] for key, value in batch.items()}
        loss = loss_of(model(**part, **keywords), target.chunk(NUM_MICRO_BATCHES)[index])
        losses.append(loss.detach())
        (loss / NUM_MICRO_BATCHES).backward()
    grads = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    return torch.stack(losses).sum() / NUM_MICRO_BATCHES, grads


def staged(
    stages: Any, family: Family, schedule: str, batch: dict[str, Any], target: Any
) -> tuple[Any, dict[str, Any]]:
    """Loss, and this rank's gradients by name, of a pipeline of all ranks."""
    from pipeproof.torch import Pipeline

    inputs, keywords = arguments(family, batch)
    pipe = Pipeline(
        stages, schedule=schedule, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=loss_of,
        split_dims={"pixel_values": 0} if family.kind == "patches" else {},
        example=tuple(value.chunk(NUM_MICRO_BATCHES)[0] for value in inputs),
        example_kwargs={key: value.chunk(NUM_MICRO_BATCHES)[0] for key, value in keywords.items()}, timeout_s=SECONDS,
    )  # fmt: skip
    with pipe:
        for stage in pipe.stages.values():
            stage.zero_grad()
        loss = pipe.step(*inputs, target=target, **keywords)
        grads = {}
        for stage in pipe.stages.values():
            for name, weight in stage.named_parameters():
                grads[name] = weight.grad
    return loss, grads


def options(family: Family, batch: dict[str, Any]) -> dict[str, Any]:
    """Options of the cut: an example, where steps have images next to the text."""
    if family.kind not in ("pictures", "patches"):
        return {}
    return {"example": {key: value.chunk(NUM_MICRO_BATCHES)[0] for key, value in batch.items()}}


def arguments(family: Family, batch: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a step."""
    main = next(iter(batch))
    rest = batch if main == "input_ids" else {key: value for key, value in batch.items() if key != main}
    return (batch[main],), rest


def verdict(reference: tuple[Any, dict[str, Any]], shards: list[tuple[Any, dict[str, Any]]], tied: set[str]) -> str:
    """``right``, ``bound: ..`` or ``WRONG: ..``."""
    import torch

    loss, grads = reference
    found = next(value for value, _ in shards if value is not None)
    mine = {name: grad for _, part in shards for name, grad in part.items()}
    wrong, near = [], []
    if not torch.equal(found, loss):
        wrong.append(f"loss {float(found):.6f}, right is {float(loss):.6f}")
    for name, grad in grads.items():
        if name not in mine and name in tied:
            continue
        other = mine.get(name)
        if grad is None and (other is None or not other.any()):
            continue
        if grad is None or other is None or grad.shape != other.shape:
            wrong.append(f"{name} has {'no' if other is None else 'a'} gradient")
        elif not torch.equal(grad, other):
            distance, size = float((grad - other).abs().max()), float(grad.abs().max())
            if name in tied and distance <= 1e-5 * size:
                near.append(f"{name} {distance:.1e}")
            else:
                wrong.append(f"{name} {distance:.1e} of {size:.1e}")
    if wrong:
        return f"WRONG: {len(wrong)} of {len(grads) + 1}: {'; '.join(wrong[:3])}"
    return f"bound: {'; '.join(near[:3])}" if near else "right"


@contextmanager
def limited(seconds: int) -> Any:
    """Raise ``TimeoutError`` in the main thread after some seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def results_of(family: Family) -> dict[str, str]:
    """The results of one family by schedule, equal on all ranks."""
    import torch.distributed as dist

    outcome: list[Any] = [None]
    try:
        model = model_of(family)
        batch, target = batch_of(family, model)
        if not dist.get_rank():
            with limited(SECONDS):
                reference = expected(model, batch, target)
    except NotBuilt as error:
        outcome = [f"not built: {error}"]
    except Exception as error:  # noqa: BLE001
        outcome = [f"not built: the tiny model does not train: {type(error).__name__}: {error}"[:300]]
    dist.broadcast_object_list(outcome, 0)
    if outcome[0]:
        return dict.fromkeys(SCHEDULES, outcome[0])
    tied = tied_names(model)
    made: dict[int, Any] = {}
    rows = {}
    for schedule, num_stages in SCHEDULES.items():
        mine: Any
        try:
            with limited(SECONDS):
                if num_stages not in made:
                    made[num_stages] = cut(family, num_stages, batch)
                mine = staged(made[num_stages], family, schedule, batch, target)
        except Exception as error:  # noqa: BLE001
            mine = failure(error)
        shards: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shards, mine)
        failures = [shard for shard in shards if isinstance(shard, str)]
        rows[schedule] = min(failures) if failures else ""  # a crash, before the failures that it caused
        if not failures and not dist.get_rank():
            rows[schedule] = verdict(reference, shards, tied)
    return rows


def tied_names(model: Any) -> set[str]:
    """The names of parameters that have several."""
    named = list(model.named_parameters(remove_duplicate=False))
    seen = Counter(id(weight) for _, weight in named)
    return {name for name, weight in named if seen[id(weight)] > 1}


def cut(family: Family, num_stages: int, batch: dict[str, Any]) -> Any:
    """The stages of a model."""
    from pipeproof.torch import stages_of_transformers

    return stages_of_transformers(model_of(family), num_stages, **options(family, batch))


def failure(error: Exception) -> str:
    """``refused`` where the text is the user's, else ``crash``."""
    from pipeproof.torch import PipelineError

    text = " ".join(str(error).split())
    if type(error) in (ValueError, PipelineError) and not leaks(text):
        return f"refused: {text[:400]}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"crash: {type(error).__name__}: {text[:300]} ({Path(last.filename).name}:{last.lineno})"


def leaks(text: str) -> bool:
    """True if a message has the text of an internal error."""
    return any(part in text for part in ("Error:", "has no attribute", "not subscriptable", "unexpected keyword"))


def rank_main(names: list[str], out: Path) -> None:
    """Train the families as one rank of ``torchrun``; rank 0 appends a line for each."""
    import logging
    import warnings

    import torch.distributed as dist
    import transformers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    everything = families()
    for name in names:
        start = time.monotonic()
        row = results_of(everything[name])
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps({"name": name, "class": everything[name].model, **row}) + "\n")
            print(f"{name} ({time.monotonic() - start:.1f} s):", *set(row.values()), flush=True)
    dist.destroy_process_group()


def launched(names: list[str]) -> list[dict[str, str]]:
    """Results of all families. A launch that dies is continued after the family that ended it."""
    rows: list[dict[str, str]] = []
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows"
            out.touch()
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
            code = subprocess.run([*command, "--rank", str(out), "--only", *left], env=environment).returncode
            new = [json.loads(line) for line in out.read_text().splitlines()]
        rows += new
        left = left[len(new) :]
        if left and code:
            rows.append(
                {"name": left[0], "class": "", **dict.fromkeys(SCHEDULES, f"crash: the launch ended with {code}")}
            )
            left = left[1:]
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of families, printed")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        rank_main(given.only, given.rank)
        return
    rows = launched(given.only or list(families()))
    print(Counter(row[schedule].split(":")[0] for row in rows for schedule in SCHEDULES))
    if not given.only:
        import torch
        import transformers

        versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
        results = json.loads(RESULTS.read_text()) | versions | {"rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
