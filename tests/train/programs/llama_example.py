"""The example ``train_llama`` with its own options, several times in one launch; each rank writes digests of its steps.

``llama_example.py OUT CASES``: CASES is JSON, by name the model (``llama`` or ``qwen3_moe``) and the options.
"""

import hashlib
import importlib.util
import json
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

FILE = Path(__file__).resolve().parents[3] / "examples" / "train_llama" / "train.py"


def example():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_llama", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def qwen3_moe(num_layers):
    """A Qwen3-MoE of the example's size: 4 experts, 2 for each token; one block without experts."""
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=num_layers, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=64, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=32, mlp_only_layers=[1], tie_word_embeddings=False,
        )
    )  # fmt: skip


def md5(tensor):
    return hashlib.md5(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def gradients_of(modules):
    return {name: md5(w.grad) for module in modules for name, w in module.named_parameters()}


def weights_of(modules):
    return {name: md5(w) for module in modules for name, w in module.named_parameters()}


def recorded(pipeline_class, digests):
    """The class, with the digests of each step and of the last weights."""

    class Recorded(pipeline_class):
        def step(self, *args, **kwargs):
            loss = super().step(*args, **kwargs)
            digests["losses"].append(None if loss is None else loss.item().hex())
            digests["gradients"].append(gradients_of(self.stages.values()))
            return loss

        def close(self):
            digests["weights"] = weights_of(self.stages.values())
            super().close()

    return Recorded


def main(out, cases):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train = example()
    pipeline_class, llama = train.Pipeline, train.make_model
    results = {}
    for name, (model, options) in json.loads(cases).items():
        results[name] = {"losses": [], "gradients": [], "weights": {}}
        train.Pipeline = recorded(pipeline_class, results[name])
        train.make_model = llama if model == "llama" else qwen3_moe
        sys.argv = ["train.py", *shlex.split(options)]
        train.train(train.parse_options())
    Path(out, f"rank{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
