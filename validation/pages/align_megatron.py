"""Aligns Megatron-Core's GPT, tensor parallel 2 x pipeline parallel 2 on a CPU, with transformers' Llama.

Needs PyTorch, transformers and megatron-core (0.16.1 is the newest for Python 3.11). Both train the same weights in
programs of their own, recorded by two lines each; ``state align`` compares the records by the names that checkpoints
have. Prints the comparison without a fault and with one: Megatron's accumulated gradients are scaled by a half. Status
0 if the first is equal within rounding, and the second names the scale.

Weights are converted here by hand, not by the conventions that ``state align`` reads. Megatron-Core needs these patches
on a CPU: tensors that it makes on ``cuda`` are made on the CPU, and the GPU's random state is left alone. Its default
mask is made on a GPU, so the causal mask is passed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import pipeproof.torch

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB = 4, 32, 4, 2, 64, 64
SEQUENCE, BATCH, MICRO_BATCHES, STEPS = 8, 2, 2, 2


def main(fault: str = "") -> int:
    """Record both programs, without and with a fault, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        _start(["-m", "torch.distributed.run", "--nproc-per-node", "4"], "megatron", f"{folder}/megatron", "")
        _start(["-m", "torch.distributed.run", "--nproc-per-node", "4"], "megatron", f"{folder}/scaled", "scale")
        _start([], "huggingface", f"{folder}/huggingface", "")
        names = ["--names-a", "megatron", "--names-b", "huggingface", "--rounding"]
        found = []
        for record in ("megatron", "scaled"):
            command = [sys.executable, "-m", "pipeproof", "state", "align", f"{folder}/{record}"]
            command += [f"{folder}/huggingface", *names]
            print(subprocess.run(command, check=False, capture_output=True, text=True).stdout)
            result = subprocess.run([*command, "--format", "json"], check=False, capture_output=True, text=True)
            found.append(json.loads(result.stdout))
    first = found[1]["tensors"]["first_difference"]
    return int(not (found[0]["equal"] and not found[1]["equal"] and first["cause"]["family"] == "scale"))


def _start(launcher: list[str], *arguments: str) -> None:
    subprocess.run([sys.executable, *launcher, __file__, *arguments], check=True)


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        intermediate_size=FFN, vocab_size=VOCAB, rms_norm_eps=1e-5, attn_implementation="eager",
        max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    while True:
        tokens = torch.randint(VOCAB, (BATCH, SEQUENCE + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def _train_huggingface(directory: str) -> None:
    model, batches = _model(), _batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pipeproof.torch.record_layers(model, directory, names=["*"]):
        for _ in range(STEPS):
            for _ in range(MICRO_BATCHES):
                tokens, labels = next(batches)
                logits = model(tokens).logits
                (functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()


class _OnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch is untyped
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device")):
            given["device"] = "cpu"
        return function(*args, **given)


def _train_megatron(directory: str, fault: str) -> None:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo")
    with (
        _OnCpu(),
        patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
    ):
        parallel_state.initialize_model_parallel(2, 2)
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
            ffn_hidden_size=FFN, normalization="RMSNorm", gated_linear_unit=True, activation_func=functional.silu,
            add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
            tensor_model_parallel_size=2, pipeline_model_parallel_size=2, pipeline_dtype=torch.float32,
            batch_p2p_comm=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
            finalize_model_grads_func=finalize_model_grads,
        )  # fmt: skip
        model = GPTModel(
            config, get_gpt_decoder_block_spec(config, use_transformer_engine=False), VOCAB, 64,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        _load(model)
        network = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches, run = _batches(), get_forward_backward_func()
        with pipeproof.torch.record_layers(network, directory, names=["*"]):
            for _ in range(STEPS):
                network.zero_grad_buffer()
                run(
                    forward_step_func=_forward, data_iterator=batches, model=[network],
                    num_microbatches=MICRO_BATCHES, seq_length=SEQUENCE, micro_batch_size=BATCH, forward_only=False,
                )  # fmt: skip
                if fault == "scale":
                    network.scale_gradients(0.5)
                for weight in model.parameters():
                    weight.grad = weight.main_grad
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


def _forward(batches: Iterator[tuple[torch.Tensor, torch.Tensor]], network: Any) -> Any:
    tokens, labels = next(batches)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    losses = network(tokens, torch.arange(SEQUENCE).expand(BATCH, -1), mask, labels=labels)
    return losses, lambda each: (each.mean(), {})


def _load(model: Any) -> None:
    """Give this rank its parts of the weights of transformers' model."""
    from megatron.core import parallel_state

    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    whole = _as_megatron(_model().state_dict())
    first = next((layer.layer_number - 1 for layer in model.decoder.layers), 0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + first)
            value = whole[".".join(parts)]
            if getattr(weight, "tensor_model_parallel", False):
                pieces = value.chunk(weight.partition_stride * size, weight.partition_dim)
                value = torch.cat(pieces[rank::size], weight.partition_dim)
            weight.copy_(value)


def _as_megatron(named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    whole = {
        "embedding.word_embeddings.weight": named["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": named["model.norm.weight"],
        "output_layer.weight": named["lm_head.weight"],
    }
    for number in range(LAYERS):
        theirs, ours = f"model.layers.{number}", f"decoder.layers.{number}"
        queries, keys, values = (
            named[f"{theirs}.self_attn.{each}_proj.weight"].reshape(GROUPS, -1, HIDDEN) for each in "qkv"
        )
        whole |= {
            f"{ours}.input_layernorm.weight": named[f"{theirs}.input_layernorm.weight"],
            f"{ours}.self_attention.linear_qkv.weight": torch.cat((queries, keys, values), 1).reshape(-1, HIDDEN),
            f"{ours}.self_attention.linear_proj.weight": named[f"{theirs}.self_attn.o_proj.weight"],
            f"{ours}.pre_mlp_layernorm.weight": named[f"{theirs}.post_attention_layernorm.weight"],
            f"{ours}.mlp.linear_fc1.weight": torch.cat(
                [named[f"{theirs}.mlp.{each}_proj.weight"] for each in ("gate", "up")]
            ),
            f"{ours}.mlp.linear_fc2.weight": named[f"{theirs}.mlp.down_proj.weight"],
        }
    return whole


if __name__ == "__main__":
    if sys.argv[1:2] == ["megatron"]:
        _train_megatron(*sys.argv[2:4])
    elif sys.argv[1:2] == ["huggingface"]:
        _train_huggingface(sys.argv[2])
    else:
        sys.exit(main())
