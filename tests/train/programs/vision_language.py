"""A vision encoder with ranks and replicas of its own before a language model: all bits of the unpartitioned model."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import main, own_copies, refused, say
from torch import nn

from pipeproof.torch import Pipeline, stages_of_rank

NUM_MICRO_BATCHES, WIDTH, VOCABULARY = 4, 8, 11
PATCHES, TOKENS = 5, 6


class Attention(nn.Module):
    """A block of attention with two heads and an MLP."""

    def __init__(self, *, is_causal):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp, self.is_causal = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()), is_causal

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Vision(nn.Module):
    """Features of the patches of an image; the adapter's width is the language model's."""

    def __init__(self):
        super().__init__()
        self.patches, self.block, self.adapter = (
            nn.Linear(3, WIDTH),
            Attention(is_causal=False),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, image):
        return self.adapter(self.block(self.patches(image)))


class Language(nn.Module):
    """The image's features, then the tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), Attention(is_causal=True)

    def forward(self, features, *, tokens):
        return self.block(torch.cat([features, self.embed(tokens)], 1))


class Head(nn.Module):
    """Logits of the tokens; with an edge it reads the image's features again."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Attention(is_causal=True), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x, image=None):
        h = self.block(x) if image is None else self.block(x) + image.mean(1, keepdim=True)
        return self.head(h[:, PATCHES:])


class Both(Language):
    """A language model of one stage."""

    def __init__(self):
        super().__init__()
        self.head = Head()

    def forward(self, features, *, tokens):
        return self.head(super().forward(features, tokens=tokens))


class VisionLanguage(nn.ModuleList):
    """The whole model; its weights have the names of the stages' weights."""

    def __init__(self, num_language, *, reads_again=False):
        torch.manual_seed(7)
        middle = [Attention(is_causal=True) for _ in range(num_language - 2)]
        super().__init__([Vision(), *([Both()] if num_language == 1 else [Language(), *middle, Head()])])
        self.reads_again = reads_again

    def forward(self, image, tokens):
        features = self[0](image)
        x = self[1](features.view_as(features), tokens=tokens)
        for stage in [*self][2:-1]:
            x = stage(x)
        if len(self) == 2:
            return x
        return self[-1](x, image=features.view_as(features)) if self.reads_again else self[-1](x)


def loss_fn(logits, target, **options):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), **options)


def batch(num_rows):
    torch.manual_seed(1)
    image = torch.randn(num_rows, PATCHES, 3)
    return image, *torch.randint(VOCABULARY, (2, num_rows, TOKENS))


def modules_of(encoder, language, num_language, pp, *, frozen=None):
    modules = {"vision": {"stages": [0, 0], "dp": encoder},
               "language": {"stages": [1, num_language], "dp": language, "pp": pp}}  # fmt: skip
    return {name: keys | ({"frozen": True} if name == frozen else {}) for name, keys in modules.items()}


def freeze(model, module):
    for stage in {"vision": [*model][:1], "language": [*model][1:]}.get(module, ()):
        stage.requires_grad_(requires_grad=False)


def pipeline(model, kind, modules, loss=loss_fn, **options):
    image, tokens, _ = batch(2)
    num_stages, num_ranks = len(model), dist.get_world_size()
    own = own_copies(list(model), stages_of_rank(kind, num_ranks, num_stages, dist.get_rank(), modules=modules))
    return Pipeline(
        own, schedule=kind, num_micro_batches=NUM_MICRO_BATCHES, loss_fn=loss, example=(image,),
        example_kwargs={"tokens": tokens}, modules=modules, **options,
    )  # fmt: skip


def distance(pipe, model, image, tokens, target):
    """The largest relative distance of a gradient of this rank from plain autograd over all micro-batches."""
    model.zero_grad()
    for parts in zip(*(x.chunk(NUM_MICRO_BATCHES) for x in (image, tokens, target)), strict=True):
        (loss_fn(model(*parts[:2]), parts[2]) / NUM_MICRO_BATCHES).backward()
    pipe.step(image, tokens=tokens, target=target)
    pairs = [
        (weight.grad, expected.grad)
        for number, stage in pipe.stages.items()
        for weight, expected in zip(stage.parameters(), model[number].parameters(), strict=True)
        if expected.grad is not None
    ]
    return max((float((a - b).norm() / b.norm()) for a, b in pairs), default=0.0)


def equal(case, cases, num_language, *, frozen=None, edges=None, **options):
    for kind, (encoder, language), pp in cases:
        model = VisionLanguage(num_language(pp, kind), reads_again=bool(edges))
        freeze(model, frozen)
        modules = modules_of(encoder, language, len(model) - 1, pp, frozen=frozen)
        pipe = pipeline(model, kind, modules, edges=edges and {"image": (0, [len(model) - 1], edges)}, **options)
        image, tokens, target = batch(2 * NUM_MICRO_BATCHES)
        compared = pipe.compare(model, image, tokens=tokens, target=target)
        assert compared.is_exact, (kind, encoder, language, str(compared))
        shorter = [x[:NUM_MICRO_BATCHES] for x in (image, tokens, target)]
        smaller = pipe.compare(model, *shorter[:1], tokens=shorter[1], target=shorter[2])
        assert smaller.is_exact, (kind, encoder, language, str(smaller))
        far = distance(pipe, model, image, tokens, target)
        assert far < 1e-5, (kind, encoder, language, far)
        trained = [weight.grad is not None for stage in pipe.stages.values() for weight in stage.parameters()]
        assert any(trained) != ((frozen == "vision") == (0 in pipe.stages) and bool(frozen))
        evaluated = pipe.eval_step(image, tokens=tokens, target=target)
        assert evaluated is None or torch.allclose(evaluated, loss_fn(model(image, tokens), target), rtol=1e-5)
        pipe.close()
        say(case, kind=kind, dp=[encoder, language], pp=pp, equal=compared.num_parameters, far=f"{far:.0e}")


def chunks(pp, kind):
    return 2 * pp if kind in ("interleaved", "zb_v", "dualpipe_v") else pp


LAYOUTS = {3: [((1, 1), 2), ((1, 2), 1)], 4: [((2, 1), 2)], 5: [((1, 2), 2)]}
"""By number of ranks: replicas of the encoder and of the language model, and the ranks of one of the latter."""


def every(*kinds):
    return [(kind, dp, pp) for dp, pp in LAYOUTS[dist.get_world_size()] for kind in kinds]


def all_bits():
    equal("trained", every("1f1b", "zb_h1", "gpipe", "interleaved", "zb_v"), chunks)
    for split in ("linear", "graph"):
        equal(f"split {split}", every("zb_v"), chunks, split=split, compiler="eager")


def frozen_all_bits():
    equal("frozen", every("1f1b", "zb_v"), chunks, frozen="vision")
    equal("frozen language", every("1f1b", "zb_v"), chunks, frozen="language")


def edges_all_bits():
    of_two = [(kind, dp, pp) for kind, dp, pp in every("1f1b", "zb_v") if pp > 1]
    for route in ("relay", "direct"):
        equal(f"edges {route}", of_two, chunks, edges=route)
        equal(f"frozen edges {route}", of_two, chunks, edges=route, frozen="vision")


def shared_all_bits():
    """Two replicas of the encoder on the two ranks of the language model, in an order that the script writes."""
    programs = "0F0 1F0 0F2 1F1 1B0 0B0 1F2 1B1 1F3 1B2 0B2 1B3", "0F1 2F0 2B0 0F3 2F1 2B1 0B1 2F2 2B2 2F3 2B3 0B3"
    image, tokens, target = batch(2 * NUM_MICRO_BATCHES)
    for frozen in (None, "vision"):
        model, placement = VisionLanguage(2), [[0, 1], [0, 2]]
        freeze(model, frozen)
        written = [[op for op in text.split() if not (frozen and op.startswith("0B"))] for text in programs]
        section = {"kind": "custom", "programs": written, "num_micro_batches": 4, "placement": placement}
        pipe = Pipeline(
            own_copies(list(model), placement[dist.get_rank()]), plan={"schedule": section}, loss_fn=loss_fn,
            example=(image[:2],), example_kwargs={"tokens": tokens[:2]}, modules=modules_of(2, 1, 2, 2, frozen=frozen),
        )  # fmt: skip
        compared = pipe.compare(model, image, tokens=tokens, target=target)
        assert compared.is_exact, str(compared)
        pipe.close()
        say("shared", frozen=frozen, equal=compared.num_parameters)


def sum_and_count(logits, target):
    """The sum over the tokens that count, whose number differs between micro-batches."""
    counted = target != 0
    return loss_fn(logits, target.masked_fill(~counted, -100), reduction="sum"), counted.sum()


def tokens_all_bits():
    """Gradients divided by all tokens of the step, whichever replica had them; and the norm over all modules."""
    for kind, (encoder, language), pp in every("1f1b"):
        model = VisionLanguage(pp)
        modules = modules_of(encoder, language, pp, pp, frozen="vision")
        freeze(model, "vision")
        pipe = pipeline(model, kind, modules, loss=sum_and_count, normalize="tokens", loss_on="all")
        image, tokens, target = batch(2 * NUM_MICRO_BATCHES)
        target[:3] = 0
        compared = pipe.compare(model, image, tokens=tokens, target=target)
        assert compared.is_exact, str(compared)
        total, count = sum_and_count(model(image, tokens), target)
        (total / count).backward()
        loss = pipe.step(image, tokens=tokens, target=target)
        assert torch.allclose(loss, total / count, rtol=1e-6)
        expected = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norm = pipe.clip_grad_norm_(0.1)
        assert torch.allclose(norm, expected, rtol=1e-5), (norm, expected)
        pipe.close()
        say("tokens", kind=kind, dp=[encoder, language], equal=compared.num_parameters)


def wrong():
    """Modules that are not frozen, do not fit the ranks, or are sharded."""
    (encoder, language), pp = LAYOUTS[dist.get_world_size()][0]
    model = VisionLanguage(pp)
    fits = modules_of(encoder, language, pp, pp)
    assert stages_of_rank("1f1b", dist.get_world_size(), pp + 1, 0, modules=fits) == [0]

    def with_modules(**changes):
        modules = {name: {**keys, **changes.get(name, {})} for name, keys in fits.items()}
        own = own_copies(
            list(model), stages_of_rank("1f1b", dist.get_world_size(), pp + 1, dist.get_rank(), modules=fits)
        )
        image, tokens, _ = batch(2)
        return lambda: Pipeline(own, num_micro_batches=4, loss_fn=loss_fn, example=(image,),
                                example_kwargs={"tokens": tokens}, modules=modules)  # fmt: skip

    refused(with_modules(vision={"frozen": True}), "stage 0 is of a frozen module, and patches.weight is trained")
    refused(with_modules(vision={"dp": 3}), "do not divide into 3 equal shares")
    refused(with_modules(language={"tp": 2}), "each of its ranks holds whole layers")
    refused(with_modules(language={"dp": 4}), "the modules have")
    say("wrong", refused=4)


if __name__ == "__main__":
    cases = {"trained": all_bits, "frozen": frozen_all_bits, "edges": edges_all_bits, "tokens": tokens_all_bits}
    main(cases | {"shared": shared_all_bits, "wrong": wrong})
