"""PP936 and PP937: checkpoints of PyTorch that cannot be used, or that do not fit the modules."""

from __future__ import annotations

from pipeproof.diagnostics.finding import ExampleKind, PipeproofError, RuleDoc
from pipeproof.state.state_codes import StateError

DCP_UNUSABLE = RuleDoc(
    code="PP936",
    title="a distributed checkpoint of PyTorch cannot be used",
    explanation=(
        "PyTorch's distributed checkpoint (DCP) is a directory of `.distcp` files, in which each shard is an archive "
        "of `torch.save`, and the file `.metadata`, a pickle that lists the shards. The pickle is read without "
        "executing anything: one that names more than the classes of DCP is refused. PyTorch itself executes what it "
        "names. Every listed shard must be in its file, with its size, type and shape, before anything is used."
    ),
    wrong="pipeproof state show checkpoint   # __1_0.distcp was copied in part",
    right="pipeproof state show checkpoint   # every file that .metadata names is there, and whole",
    kind=ExampleKind.COMMAND,
)
DCP_MISMATCH = RuleDoc(
    code="PP937",
    title="modules, optimizers and a distributed checkpoint do not fit together",
    explanation=(
        "`save_dcp` saves each tensor of all stages once, under its name in the whole model, so that any other cut of "
        "the model can load it. This needs names that are unique over all stages; a weight that several stages use is "
        "declared as tied. `load_dcp` needs every tensor of its stages, with the same shape and type, and every weight "
        "of the checkpoint must belong to a stage: a skipped weight would train from its initial values. All ranks "
        "agree on this before any of them changes a tensor."
    ),
    wrong="stages 0 and 1 both have the weight `blocks.0.weight`, and they are not declared as tied",
    right="stage 0 has `blocks.0.weight`, stage 1 has `blocks.1.weight`",
    kind=ExampleKind.OUTCOME,
)

DCP_CODES = (DCP_UNUSABLE, DCP_MISMATCH)


class DcpError(StateError):
    """A checkpoint of PyTorch that cannot be read or written, or that contradicts itself."""

    doc = DCP_UNUSABLE


class DcpMismatchError(PipeproofError):
    """Modules or optimizers that a checkpoint of PyTorch cannot hold, or that differ from it."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(DCP_MISMATCH.finding(message, help=fix))
