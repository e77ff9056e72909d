"""The codes of what importing finds about a user's own files."""

from __future__ import annotations

from pipeproof.specs.codes import ExampleKind, RuleDoc

UNREADABLE = RuleDoc(
    code="PP170",
    title="a file is not what it is imported as",
    explanation=(
        "A value has a type that its setting cannot have, a token is none that the trainer knows, the text does not "
        "follow the grammar of its kind, or a file that it builds on is missing. Nothing is guessed: a setting that "
        "is read wrongly would make the verdict one about another job."
    ),
    wrong="tensor_model_parallel_size: two",
    right="tensor_model_parallel_size: 2",
    kind=ExampleKind.JOB,
)

REFUSED = RuleDoc(
    code="PP171",
    title="the job's own framework refuses these settings",
    explanation=(
        "The settings contradict a condition that the framework checks itself when the job starts: for Fleet, fewer "
        "accumulation steps than pipeline ranks with virtual stages, virtual stages on two ranks or without cached "
        "shapes; for the trainers, sharding stage 2 or 3 together with pipeline parallelism. The job would end at "
        "its start, on every machine that it was given."
    ),
    wrong="pipeline_model_parallel_size: 4\nvirtual_pipeline_model_parallel_size: 2\ngradient_accumulation_steps: 2",
    right="pipeline_model_parallel_size: 4\nvirtual_pipeline_model_parallel_size: 2\ngradient_accumulation_steps: 8",
    kind=ExampleKind.JOB,
)

ASSUMED = RuleDoc(
    code="PP172",
    title="the files do not say everything, and something was assumed",
    severity="note",
    explanation=(
        "A plan needs sizes that a training file often leaves to a model or to the launcher. Each assumed value is "
        "named with its reason. Assumed sizes of the model change times, bytes and memory; order, matching and "
        "layouts are judged for the degrees that the files do give. `--model-config`, `--world-size` and "
        "`--set KEY=VALUE` say what the files do not."
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
        "The setting bears on the pipeline, but no key of a plan says the same, or its name is like that of a known "
        "setting and is none. What it changes was not judged."
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
        "The trainer reads the setting and does not follow it: recent PaddleFormers accepts the tokens of "
        "`pipeline_parallel_config` and sets nothing by them, Fleet turns batched P2P off where P2P is overlapped, "
        "and sharding over one rank is dropped. Whoever wrote the setting believes otherwise."
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
        "the tensor differ across the ranks. The trainer sees partial sends beside sequence parallelism, logs a "
        "warning and turns them off. The same settings in a strategy of one's own, or in a trainer without that "
        "guard, train on wrong activations and gradients without any error."
    ),
    wrong="tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\nsequence_parallel: true\n"
    "overlap_p2p_comm: false\nbatch_p2p_comm: true",
    right="tensor_model_parallel_size: 2\npipeline_model_parallel_size: 2\nsequence_parallel: true\n"
    "overlap_p2p_comm: false\nbatch_p2p_comm: true\npartial_send_recv: false",
    kind=ExampleKind.JOB,
)

UNSAID = RuleDoc(
    code="PP176",
    title="a Fleet strategy does not say whether its partial sends are sound",
    severity="warning",
    explanation=(
        "A `DistributedStrategy` has no field for sequence parallelism: the model decides. With partial sends on, "
        "several tensor-parallel ranks and batched P2P the job is right without sequence parallelism and corrupts "
        "every boundary tensor with it. Say which of the two it is (`--set topology.sequence_parallel=true`, or "
        "`=false`), and the verdict follows; without partial sends the job is right in both."
    ),
    wrong="pipeline_configs { accumulate_steps: 4 }\nhybrid_configs { mp_degree: 2 pp_degree: 2 }",
    right="pipeline_configs { accumulate_steps: 4 enable_partial_send_recv: false }\n"
    "hybrid_configs { mp_degree: 2 pp_degree: 2 }",
    kind=ExampleKind.JOB,
)

IMPORT_CODES: tuple[RuleDoc, ...] = (UNREADABLE, REFUSED, ASSUMED, NOT_SHOWN, WITHOUT_EFFECT, GUARDED, UNSAID)
