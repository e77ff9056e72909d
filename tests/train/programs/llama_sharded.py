"""A Llama of Hugging Face on two pipeline ranks, each stage sharded over two ranks by FSDP2; against one process."""

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from pipeproof.torch import Pipeline, causal_lm_loss, stages_of_transformers

NUM, ROWS, LENGTH, STEPS = 4, 2, 12, 20


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
    )
    whole = LlamaForCausalLM(config)
    reference = copy.deepcopy(whole)
    stage = stages_of_transformers(whole, 2)[pp]
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])
    batches = torch.randint(0, 64, (STEPS, 2, NUM * ROWS, LENGTH))
    pipe = Pipeline(
        {pp: stage}, schedule="1f1b", num_micro_batches=NUM, loss_fn=causal_lm_loss, example=(batches[0, dp, :ROWS],),
        group=mesh["pp"],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(pipe.stages[pp].parameters(), lr=1e-3)
    expected = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    of_reference, farthest = dict(reference.named_parameters()), 0.0
    for both in batches:
        loss = pipe.step(both[dp], target=both[dp])
        losses = [
            [causal_lm_loss(reference(rows, use_cache=False).logits, rows) for rows in own.split(ROWS)] for own in both
        ]
        for own in losses:
            for one in own:
                (one / NUM / 2).backward()
        if loss is not None:
            torch.testing.assert_close(loss, torch.stack(losses[dp]).mean(), rtol=1e-4, atol=1e-5)
        if torch.equal(both, batches[0]):  # later weights differ by rounding, which AdamW enlarges
            for name, weight in stage.named_parameters():
                gradient, whole_one = of_reference[name].grad, weight.grad.full_tensor()
                distance = float(torch.linalg.vector_norm(whole_one - gradient) / torch.linalg.vector_norm(gradient))
                farthest = max(farthest, distance)
                assert distance < 1e-5, (name, distance)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    sys.stdout.write(f"rank {dist.get_rank()}: {STEPS} steps, gradients at most {farthest:.1e} apart\n")
    sys.stdout.flush()
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
