"""Codes of the importers' findings about a user's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeproof.diagnostics.finding import ExampleKind, Location, RuleDoc
from pipeproof.diagnostics.source import PlanFileError, SourceMap

UNREADABLE = RuleDoc(
    code="PP170",
    title="a file is not of the stated kind",
    explanation=(
        "A value has a wrong type for its setting, a token is unknown to the trainer, a setting is a misspelling of a "
        "known one, the text does not follow the grammar of its kind, a base file is missing, or the file is of "
        "another trainer. The importer does not guess: with a misread setting the verdict would be about another job."
    ),
    wrong="tensor_model_parallel_size: two",
    right="tensor_model_parallel_size: 2",
    kind=ExampleKind.JOB,
)

REFUSED = RuleDoc(
    code="PP171",
    title="the job's own framework refuses these settings, or drops a part of them",
    explanation=(
        "The settings contradict a condition that the framework itself checks when the job starts; the finding names "
        "versions that accept them silently. It is based on values in the files, never on assumed ones. "
        "Examples are, for Fleet, fewer "
        "accumulation steps than pipeline ranks with virtual stages, virtual stages on two ranks or without cached "
        "shapes; for the trainers, sharding stage 2 or 3 together with pipeline parallelism; for PyTorch, fewer "
        "micro-batches than stages with one stage on each rank."
    ),
    wrong="pipeline_model_parallel_size: 4\nvirtual_pipeline_model_parallel_size: 2\ngradient_accumulation_steps: 2",
    right="pipeline_model_parallel_size: 4\nvirtual_pipeline_model_parallel_size: 2\ngradient_accumulation_steps: 8",
    kind=ExampleKind.JOB,
)

ASSUMED = RuleDoc(
    code="PP172",
    title="the files are incomplete, and values were assumed",
    severity="note",
    explanation=(
        "A plan needs sizes that a training file often leaves to a model or to the launcher. The finding lists each "
        "assumed value with its reason. Assumed sizes of the model change times, bytes and memory; order, matching "
        "and layouts are checked for the degrees in the files. Give the missing values with `--model-config`, "
        "`--world-size` and `--set KEY=VALUE`."
    ),
    wrong="pipeline_model_parallel_size: 2\nsharding_parallel_size: 4",
    right="pipeline_model_parallel_size: 2\nsharding_parallel_size: 4\nmax_seq_len: 4096\nnum_hidden_layers: 28\n"
    "hidden_size: 1024\nnum_attention_heads: 16\nintermediate_size: 3072\nvocab_size: 151936",
    kind=ExampleKind.JOB,
)

NOT_SHOWN = RuleDoc(
    code="PP173",
    title="settings that the plan does not show",
    severity="note",
    explanation=(
        "The setting affects the pipeline, but a plan has no key for it, or it is unknown and its name is similar to a "
        "known setting. Its effect was not checked."
    ),
    wrong="forward_backward_overlap_scheduler: true",
    right="forward_backward_overlap_scheduler: false",
    kind=ExampleKind.JOB,
)

WITHOUT_EFFECT = RuleDoc(
    code="PP174",
    title="a setting has no effect on the job",
    severity="warning",
    explanation=(
        "The trainer reads the setting and does not apply it: recent PaddleFormers accepts the tokens of "
        "`pipeline_parallel_config` and ignores them, Fleet turns batched P2P off if P2P is overlapped, and sharding "
        "over one rank is dropped. The author of the setting probably expects an effect."
    ),
    wrong="pipeline_model_parallel_size: 2\npipeline_parallel_config: disable_partial_send_recv",
    right="pipeline_model_parallel_size: 2\npartial_send_recv: false",
    kind=ExampleKind.JOB,
)

GUARDED = RuleDoc(
    code="PP175",
    title="only a guard in the trainer keeps this job from corrupting its activations",
    severity="warning",
    explanation=(
        "All five conditions of Fleet's corruption hold in the settings: partial sends are on, there are several "
        "tensor-parallel ranks, the tensor's elements divide by them, P2P is batched, and sequence parallelism makes "
        "the tensor differ across the ranks. The trainer detects partial sends with sequence parallelism, logs a "
        "warning and turns them off. With the same settings in your own strategy, or in a trainer without that "
        "guard, the job trains on wrong activations and gradients without an error."
    ),
    wrong="tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\nsequence_parallel: true\n"
    "overlap_p2p_comm: false\nbatch_p2p_comm: true",
    right="tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\nsequence_parallel: true\n"
    "overlap_p2p_comm: false\nbatch_p2p_comm: true\npartial_send_recv: false",
    kind=ExampleKind.JOB,
)

ASSUMED_DECIDES = RuleDoc(
    code="PP176",
    title="the verdict depends on a value that the files do not have",
    severity="warning",
    explanation=(
        "The files leave a setting open: with one value of it the job is proved, with another refused. So the "
        "verdict is `undecided`, and the exit status 1. State which value the job has. A Fleet `DistributedStrategy`, "
        "for example, has no field for sequence parallelism, because the model decides: with partial sends on, several "
        "tensor-parallel ranks and batched P2P the job is correct without it, and corrupts every boundary tensor with "
        "it. A setting that is safe with both values needs no such statement."
    ),
    wrong="pipeline_configs { accumulate_steps: 4 }\nhybrid_configs { mp_degree: 2 pp_degree: 2 }",
    right="pipeline_configs { accumulate_steps: 4 enable_partial_send_recv: false }\n"
    "hybrid_configs { mp_degree: 2 pp_degree: 2 }",
    kind=ExampleKind.JOB,
)

UNDECIDED = RuleDoc(
    code="PP177",
    title="a name that is not understood may decide the schedule, so there is no verdict",
    severity="warning",
    explanation=(
        "The name is in no list of arguments of Megatron-LM or of the tool that the file is for, or it changes "
        "the order, the cut into stages or the blocks, and is not read. The rest was checked without it, which proves "
        "nothing about the job: the verdict is `undecided`, and the exit status 1. If the name changes none of these, "
        "`--ignore PP177` gives the verdict without it."
    ),
    wrong="torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2 --noop-layers 6,7",
    right="torchrun --nproc-per-node 2 pretrain_gpt.py --num-layers 8 --hidden-size 64 --num-attention-heads 4 "
    "--seq-length 64 --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 2",
    kind=ExampleKind.JOB,
)


def unreadable(
    message: str, location: Location | None = None, help: str | None = None, source: SourceMap | None = None
) -> PlanFileError:  # fmt: skip
    """Return the error PP170."""
    return PlanFileError(UNREADABLE.finding(message, location, help), source=source)


def one_file(files: Sequence[Path], what: str, help: str | None = None) -> Path:
    """Return the only file of an import; ``what`` describes it, such as ``a schedule is one file``.

    Raises:
        PlanFileError: PP170, there is another number of files.
    """
    if len(files) != 1:
        raise unreadable(f"{what}, found {len(files)}", help=help)
    return files[0]


PYTHON = (
    "a Python file is neither run nor interpreted: call `pipeproof.interop.from_arguments` in the process of its tool, "
    "or give the block of arguments that the tool prints"
)
"""Refusal of a Python file, with the alternative."""

IMPORT_CODES: tuple[RuleDoc, ...] = (
    UNREADABLE,
    REFUSED,
    ASSUMED,
    NOT_SHOWN,
    WITHOUT_EFFECT,
    GUARDED,
    ASSUMED_DECIDES,
    UNDECIDED,
)
