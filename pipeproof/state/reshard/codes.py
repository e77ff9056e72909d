"""21x: what the proof of a reshard finds beside rules 210 and 211, documented."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc

OTHER_TENSORS = RuleDoc(
    code="PP213",
    title="a tensor is missing, or there and not asked for",
    severity="error",
    explanation=(
        "Each tensor of the target must be made of something, and each tensor of the source must go somewhere or be "
        "removed by name. A loader that passes over what it does not know trains on with initial weights and says "
        "nothing; so nothing is passed over. Names are compared as they stand, and the nearest ones are shown."
    ),
    wrong="pipeproof reshard states --to deeper.yaml -o out   # a plan of 9 layers, and the state has 8",
    right="pipeproof reshard states --to plan_b.yaml -o out   # the same model on another topology",
    kind=ExampleKind.COMMAND,
)

OTHER_SHAPES = RuleDoc(
    code="PP214",
    title="a tensor has another shape or type than is asked for",
    severity="error",
    explanation=(
        "Resharding cuts tensors in other places and never changes what they are. A vocabulary that is padded for "
        "another number of tensor-parallel ranks is the exception: where both plans say how many ids there are "
        "(`model.unpadded_vocab_size`), padding is left out on one side and zeros on the other. A type changes by a "
        "cast that somebody wrote, never by the way."
    ),
    wrong="pipeproof reshard tp2.yaml tp4.yaml --check   # vocab_size 50432 and 50688, nothing tells what is padding",
    right="pipeproof reshard tp2.yaml tp4.yaml --check   # both have unpadded_vocab_size: 50257",
    kind=ExampleKind.COMMAND,
)

LOST_ON_THE_WAY = RuleDoc(
    code="PP215",
    title="elements of a saved tensor go nowhere",
    severity="error",
    explanation=(
        "A map of one checkpoint's tensors to another's is a bijection: every element of the source is in the target, "
        "or was removed by name, or is padding. Where a map reads one part twice and another one never, sizes agree "
        "on both sides, and training goes on with experts that are copies of others and without those that are lost."
    ),
    wrong="pipeproof reshard states --to plan_b.yaml --aoa names.txt -o out   # experts 0 to 3 are read twice",
    right="pipeproof reshard states --to plan_b.yaml --aoa names.txt -o out   # each expert is read by its own number",
    kind=ExampleKind.COMMAND,
)

SEVERAL_PLACES = RuleDoc(
    code="PP216",
    title="elements of a saved tensor go to several places",
    severity="warning",
    explanation=(
        "Some tensors are saved twice on purpose: an embedding that is the head as well, the copies that modules of "
        "multi-token prediction have. Conventions of names say which. Any other copy is shown: where training goes on "
        "each copy gets gradients of its own, and the two drift apart."
    ),
    wrong="pipeproof reshard model.safetensors --to plan.yaml --aoa names.txt -o out   # up is read as gate and as up",
    right="pipeproof reshard model.safetensors --to plan.yaml --aoa names.txt -o out   # gate and up, each its own",
    kind=ExampleKind.COMMAND,
)

PROOF_CODES = (OTHER_TENSORS, OTHER_SHAPES, LOST_ON_THE_WAY, SEVERAL_PLACES)
