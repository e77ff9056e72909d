"""Codes and errors of states, foreign checkpoints, names and AOA statements, and guards for reading files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from pipeproof.diagnostics.finding import BadPlanError, ExampleKind, PipeproofError, RuleDoc

STATE_UNUSABLE = RuleDoc(
    code="PP920",
    title="a run cannot resume from this state",
    explanation=(
        "A run resumes from a state if training by its plan is the same: the same framework and the same values of "
        "everything that training depends on (model, loss, seed, optimizer). Topology, schedule, layer split and "
        "sharding may differ: each rank reads its shards from any file. A state of weights alone may be of another "
        "framework, and the optimizer starts anew. The files of the state must exist, with the size and the SHA-256 of "
        "the index, and hold every element of every tensor once. Everything is checked before the first process "
        "starts: nothing is loaded in part."
    ),
    wrong="pipeproof run plan.yaml --resume states   # saved with run.seed 7, the plan has 8",
    right="pipeproof run plan.yaml --resume states   # the plan that it was saved with",
    kind=ExampleKind.COMMAND,
)

DATA_CHANGES = RuleDoc(
    code="PP925",
    title="training continues with other micro-batches",
    severity="note",
    explanation=(
        "The micro-batches of a step are counted over all data-parallel ranks. If their number or size changes, each "
        "later step sums other gradients: no plan with the former micro-batches has its bits. The state itself "
        "is loaded bit for bit. Every micro-batch is drawn by the seed, the step and its number in the step. So the "
        "data resumes with the first micro-batch of the next step, and nothing is repeated."
    ),
    wrong="pipeproof run dp4.yaml --resume states   # saved with dp 2 and as many micro-batches: twice the batch",
    right="pipeproof run dp4.yaml --resume states   # with half of num_micro_batches: the same steps",
    kind=ExampleKind.COMMAND,
)


class _OneCodeError(PipeproofError):
    """An error with the code ``doc``."""

    doc: ClassVar[RuleDoc]

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(self.doc.finding(message, help=fix))


class StateError(_OneCodeError):
    """A state that cannot be used or written; subclasses have codes of their own."""

    doc = STATE_UNUSABLE


@contextmanager
def reading(path: Path, fix: str) -> Iterator[None]:
    """Turn errors of the system into a finding that names the file; ``fix`` is for files that are missing or broken.

    Raises:
        StateError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError):
            fix = "give this user permission to read it"
        raise StateError(f"{path} cannot be read: {error.strerror}", fix) from error


def is_file_name(text: object) -> bool:
    """Return True for a name that a file of a directory can have: not a path, and with bytes that are allowed."""
    if not isinstance(text, str) or not text or Path(text).name != text:
        return False
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


DCP_UNUSABLE = RuleDoc(
    code="PP936",
    title="a distributed checkpoint of PyTorch cannot be used",
    explanation=(
        "PyTorch's distributed checkpoint (DCP) is a directory of `.distcp` files, in which each shard is an archive "
        "of `torch.save`, and the file `.metadata`, a pickle that lists the shards. The pickle is read without "
        "executing anything: one that names more than the classes of DCP is refused. PyTorch itself executes all "
        "names in it. Every listed shard must be in its file, with its size, type and shape, before anything is used."
    ),
    wrong="pipeproof state show checkpoint   # __1_0.distcp was copied in part",
    right="pipeproof state show checkpoint   # every file that .metadata names is there, and whole",
    kind=ExampleKind.COMMAND,
)
DCP_MISMATCH = RuleDoc(
    code="PP937",
    title="modules, optimizers and a distributed checkpoint do not fit together",
    explanation=(
        "`save_dcp` saves each tensor of all stages once, under its name in the whole model: any other cut of "
        "the model can load it. This needs names that are unique over all stages; a weight that several stages use is "
        "declared as tied. `load_dcp` needs every tensor of its stages, with the same shape and type, and every weight "
        "of the checkpoint must belong to a stage: a skipped weight would train from its initial values. All ranks "
        "agree on this before any of them changes a tensor."
    ),
    wrong="stages 0 and 1 both have the weight `blocks.0.weight`, and they are not declared as tied",
    right="stage 0 has `blocks.0.weight`, stage 1 has `blocks.1.weight`",
    kind=ExampleKind.OUTCOME,
)


class DcpError(StateError):
    """A checkpoint of PyTorch that cannot be read or written, or that contradicts itself."""

    doc = DCP_UNUSABLE


class DcpMismatchError(_OneCodeError):
    """Modules or optimizers that a checkpoint of PyTorch cannot hold, or that differ from it."""

    doc = DCP_MISMATCH


FLEX_UNUSABLE = RuleDoc(
    code="PP926",
    title="a checkpoint of Paddle cannot be used",
    explanation=(
        "Paddle's flex checkpoint is a directory with files of arrays and a metadata file, which lists the shards of "
        "each file. The metadata file is a pickle. It is read without executing anything: a pickle that names more "
        "than Paddle's three classes is refused. The metadata is compared with the headers of all files before "
        "anything is used. Paddle itself loads the tensors that it finds, and leaves the others unchanged."
    ),
    wrong="pipeproof state reshard states/flex --to plan_b.yaml -o new   # 1_0.safetensors was not copied",
    right="pipeproof state reshard states/flex --to plan_b.yaml -o new   # every file that 0.metadata names is there",
    kind=ExampleKind.COMMAND,
)
FLEX_UNSUPPORTED = RuleDoc(
    code="PP927",
    title="a state cannot be saved as a checkpoint of Paddle",
    explanation=(
        "With `--save-format flex` Paddle itself writes the arrays, in the ranks of a run. Runs on another framework "
        "do not have Paddle. Their optimizers have other counters, too, so Paddle's optimizers could not load them."
    ),
    wrong="pipeproof run plan.yaml --save states --save-format flex   # run.backend: torch",
    right="pipeproof run plan.yaml --save states   # pipeproof's own format, on every framework",
    kind=ExampleKind.COMMAND,
)


class FlexError(StateError):
    """A checkpoint of Paddle that cannot be read, or that contradicts itself."""

    doc = FLEX_UNUSABLE


NO_NAMES = RuleDoc(
    code="PP928",
    title="a convention has no names for this model",
    explanation=(
        "A convention gives each of a model's tensors a name and a layout that other tools can read. It has "
        "no names for parts that the models of other tools lack: hyper-connections and compressed attention in another "
        "model than DeepSeek-V4, modules that read another tensor, the clamped SwiGLU without its biases, routers with "
        "biases behind a softmax, norms, positions and biases that no model of the tool has together. A file "
        "without such tensors, or with names of our own, would load and compute another model. Such models can be "
        "saved under pipeproof's own names: omit `--names`."
    ),
    wrong="pipeproof state reshard states -o model.safetensors --names huggingface   # hyper_connections: {streams: 4}",
    right="pipeproof state reshard states -o model.safetensors   # under pipeproof's own names",
    kind=ExampleKind.COMMAND,
)

COPIES_DIFFER = RuleDoc(
    code="PP929",
    title="copies of one tensor differ",
    explanation=(
        "Some conventions save a tensor several times: the head in addition to the embedding that it is tied to; in "
        "modules of multi-token prediction the embedding, the last norm and the head. A plan has such a tensor once. "
        "If the copies differ in any byte, it is unknown which one is right, or the model is not the plan's: the head "
        "is not tied, or a module has a norm of its own. Copies are compared before any tensor is moved. Tables of "
        "experts by token id are compared, too: a plan draws them from `run.seed`, or reads `hash_tables`."
    ),
    wrong="pipeproof state reshard m.safetensors --to plan.yaml -o states --names huggingface  # tied_embedding: true",
    right="pipeproof state reshard m.safetensors --to plan.yaml -o states --names huggingface  # tied_embedding: false",
    kind=ExampleKind.COMMAND,
)


class NoNamesError(_OneCodeError):
    """PP928: a convention that lacks names for the model, or an unknown convention."""

    doc = NO_NAMES


class CopiesDifferError(_OneCodeError):
    """PP929: several tensors of a checkpoint represent one of the plan's, and differ."""

    doc = COPIES_DIFFER


UNREADABLE = RuleDoc(
    code="PP180",
    title="an AOA statement cannot be read",
    explanation=(
        "A statement is names, an arrow, names, and attributes, and has its line to itself. Attributes must be known "
        "and of their type. A statement has one operation: a merge or a split along `axis`, a `permute`, a cast, or "
        "one of fused_qkv, fused_qkv_old, fused_ffn. `$LAYER_ID` and `$EXPERT_ID` are in all of its names or in none; "
        "only one side has several names. The reader guesses nothing and skips nothing: a statement with another "
        "meaning than intended puts weights into the wrong tensors, and a loss curve does not show it."
    ),
    wrong="q.weight, k.weight > qk.weight, axis=1",
    right="q.weight, k.weight -> qk.weight, axis=1",
    kind=ExampleKind.COMMAND,
)
UNKNOWN_TENSOR = RuleDoc(
    code="PP181",
    title="an AOA statement names an unknown tensor",
    explanation=(
        "A name to the left of the arrow is a tensor of the source, or the result of an earlier statement. A pattern "
        "(`$LAYER_ID`, `$EXPERT_ID`, `*`) matches at least one tensor, and the numbers that `*` matches have no gap. "
        "Every tensor of the target is made by a statement, or is the source's of that name. Paddle's engine skips a "
        "pattern that matches no tensor, and the weights keep their initial values."
    ),
    wrong="model.layer.$LAYER_ID.qkv -> qkv.$LAYER_ID   # the source has model.layers.0.qkv, ..",
    right="model.layers.$LAYER_ID.qkv -> qkv.$LAYER_ID",
    kind=ExampleKind.COMMAND,
)
SIZE_MISMATCH = RuleDoc(
    code="PP182",
    title="sizes or types do not match an AOA statement",
    explanation=(
        "A split and the fused forms need shards of one size. Tensors that are merged have one type, and one shape "
        "except along the axis. A permutation has each dim of the tensor once. A cast starts from the type of the "
        "tensor. A result has the shape and the type of the target's tensor. An optimizer state has a type of its own, "
        "and keeps it: casts apply to weights."
    ),
    wrong="qkv -> q, k, v, axis=1   # of 4 heads and 2 groups: 4, 2 and 2 heads wide",
    right="qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2, axis=1",
    kind=ExampleKind.COMMAND,
)
NO_INVERSE = RuleDoc(
    code="PP183",
    title="AOA statements without an inverse",
    explanation=(
        "The inverse restores the source's tensors from the target's. It exists only if nothing is lost: no tensor is "
        "removed, and no cast is to a type that holds fewer values (float32 to bfloat16 or float16, and between these "
        "two). The inverse is derived statement by statement. The composition of both maps is checked to be the "
        "identity on each tensor before the inverse is shown."
    ),
    wrong="a -> b, dtype='bfloat16'   # of float32",
    right="a -> b, dtype='float32'   # of bfloat16: every value has its own",
    kind=ExampleKind.COMMAND,
)
NO_EFFECT = RuleDoc(
    code="PP184",
    title="an AOA statement has no effect, or undoes another",
    explanation=(
        "A name is assigned once, and again only by a statement that reads it (`b^T -> b`). The result of a statement "
        "is a tensor of the target, or is read by a later statement, or is removed with `-> _`. A removed tensor is "
        "not read; a tensor of the source is not overwritten before it is read; a cast changes the type. In Paddle's "
        "engine the last statement wins: `a -> b` and `b -> a` do not exchange, they make two copies. `a -> a` keeps a "
        "tensor, as in statements of PaddleFormers."
    ),
    wrong="a -> b\nb -> a",
    right="a -> kept\nb -> a\nkept -> b",
    kind=ExampleKind.COMMAND,
)


class AoaError(BadPlanError):
    """Statements that cannot be read, applied or inverted."""


STATE_CODES = (
    *(STATE_UNUSABLE, DATA_CHANGES, DCP_UNUSABLE, DCP_MISMATCH, FLEX_UNUSABLE, FLEX_UNSUPPORTED),
    *(NO_NAMES, COPIES_DIFFER, UNREADABLE, UNKNOWN_TENSOR, SIZE_MISMATCH, NO_INVERSE, NO_EFFECT),
)
