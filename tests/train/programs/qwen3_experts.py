"""A Qwen3-MoE of Hugging Face on two pipeline ranks, each with its experts on two ranks; against one process."""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeproof.torch import Pipeline, causal_lm_loss, stages_of_transformers

NUM, ROWS, LENGTH, EXPERTS = 4, 2, 12, 4


class ExpertsOfRank(nn.Module):
    """This rank's share of a block's experts: tokens go to the rank of their expert and come back."""

    def __init__(self, experts, group):
        super().__init__()
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_own = EXPERTS // self.size
        own = slice(self.rank * self.num_own, (self.rank + 1) * self.num_own)
        self.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach()[own].clone())
        self.down_proj = nn.Parameter(experts.down_proj.detach()[own].clone())
        self.act_fn = experts.act_fn

    def forward(self, hidden_states, top_k_index, top_k_weights):
        chosen, order = top_k_index.flatten().sort(stable=True)
        tokens = order // top_k_index.shape[1]
        sent = torch.bincount(chosen // self.num_own, minlength=self.size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        splits = received.tolist(), sent.tolist()
        experts = chosen.new_empty(sum(splits[0]))
        dist.all_to_all_single(experts, chosen, *splits, group=self.group)
        rows = functional.all_to_all_single_autograd(hidden_states[tokens], *splits, self.group)
        rows = functional.wait_tensor(rows) if not rows.requires_grad else rows + 0
        result = torch.zeros_like(rows)
        for number in range(self.num_own):
            mine = (experts == self.rank * self.num_own + number).nonzero()[:, 0]
            gate, up = nn.functional.linear(rows[mine], self.gate_up_proj[number]).chunk(2, dim=-1)
            result = result.index_add(0, mine, nn.functional.linear(self.act_fn(gate) * up, self.down_proj[number]))
        back = functional.all_to_all_single_autograd(result, splits[1], splits[0], self.group) + 0
        weighted = back * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add(0, tokens, weighted)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    ep, part = mesh["ep"].get_group(), mesh.get_local_rank("ep")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=64, num_experts=EXPERTS, num_experts_per_tok=2,
    )  # fmt: skip
    whole = Qwen3MoeForCausalLM(config)
    reference = copy.deepcopy(whole)
    tokens = torch.randint(0, 64, (2, NUM * ROWS, LENGTH))  # of both expert ranks, which see different micro-batches
    stages = {mesh.get_local_rank("pp"): stages_of_transformers(whole, 2)[mesh.get_local_rank("pp")]}
    (stage,) = stages.values()
    for block in stage.blocks.values():
        block.mlp.experts = ExpertsOfRank(block.mlp.experts, ep)
    sharded = [name for name, _ in stage.named_parameters() if ".experts." in name]
    assert len(sharded) == 4
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(stage, sharded)
    pipe = Pipeline(
        stages, schedule="1f1b", num_micro_batches=NUM, loss_fn=causal_lm_loss, example=(tokens[part, :ROWS],),
        group=mesh["pp"], data_group=mesh["ep"],
    )  # fmt: skip
    loss = pipe.step(tokens[part], target=tokens[part])

    losses = [
        [causal_lm_loss(reference(rows, use_cache=False).logits, rows) for rows in own.split(ROWS)] for own in tokens
    ]
    for own in losses:
        for one in own:
            (one / NUM / 2).backward()
    if loss is not None:
        torch.testing.assert_close(loss, torch.stack(losses[part]).mean())
    expected = dict(reference.named_parameters())
    farthest = 0.0
    for name, weight in stage.named_parameters():
        gradient = expected[name].grad
        if name in sharded:  # the sum over the tokens of both ranks, which the script averages
            gradient = gradient.chunk(2)[part]
            weight.grad /= 2
        distance = float(torch.linalg.vector_norm(weight.grad - gradient) / torch.linalg.vector_norm(gradient))
        farthest = max(farthest, distance)
        assert distance < 1e-5, (name, distance)
    count = len(list(stage.parameters()))
    sys.stdout.write(f"rank {dist.get_rank()}: {count} gradients, at most {farthest:.1e} apart\n")
    sys.stdout.flush()
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
