"""Directories of Hugging Face on two ranks: loaded from the meta device, trained, sharded, saved; and refusals."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.torch import (
    Pipeline,
    PipelineError,
    causal_lm_loss,
    load_pretrained,
    save_pretrained,
    stages_of_rank,
    stages_of_transformers,
)

SIZES = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
dist.init_process_group("gloo")
RANK, FOLDER = dist.get_rank(), Path(sys.argv[1])
IDS = torch.randint(0, 37, (8, 6), generator=torch.Generator().manual_seed(3))


def model_of(name, **options):
    """A model that the library loaded from a directory, which it then wrote again, in several files."""
    folder = FOLDER / name
    if RANK == 0:
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options)).save_pretrained(folder)
    dist.barrier()
    model = transformers.LlamaForCausalLM.from_pretrained(folder).train()
    dist.barrier()
    if RANK == 0:
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="20KB")
    dist.barrier()
    return model


def meta_stages(num_stages, **options):
    with torch.device("meta"):
        return stages_of_transformers(
            transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options)), num_stages
        )


def same_files(made, expected):
    """Every rank sees the same bytes in the same files."""
    dist.barrier()
    files, others = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in (made, expected))
    assert files.keys() == others.keys(), (sorted(files), sorted(others))
    assert [name for name in files if files[name] != others[name]] == []


def error_on_all_ranks(work):
    """The text of the error that every rank raises."""
    with pytest.raises(PipelineError) as refused:
        work()
    texts = [None] * 2
    dist.all_gather_object(texts, str(refused.value))
    assert texts[0] == texts[1], texts
    return texts[0]


def trains_from_meta_and_saves():
    model = model_of("initial")
    on_meta = meta_stages(4)
    own = {number: on_meta[number] for number in stages_of_rank("zb_v", 2, 4, RANK)}
    load_pretrained(own, FOLDER / "initial")
    assert [number for number, stage in on_meta.items() if next(stage.parameters()).is_meta] == [[1, 2], [0, 3]][RANK]
    options = {"num_micro_batches": 4, "loss_fn": causal_lm_loss, "example": (IDS[:2],), "timeout_s": 120.0}
    pipe = Pipeline(on_meta, schedule="zb_v", **options)
    optimizer = torch.optim.SGD(torch.nn.ModuleList(own.values()).parameters(), 0.1)
    reference_optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pipe.step(IDS, target=IDS)
    optimizer.step()
    for part in IDS.chunk(4):
        (model(input_ids=part, labels=part, use_cache=False).loss / 4).backward()
    reference_optimizer.step()
    save_pretrained(pipe, FOLDER / "trained", max_shard_size="20KB")
    if RANK == 0:
        model.save_pretrained(FOLDER / "expected", max_shard_size="20KB")
    same_files(FOLDER / "trained", FOLDER / "expected")
    save_pretrained(pipe, FOLDER / "trained")  # one file in place of many; another file stays
    assert not list((FOLDER / "trained").glob("*-of-*"))
    pipe.close()


def sharded_stages():
    """Two ranks with one stage, whose parameters are shards from the start."""
    model = model_of("tied", tie_word_embeddings=True)
    stage = meta_stages(1, tie_word_embeddings=True)[0]
    for block in stage.blocks.values():
        fully_shard(block)
    fully_shard(stage)
    load_pretrained({0: stage}, FOLDER / "tied")
    for name, weight in stage.named_parameters():
        assert torch.equal(weight.full_tensor(), model.get_parameter(name)), name
    output = stage(IDS)
    assert torch.equal(output, model(IDS).logits)
    save_pretrained({0: stage}, FOLDER / "from shards", max_shard_size="20KB")
    same_files(FOLDER / "from shards", FOLDER / "tied")


def tied_weights_on_two_ranks():
    stages = meta_stages(2, tie_word_embeddings=True)
    own = {RANK: stages[RANK]}
    load_pretrained(own, FOLDER / "tied")
    options = {"num_micro_batches": 4, "loss_fn": causal_lm_loss, "example": (IDS[:2],), "timeout_s": 120.0}
    text = error_on_all_ranks(lambda: Pipeline(own, **options))
    assert "tied=[{0: 'model.embed_tokens.weight', 1: 'lm_head.weight'}]" in text
    save_pretrained(own, FOLDER / "from ranks", max_shard_size="20KB")
    same_files(FOLDER / "from ranks", FOLDER / "tied")
    if RANK:
        with torch.no_grad():
            own[1].get_parameter("lm_head.weight").add_(1)
    with pytest.raises(PipeproofError, match=r"lm_head\.weight of stage 1 on rank 1 are one tensor of the model"):
        save_pretrained(own, FOLDER / "differs")


def refusals():
    model_of("whole")
    stages = meta_stages(2)
    assert "pass {number: stages[number]" in error_on_all_ranks(lambda: load_pretrained(stages, FOLDER / "whole"))
    own = {RANK: stages[RANK]}
    text = error_on_all_ranks(lambda: load_pretrained({RANK: torch.nn.Linear(2, 2)} if RANK else own, FOLDER / "whole"))
    assert "stage 1 is a Linear" in text
    assert all(weight.is_meta for weight in own[RANK].parameters())
    load_pretrained(own, FOLDER / "whole")
    text = error_on_all_ranks(lambda: save_pretrained({0: own[0]} if RANK == 0 else {}, FOLDER / "parts"))
    assert "at least one stage" in text
    if RANK == 0:
        (FOLDER / "a file").write_text("")
    assert "a file" in error_on_all_ranks(lambda: save_pretrained(own, FOLDER / "a file"))


def old_weights_are_refused():
    model = model_of("stale")
    stages = stages_of_transformers(model, 2)
    options = {"num_micro_batches": 4, "loss_fn": causal_lm_loss, "example": (IDS[:2],), "timeout_s": 120.0}
    pipe = Pipeline(stages, **options)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pipe.eval_step(IDS, target=IDS)
    model.state_dict()
    pipe.step(IDS, target=IDS)
    for work in (
        model.state_dict,
        model.model.layers[0 if RANK else 3].state_dict,
        lambda: model.save_pretrained(FOLDER / "old"),
    ):
        with pytest.raises(PipelineError, match=r"save_pretrained\(pipe, directory\)") as refused:
            work()
        assert f"trains stages [{RANK}] on this rank, and stages [{1 - RANK}] on other ranks" in str(refused.value)
    assert pipe.stages[RANK].state_dict()
    assert pipe.compare(model, IDS, target=IDS).is_exact
    model.load_state_dict(state)
    assert model.state_dict().keys() == state.keys()
    pipe.close()


for work in (
    trains_from_meta_and_saves, sharded_stages, tied_weights_on_two_ranks, refusals, old_weights_are_refused,
):  # fmt: skip
    work()
    dist.barrier()
    if RANK == 0:
        print("passed", work.__name__, flush=True)  # noqa: T201 - the test reads it
dist.destroy_process_group()
