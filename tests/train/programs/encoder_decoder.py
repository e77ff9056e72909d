"""Encoders and decoders of Hugging Face as pipelines: all bits of the unpartitioned model, tied weights included."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import main, say
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from pipeproof.torch import Pipeline, stages_of_rank, stages_of_transformers

VOCABULARY, LAYERS, NUM_MICRO_BATCHES = 40, 4, 6


def t5():
    torch.manual_seed(1)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": LAYERS, "num_decoder_layers": LAYERS, "num_heads": 4}
    config = T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config)


def bart():
    torch.manual_seed(2)
    sizes = {"layers": LAYERS, "ffn_dim": 32, "attention_heads": 4}
    both = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}
    config = BartConfig(vocab_size=VOCABULARY, d_model=16, dropout=0.0, max_position_embeddings=16, **both)
    return BartForConditionalGeneration(config)


class DecoderStage(nn.Module):
    """A decoder stage that takes the encoder's output by name, and returns no more than its own."""

    def __init__(self, stage, *, is_first):
        super().__init__()
        self.stage, self.is_first = stage, is_first

    def forward(self, *received, encoder_output=None, **batch):
        result = self.stage(*(received if self.is_first else (encoder_output, *received)), **batch)
        return result[1:] if isinstance(result, tuple) else result


def with_direct_edges(stages, first):
    """The stages of a cut, whose decoder stages from ``first`` on take the encoder's output as a direct edge."""
    made = {n: stage if n < first else DecoderStage(stage, is_first=n == first) for n, stage in stages.items()}
    tied = [{n: name if n < first else f"stage.{name}" for n, name in names.items()} for names in stages.tied]
    users = [*range(first + 1, len(stages))]
    return made, {"tied": tied, "edges": {"encoder_output": (first - 1, users, "direct")} if users else {}}


def reading_once_in_a_stage(model, num_stages):
    """The model, whose decoder blocks read the encoder's output by one view for each stage: sums are the stages'."""
    views = {}

    def reads(number):
        def hook(_, args, kwargs):
            if not number % (LAYERS // num_stages):
                views["now"] = kwargs["key_value_states"].view_as(kwargs["key_value_states"])
            return args, {**kwargs, "key_value_states": views["now"]}

        return hook

    for number, block in enumerate(model.decoder.block):
        block.layer[1].register_forward_pre_hook(reads(number), with_kwargs=True)
    return model


def loss_fn(output, labels):
    return F.cross_entropy(getattr(output, "logits", output).flatten(0, 1), labels.flatten())


def compared(stages, kind, model, num_micro_batches, **options):
    torch.manual_seed(0)
    x, y = (torch.randint(0, VOCABULARY, (2 * num_micro_batches, length)) for length in (10, 7))
    pipe = Pipeline(
        stages, schedule=kind, num_micro_batches=num_micro_batches, loss_fn=loss_fn, example=(x[:2],),
        example_kwargs={"decoder_input_ids": y[:2]}, **options,
    )  # fmt: skip
    comparison = pipe.compare(
        model, x, decoder_input_ids=y, target=y, name_of=lambda _, name: name.removeprefix("stage.")
    )
    pipe.close()
    return comparison


def all_bits(case, make, *, direct=False):
    """Each kind of schedule: all weights, but one of several stages, whose sums of all micro-batches are added last."""
    num_ranks = dist.get_world_size()
    for kind, num_stages, num in (
        ("1f1b", num_ranks, 1), ("1f1b", num_ranks, NUM_MICRO_BATCHES), ("zb_v", 2 * num_ranks, 1),
        ("interleaved", 2 * num_ranks, NUM_MICRO_BATCHES), ("zb_v", 2 * num_ranks, NUM_MICRO_BATCHES),
    ):  # fmt: skip
        stages, options = stages_of_transformers(make(), num_stages, blocks_per_stage="even"), {}
        (tied,) = stages.tied
        model = make()
        if direct:
            first = num_stages // 2
            made, options = with_direct_edges(stages, first)
            stages = {n: made[n] for n in stages_of_rank(kind, num_ranks, num_stages, dist.get_rank())}
            model = reading_once_in_a_stage(model, num_stages - first)
        comparison = compared(stages, kind, model, num, **options)
        others = {each.name for each in comparison.differences}
        assert comparison.is_within_bounds, (kind, num, str(comparison))
        assert comparison.loss == comparison.reference_loss, (kind, num, str(comparison))
        assert others <= (set() if num == 1 and len(tied) == 2 else {*tied.values()}), (kind, num, str(comparison))
        say(case, kind=kind, equal=comparison.num_parameters - len(comparison.differences), tied=len(tied))


if __name__ == "__main__":
    main(
        {
            "t5": lambda: all_bits("t5", t5),
            "bart": lambda: all_bits("bart", bart),
            "t5_direct": lambda: all_bits("t5 direct", t5, direct=True),
        }
    )
