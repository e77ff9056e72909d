"""Two processes: the saved plan of a model that was cut has its blocks as layers, and trains again."""

from functools import partial

import torch
import yaml
from models import main, refused
from transformers import LlamaConfig, LlamaForCausalLM

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.torch import Pipeline, causal_lm_loss, stages_of_transformers
from pipeproof.verify.check_plan import check

IDS = torch.randint(3, 37, (8, 12), generator=torch.Generator().manual_seed(0))


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 37}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, tie_word_embeddings=True, **sizes, **tokens))


def trained_by(model, stages, **options):
    pipe = Pipeline(stages, loss_fn=causal_lm_loss, example=(IDS[:2],), timeout_s=60, **options)
    pipe.step(IDS, target=IDS)
    pipe.clip_grad_norm_(1.0)
    pipe.step(IDS[:4, :7], target=IDS[:4, :7])  # of another length, in two micro-batches
    pipe.eval_step(IDS[:, :5], target=IDS[:, :5])
    compared = pipe.compare(model, IDS, target=IDS)
    assert compared.is_within_bounds, compared
    content = pipe.plan.content
    pipe.close()
    return content


def saved_plan(schedule, num_stages):
    model = llama()
    made = trained_by(model, stages_of_transformers(model, num_stages), schedule=schedule, num_micro_batches=4)
    names = [layer["name"] for layer in made["model"]["layers"]]
    assert names == ["embed", *(f"layer.{number}" for number in range(6)), "head"]
    assert [name for stage in made["stages"] for name in stage] == names
    assert made["model"]["layers"][-1]["borrows"] == ["embed.model.embed_tokens.weight"]
    assert not check(plan_from_dict(made)).errors
    saved = yaml.safe_load(yaml.safe_dump(made))
    again = trained_by(model, stages_of_transformers(model, num_stages), plan=saved)
    assert again["model"] == made["model"]
    assert again["stages"] == made["stages"]
    sizes = [6, *[0] * (num_stages - 1)]
    other = stages_of_transformers(model, num_stages, blocks_per_stage=sizes)
    refused(lambda: trained_by(model, other, plan=made), f"blocks_per_stage={list(map(len, blocks_of(made)))}")


def blocks_of(plan):
    return [[name for name in names if name.startswith("layer.")] for names in plan["stages"]]


KINDS = {"1f1b": 2, "zb_v": 4, "dualpipe": 2}

if __name__ == "__main__":
    main({kind: partial(saved_plan, kind, num_stages) for kind, num_stages in KINDS.items()})
