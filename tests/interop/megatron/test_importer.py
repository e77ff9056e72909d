"""Plans from scripts and arguments of Megatron-LM."""

import pytest

from pipeproof.diagnostics.finding import Severity
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.interop.importers.imported import plan_text, with_device
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.verify.check_plan import check_subject
from tests.cli.commands import invoke
from tests.interop import importing
from tests.interop.importing import REAL, errors
from tests.verify.programs import mutated

GPT3 = "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --vocab-size 1000 "
LLAMA = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
SIZES = GPT3 + LLAMA
BATCHES = "--micro-batch-size 1 --global-batch-size 8 "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PER_CHUNK, CHUNKS = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
PP2 = "--pipeline-model-parallel-size 2 "
OF_EXPERTS = "--num-experts 8 --moe-router-topk 2 "
MOE = f"run {SIZES}{BATCHES}{PP2}{OF_EXPERTS}"
SELECTIVE = "--recompute-granularity selective "
SHARED = f"{OF_EXPERTS}{SELECTIVE}--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap "
OVERLAP = f"{OF_EXPERTS}--overlap-moe-expert-parallel-comm "
OVERLAPPED = f"{OVERLAP}{CHUNKS} 2 --expert-model-parallel-size 2 --bf16 "


def imported(tmp_path, text, **flags):
    return importing.imported("megatron", tmp_path, text, name="train.sh", **flags)


def refusal(tmp_path, text, **flags):
    return importing.refusal(imported, tmp_path, text, **flags)


def real(name, **flags):
    return import_files("megatron", [REAL / name], Flags(**flags))


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ("--sequence-parallel False --tensor-model-parallel-size 2", "PP171", "--sequence-parallel has no value"),
        ("--bf16=true", "PP171", "--bf16 has no value, found `true`"),
        ("--tensor-model-parallel-size 2 2", "PP171", "has one value, found `2 2`"),
        ("--bf16 --fp16", "PP171", "it is given with --bf16"),
        ("--fp8-format hybrid --fp4-format e2m1", "PP171", "it is given with --fp8-format"),
        ("--recompute-granularity partial", "PP170", "is none of full, selective, found `partial`"),
        ("--recompute-granularity full", "PP171", "full needs --recompute-method"),
        ("--recompute-granularity full --recompute-method block", "PP171", "full needs --recompute-num-layers"),
        ("--recompute-activations --recompute-method block", "PP171", "it is given with --recompute-activations"),
        ("--num-experts 8 --moe-token-dispatcher-type all2all", "PP170", "found `all2all`"),
        ("--num-experts 8 --moe-router-dtype bf16", "PP170", "found `bf16`"),
        ("--position-embedding-type alibi", "PP170", "found `alibi`"),
        (
            "--num-experts 8 --tensor-model-parallel-size 2",
            "PP171",
            "with several tp ranks it needs --sequence-parallel",
        ),
        ("--tensor-model-parallel-size 2 --tp-comm-overlap", "PP171", "it needs --sequence-parallel"),
        ("--overlap-param-gather --overlap-grad-reduce", "PP171", "it needs --use-distributed-optimizer"),
        ("--overlap-param-gather --use-distributed-optimizer", "PP171", "it needs --overlap-grad-reduce"),
        ("--yaml-cfg job.yaml", "PP170", "--yaml-cfg replaces all arguments by another file"),
        (
            "--context-parallel-size 4 --seq-length 132",
            "PP171",
            "132 is not a multiple of 2 x --context-parallel-size 4",
        ),
        (f"{OF_EXPERTS}{SELECTIVE}--recompute-modules attention", "PP171", "has `attention`"),
        (f"{OF_EXPERTS}{SELECTIVE}--recompute-modules mla_up_proj", "PP171", "without --multi-latent-attention"),
        (f"{SHARED}--recompute-modules shared_experts", "PP171", "with --moe-shared-expert-overlap"),
        (f"{OF_EXPERTS}{FULL}--moe-layer-recompute", "PP171", "--moe-layer-recompute"),
        (f"{OVERLAP}--expert-model-parallel-size 2 --bf16", "PP171", "one stage on each"),
        (f"{OVERLAP}{CHUNKS} 2 --bf16", "PP171", "--expert-model-parallel-size is 1"),
        (f"{OVERLAP}{CHUNKS} 2 --expert-model-parallel-size 2", "PP171", "neither --bf16"),
        (f"{OVERLAPPED}{FULL}", "PP171", "full is given"),
        (f"{OVERLAPPED}--mtp-num-layers 2", "PP171", "2 modules"),
        (f"{OVERLAPPED}{SELECTIVE}--recompute-modules moe", "PP171", "--recompute-modules has moe"),
        (OVERLAPPED, "PP171", "tokens are gathered"),
        (f"{OF_EXPERTS}--delay-wgrad-compute", "PP171", "--delay-wgrad-compute"),
    ],
)
def test_flags_that_megatron_does_not_take_are_refused(tmp_path, flags, code, message):
    finding = refusal(tmp_path, f"run {SIZES}{BATCHES}{PP2}{flags}")
    assert (finding.code, message in finding.message) == (code, True), finding.message


def test_words_that_are_not_read_are_listed(tmp_path):
    text = f"python pretrain_gpt.py @more.txt {GPT3}{LLAMA}{PP2}--use-checkpoint-args --bf16 $(cat flags)"
    made = imported(tmp_path, text)
    assert [setting.name for setting in made.ignored] == ["the script", "--use-checkpoint-args", "the script"]
    assert ["after --bf16" in made.ignored[0].why, "@more.txt" in made.ignored[2].why] == [True, True]
    assert [one.why for one in made.assumptions if one.key[-1] == "micro_batch_size"] == [
        "there is no --micro-batch-size"
    ]


def test_a_real_script_with_experts():
    made = real("megatron_mixtral_8x7b.sh", world_size=64)
    assert made.plan["topology"] == {"tp": 1, "pp": 4, "ep": 8, "dp": 2}
    assert made.plan["schedule"] == {
        "kind": "1f1b", "framework": "megatron", "micro_batch_size": 1, "num_micro_batches": 16,
        "reduce_gradients": "when_ready",
    }  # fmt: skip
    assert made.plan["model"]["moe"] == {
        "num_experts": 8, "top_k": 2, "ffn_size": 14336, "combine": "expert", "aux_loss": 0.01,
    }  # fmt: skip
    assert [assumption.key for assumption in made.assumptions] == [("model", "vocab_size")]
    assert [setting.name for setting in made.ignored] == ["--sequence-parallel", "other flags"]
    assert made.source.locate(("topology", "pp")).line == 84
    assert (
        errors(real("megatron_mixtral_8x7b.sh", world_size=32, settings={("schedule", "num_micro_batches"): 4})) == []
    )


def test_a_real_script_whose_processes_do_not_suffice():
    finding = importing.refusal(real, "megatron_gpt3_175b.sh")
    assert finding.code == "PP171"
    assert "8 processes do not divide by tp x pp x cp = 128" in finding.message
    assert finding.location.line == 57


def test_a_real_script_with_two_batch_sizes(tmp_path):
    with pytest.raises(PlanFileError, match="--step-batch-size-schedule and --global-batch-size are given together"):
        real("megatron_gpt3_175b.sh", world_size=6144)
    lines = (REAL / "megatron_gpt3_175b.sh").read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if "--global-batch-size" not in line)
    made = imported(tmp_path, text, world_size=6144)
    assert made.plan["schedule"]["num_micro_batches"] == 1536 // 48
    (note,) = [setting.why for setting in made.ignored if setting.name.startswith("--step-batch-size-schedule")]
    assert "--set schedule.num_micro_batches=13" in note  # 624 sequences: 16 and 320 do not divide by 48
    assert errors(made) == []


def test_a_real_script_with_conditions_whose_layers_do_not_divide():
    finding = importing.refusal(real, "megatron_gptoss_20b.sh")
    assert "12 layers do not divide by --pipeline-model-parallel-size 8" in finding.message
    made = real("megatron_gptoss_20b.sh", settings={("model", "num_layers"): 16})
    assert "`--vocab-size` is given only where the block at line 162 runs" in str(made.ignored)
    memory = {"shard_optimizer": "dp", "optimizer_ranks": "replicas", "recompute": "selective"}
    assert made.plan["memory"] == {**memory, "cross_entropy": "in_place"}
    assert made.plan["cost"] == {"bucket_size": "megatron", "gather_weights": "first_forward"}
    assert errors(made) == []


def test_a_real_script_that_takes_its_model_from_another_file():
    settings = {("model", "num_layers"): 61}
    made = real("slime_deepseek_r1.sh", world_size=128, settings=settings)
    assert made.plan["topology"] == {"tp": 8, "pp": 4, "cp": 4, "sequence_parallel": True, "ep": 1, "dp": 1}
    assert [len(stage) for stage in made.plan["stages"]] == [17, 16, 16, 15]  # 16 + embed, 16, 16, 13 + norm and head
    assert any("are not read" in setting.why for setting in made.ignored)


@pytest.mark.parametrize(
    ("flags", "cost", "when"),
    [
        ("", {"bucket_size": "stage"}, None),
        ("--ddp-bucket-size 1000", {"bucket_size": "stage"}, None),
        ("--overlap-grad-reduce", {"bucket_size": "megatron"}, "when_ready"),
        ("--overlap-grad-reduce --ddp-bucket-size 1000", {"bucket_size": 1000}, "when_ready"),
        (
            "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather",
            {"bucket_size": "megatron", "gather_weights": "first_forward"},
            "when_ready",
        ),
    ],
)
def test_buckets_of_gradients(tmp_path, flags, cost, when):
    made = imported(tmp_path, f"python pretrain_gpt.py {SIZES}{BATCHES}{PP2}{flags}", world_size=4)
    assert made.plan["cost"] == cost
    assert made.plan["schedule"].get("reduce_gradients") == when
    assert not made.ignored
    assert errors(made) == []


@pytest.mark.parametrize(
    ("flags", "sizes", "chunks"),
    [
        ("", [4, 4], 1),
        ("--num-layers-per-virtual-pipeline-stage 2", [2, 2, 2, 2], 2),
        ("--num-virtual-stages-per-pipeline-rank 4", [1] * 8, 4),
        ("--decoder-first-pipeline-num-layers 3", [3, 5], 1),
        ("--decoder-last-pipeline-num-layers 2", [6, 2], 1),
        ("--decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 2", [6, 2], 1),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [4, 4], 1),
        ("--pipeline-model-parallel-layout 'Et*3|tt|(t|)*2,tL'", [3, 2, 1, 1, 1], None),
        ('--pipeline-model-parallel-layout "Et|t*2|tt|t*3L"', [1, 2, 2, 3], 2),
    ],
)
def test_the_cut(tmp_path, flags, sizes, chunks):
    text = f"python pretrain_gpt.py {SIZES}{BATCHES}{PP2}{flags}"
    if chunks is None:
        assert "5 stages, which do not divide" in refusal(tmp_path, text).message
        return
    plan = imported(tmp_path, text, world_size=2).plan
    stages = stage_layers(plan_from_dict(plan).spec)
    assert [sum(name.startswith("layer.") for name in stage) for stage in stages] == sizes
    assert stages[0][0] == "embed"
    assert stages[-1][-2:] == ("norm", "head")
    is_list_needed = len(set(sizes)) > 1 or "layout" in flags
    assert ("stages" in plan) == is_list_needed  # an even cut follows any number of ranks, as in a sweep
    assert plan["schedule"].get("num_chunks", 1) == chunks
    assert plan["schedule"]["kind"] == ("1f1b" if chunks == 1 else "interleaved")


def test_layouts_of_megatrons_own_tests(tmp_path):
    for layout, layers, pp in (("Et*2|(tt|)*5t|tmL", 14, 4), ("Et|(tt|)*6mL", 13, 2)):
        text = f"run --num-layers {layers} --pipeline-model-parallel-size {pp} --mtp-num-layers 1 {BATCHES}"
        plan = imported(tmp_path, f"{text} --pipeline-model-parallel-layout '{layout}'").plan
        names = [name for stage in plan["stages"] for name in stage]
        assert names == ["embed", *(f"layer.{i}" for i in range(layers)), "norm", "mtp.0", "head"]
        assert plan["schedule"]["num_chunks"] == len(plan["stages"]) // pp


def test_a_fault_in_a_layout_is_marked_in_the_script(tmp_path):
    file = tmp_path / "train.sh"
    file.write_text(f"run {SIZES}{BATCHES}{PP2}\\\n  --pipeline-model-parallel-layout 'Ett|tt|tx|ttL'\n")
    result = invoke("check", "--from", "megatron", file)
    assert result.exit_code == 2
    lines = result.output.splitlines() + result.stderr.splitlines()
    text = next(line for line in lines if "Ett|tt|tx" in line)
    assert next(line for line in lines if line.strip(" |") == "^").index("^") == text.index("x|ttL")


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (f"{PER_CHUNK} 2 {CHUNKS} 2", "given together", "PP171"),
        ("--num-layers-per-virtual-pipeline-stage 3", "do not divide into chunks of 3", "PP171"),
        ("--num-virtual-stages-per-pipeline-rank 3", "do not divide by 3 chunks", "PP171"),
        ("--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication", "needs 3, or overlapped", "PP171"),
        ("--account-for-loss-in-pipeline-split", "9 layers, with those that count", "PP171"),
        ("--decoder-first-pipeline-num-layers 9", "must divide", "PP171"),
        (f"--decoder-first-pipeline-num-layers 8 {CHUNKS} 2", "stage 1 has no layer", "PP170"),
        ("--global-batch-size 9 --micro-batch-size 2", "does not divide by 2 sequences", "PP171"),
        ("--num-layers 999999999999", "more than a plan can have", "PP170"),
        ("--pipeline-model-parallel-size 999999999", "which a plan does not have", "PP170"),
        ("--num-layers eight", "needs an integer of at least 1, found `eight`", "PP170"),
        ("--tensor-model-parallel-size $1", "set; give it", "PP170"),
        ("--hidden-size", "--hidden-size has no value", "PP170"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, flags, message, code):
    finding = refusal(tmp_path, f"run {SIZES}{BATCHES}{PP2}{flags}", world_size=2)
    assert finding.code == code
    if "give it" in message:
        assert finding.help == "give it with `--set topology.tp=N`"
        assert "`$1`, which the script does not set" in finding.message
    else:
        assert message in finding.message


LATENT = "--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 64 "


@pytest.mark.parametrize(
    ("flags", "modules", "ignored"),
    [
        (f"{MOE}{SELECTIVE}--recompute-modules moe_act layernorm", ["moe_act", "layernorm"], set()),
        (f"{MOE}{SELECTIVE}--recompute-modules '[layernorm mlp]'", ["layernorm", "mlp"], set()),
        (f"{MOE}{SELECTIVE}--recompute-modules core_attn", None, set()),
        (f"{MOE}{SELECTIVE}", None, set()),
        (f"{MOE}{SELECTIVE}--recompute-modules mlp mhc shared_experts", ["mlp"], {"mhc", "shared_experts"}),
        (f"{MOE}--moe-layer-recompute", ["core_attn", "moe"], set()),
        (f"run {SIZES}{BATCHES}{SELECTIVE}--recompute-modules moe mlp", ["mlp"], {"moe"}),
        (f"run {SIZES}{BATCHES}{LATENT}{SELECTIVE}--recompute-modules mla_up_proj", ["mla_up_proj"], set()),
    ],
)
def test_modules_that_are_computed_again(tmp_path, flags, modules, ignored):
    made = imported(tmp_path, flags)
    assert made.plan["memory"]["recompute"] == "selective"
    assert made.plan["memory"].get("recompute_modules") == modules
    named = {one.name.split()[-1] for one in made.ignored if one.name.startswith("--recompute-modules")}
    assert named == ignored


def test_flags_that_are_not_shown_are_named(tmp_path):
    made = imported(
        tmp_path, f"run {SIZES}{BATCHES}{PP2} --recompute-method uniform --moe-pad-expert-input-to-capacity --bf16"
    )
    assert {setting.name for setting in made.ignored} == {"--recompute-method"}
    assert made.plan["run"]["dtype"] == "bfloat16"


def test_other_flags_are_counted_in_one_note(tmp_path):
    others = (
        "--adam-beta1 0.9 --weight-decay 0.1 --log-interval 1 --save here --load there --data-path d --eval-iters 1 "
    )
    (setting,) = imported(tmp_path, f"run {SIZES}{BATCHES}{PP2}{others}--moe-grouped-gemm").ignored
    assert setting.why.startswith("7, without a term of parallelism in their names, are not read (--adam-beta1, ")
    assert setting.why.endswith("--data-path, ..)")
    assert not imported(tmp_path, f"run {SIZES}{BATCHES}{PP2}").ignored


@pytest.mark.parametrize(
    ("flag", "known"),
    [
        ("--tensor-model-paralel-size", "--tensor-model-parallel-size"),
        ("--tensor_model_paralel_size", "--tensor-model-parallel-size"),
        ("--pipeline-parallel-size", "--pipeline-model-parallel-size"),
        ("--mirco-batch-size", "--micro-batch-size"),
        ("--num-layer", "--num-layers"),
    ],
)
def test_a_misspelt_flag_is_refused(tmp_path, flag, known):
    finding = refusal(tmp_path, f"run {SIZES}{BATCHES}{PP2}\\\n  {flag} 8")
    assert (finding.code, finding.location.line, finding.location.column) == ("PP170", 2, 3)
    assert finding.help == f"did you mean `{known}`?"


@pytest.mark.parametrize(
    ("flags", "transport"),
    [
        ("", {}),
        ("--scatter-gather-tensors-in-pipeline", {"forward": "partial", "backward": "partial"}),
        ("--no-scatter-gather-tensors-in-pipeline", {"forward": "full", "backward": "full"}),
        ("--scatter-gather-tensors-in-pipeline --sequence-parallel", {}),
    ],
)
def test_the_transport_of_older_versions(tmp_path, flags, transport):
    made = imported(tmp_path, f"run {SIZES}{BATCHES}{PP2}--tensor-model-parallel-size 2 {flags}")
    assert made.plan["transport"] == {**transport, "connections": "lazy"}
    assert errors(made) == []


@pytest.mark.parametrize("flags", ["", f"{PER_CHUNK} 1 ", f"{PER_CHUNK} 1 --no-overlap-p2p-communication "])
def test_connections_open_at_first_use(tmp_path, flags):
    """In Megatron-LM's order they all open; a rank that posts a gradient's receive first waits for its own send."""
    made = imported(tmp_path, f"run {SIZES}{BATCHES}--pipeline-model-parallel-size 4 {flags}")
    is_unbatched = flags == f"{PER_CHUNK} 1 "
    assert made.plan["transport"]["connections"] == ("per_pair" if is_unbatched else "lazy")
    report = check_imported(made)
    assert ("PP413" in {finding.code for finding in report.findings}) == is_unbatched

    def post_first(rows):
        (first, *_) = (i for i, row in enumerate(rows[0]) if str(row.op).startswith("0RECV_B"))
        rows[0].insert(0, rows[0].pop(first))

    early = check_subject(mutated(report.subject, post_first))
    assert ("PP413", Severity.ERROR) in {(finding.code, finding.severity) for finding in early.findings}


@pytest.mark.parametrize("chunks", ["", "--num-layers-per-virtual-pipeline-stage 1 "])
def test_variable_lengths_send_the_shape_of_each_tensor_ahead_of_it(tmp_path, chunks):
    made = imported(tmp_path, f"run {SIZES}{BATCHES}{PP2}{chunks}--variable-seq-lengths")
    assert made.plan["transport"]["shape_exchange"] == "per_message"
    assert errors(made) == []


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("", (1024, 1000)),
        ("--tensor-model-parallel-size 4", (1024, 1000)),
        ("--make-vocab-size-divisible-by 250", (1000, None)),
        ("--padded-vocab-size 1280", (1280, 1000)),
    ],
)
def test_the_vocabulary_is_padded_and_the_plan_says_how_large_it_was(tmp_path, flags, sizes):
    made = imported(tmp_path, f"run {SIZES}{BATCHES}{PP2}{flags}")
    assert (made.plan["model"]["vocab_size"], made.plan["model"].get("unpadded_vocab_size")) == sizes
    assert errors(made) == []


def test_a_model_configuration_fills_in_and_does_not_overrule(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 512, "num_attention_heads": 16, "vocab_size": 1000, "num_hidden_layers": 6}')
    made = imported(tmp_path, f"run --hidden-size 256 {BATCHES}{PP2}", model_config=config)
    model = made.plan["model"]
    assert (model["hidden_size"], model["num_heads"], model["num_layers"], model["vocab_size"]) == (256, 16, 6, 1024)
    assert model["unpadded_vocab_size"] == 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo --num-layers 4", "no command here has flags"),
        ("", "no command here"),
        ("run 'x --num-layers", "not closed"),
    ],
)
def test_what_is_no_script_of_megatron(tmp_path, text, message):
    finding = refusal(tmp_path, text)
    assert finding.code == "PP170"
    assert message in finding.message


PARTS = {"norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "biases": "all"}
LATENT = "--multi-latent-attention --kv-lora-rank 64 --position-embedding-type rope "
EXPERTS = "--num-experts 8 --moe-ffn-hidden-size 64 --position-embedding-type rope "


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("", PARTS),
        (LLAMA, {}),
        ("--normalization RMSNorm", PARTS | {"norm": "rms"}),
        ("--normalization LayerNorm --qk-layernorm", PARTS | {"qk_norm": True}),
        ("--use-rotary-position-embeddings", PARTS | {"positions": "rotary"}),
        ("--position-embedding-type rope", PARTS | {"positions": "rotary"}),
        ("--position-embedding-type learned_absolute", PARTS),
        ("--no-position-embedding --position-embedding-type rope", PARTS | {"positions": "rotary"}),
        ("--no-bias-gelu-fusion", PARTS | {"mlp": "gelu"}),
        ("--no-bias-gelu-fusion --openai-gelu", PARTS),
        ("--disable-bias-linear", PARTS | {"mlp": "gelu", "biases": "none"}),
        ("--disable-bias-linear --add-qkv-bias", PARTS | {"mlp": "gelu", "biases": "qkv"}),
        ("--add-qkv-bias", PARTS),
        ("--squared-relu", PARTS | {"mlp": "gelu"}),
        ("--swiglu", PARTS | {"mlp": "swiglu"}),
        (LLAMA + "--add-qkv-bias --qk-layernorm", {"biases": "qkv", "qk_norm": True}),
        (LATENT + "--qk-layernorm", {"norm": "layer", "mlp": "gelu_tanh"}),
        (EXPERTS + "--swiglu", {"norm": "layer", "biases": "qkv"}),
        (EXPERTS + "--disable-bias-linear", {"norm": "layer"}),
    ],
)
def test_norms_positions_activation_and_biases(tmp_path, flags, parts):
    model = imported(tmp_path, f"run {GPT3}{BATCHES}{PP2}{flags}").plan["model"]
    defaults = {"norm": "rms", "qk_norm": False, "positions": "rotary", "mlp": "swiglu", "biases": "none"}
    assert {key: model.get(key, value) for key, value in defaults.items()} == defaults | parts


@pytest.mark.parametrize(
    ("flags", "name", "why"),
    [
        ("--max-position-embeddings 256", "--max-position-embeddings 256", "each of 128 positions"),
        ("--position-embedding-type none", "--position-embedding-type none", "are rotated"),
        ("--no-position-embedding", "--no-position-embedding", "are rotated"),
        ("--squared-relu", "--squared-relu", "is GELU here"),
        ("--mtp-num-layers 1", "learned positions", "with multi-token prediction"),
        ("--multi-latent-attention --disable-bias-linear", "learned positions", "with latent attention"),
        (LATENT, "no --disable-bias-linear", "has no biases here"),
        (EXPERTS + "--swiglu", "no --disable-bias-linear", "only queries, keys and values"),
        (EXPERTS + "--disable-bias-linear", "experts without --swiglu", "1.5 times"),
    ],
)
def test_parts_that_a_plan_has_otherwise_are_named(tmp_path, flags, name, why):
    made = imported(tmp_path, f"run {GPT3}{BATCHES}{PP2}{flags}")
    (setting,) = made.ignored
    assert setting.name == name
    assert why in setting.why


def test_a_script_without_its_model_says_nothing_about_the_parts(tmp_path):
    made = imported(tmp_path, f"run {BATCHES}{PP2}--num-layers 6")
    assumed = {assumption.key[1]: assumption.value for assumption in made.assumptions}
    assert {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "biases": "none"}.items() <= assumed.items()
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3", "num_hidden_layers": 6, "hidden_size": 64}')
    made = imported(tmp_path, f"run {BATCHES}{PP2}", model_config=config)
    assert made.plan["model"]["qk_norm"] is True
    assert not {"norm", "biases"} & made.plan["model"].keys()


@pytest.mark.parametrize(
    ("flags", "memory"),
    [
        ("", {"cross_entropy": "in_place"}),
        ("--cross-entropy-loss-fusion", {"cross_entropy": "compiled"}),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", {"cross_entropy": "fused"}),
        ("--attention-backend unfused", {"cross_entropy": "in_place", "attention": "unfused"}),
        ("--attention-backend flash", {"cross_entropy": "in_place"}),
        ("--transformer-impl local", {"cross_entropy": "in_place", "attention": "unfused"}),
        ("--transformer-impl local --use-flash-attn", {"cross_entropy": "in_place"}),
    ],
)
def test_buffers_of_attention_and_of_the_loss(tmp_path, flags, memory):
    assert imported(tmp_path, SIZES + BATCHES + flags).plan["memory"] == memory


@pytest.mark.parametrize(("named", "ours"), [("allgather", "all_gather"), ("alltoall", None), ("flex", None)])
def test_the_dispatcher_of_tokens(tmp_path, named, ours):
    made = imported(tmp_path, f"{MOE}--moe-token-dispatcher-type {named}")
    assert made.plan["model"]["moe"].get("dispatcher") == ours
    exchange = with_device(made, "h100").plan["cost"]["analytic"].get("exchange")
    assert exchange == ("by_node" if named == "flex" else None)


@pytest.mark.parametrize(("given", "ours"), [("fp32", "float32"), ("fp64", "float64")])
def test_the_type_of_the_router(tmp_path, given, ours):
    flags = f"{MOE}--moe-router-dtype {given} --moe-token-dispatcher-type"
    assert imported(tmp_path, f"{flags} alltoall").plan["model"]["moe"]["router_dtype"] == ours
    made = imported(tmp_path, f"{flags} allgather")
    assert "router_dtype" not in made.plan["model"]["moe"]
    assert f"--moe-router-dtype {given}" in [setting.name for setting in made.ignored]


def test_without_a_dispatcher_megatron_gathers_tokens_unless_the_model_is_elsewhere(tmp_path):
    made = imported(tmp_path, MOE)
    assert made.plan["model"]["moe"]["dispatcher"] == "all_gather"
    assert "# no --moe-token-dispatcher-type: Megatron-LM gathers all tokens" in plan_text(made, "megatron")
    elsewhere = imported(tmp_path, f"run {BATCHES}{PP2}--num-experts 8 --num-layers 6")
    assert "dispatcher" not in elsewhere.plan["model"]["moe"]


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("", None), ("--fp8-format hybrid", "float8"), ("--fp8-format e4m3 --fp8-recipe blockwise", "float8_block"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "float8"), ("--fp4-format e2m1", "float4"),
        ("--fp8-format e4m3 --fp8-recipe custom", None), ("--fp8-recipe blockwise", None),
    ],
)  # fmt: skip
def test_products_and_their_inputs_have_the_type_of_the_recipe_on_a_device(tmp_path, flags, dtype):
    made = imported(tmp_path, f"run {SIZES}{BATCHES}{PP2}--bf16 {flags}")
    assert "analytic" not in made.plan["cost"]
    assert "product_inputs" not in made.plan["memory"]
    assert any("custom" in setting.name for setting in made.ignored) == ("custom" in flags)
    plan = plan_from_dict(with_device(made, "b200").plan).spec
    assert plan.cost.analytic.matmul_dtype == dtype
    assert plan.memory.product_inputs == ("dtype" if dtype is None else "matmul_dtype")
    of_set = imported(
        tmp_path, f"run {SIZES}{BATCHES}{PP2}--bf16 {flags}", settings={("cost", "analytic", "device"): "b200"}
    )
    assert plan_from_dict(of_set.plan).spec.cost.analytic.matmul_dtype == dtype


@pytest.mark.parametrize(
    ("flags", "blocks", "message"),
    [
        ("--cpu-offloading-num-layers 3", 3, None), ("--cpu-offloading-num-layers 0", 0, None),
        (f"--cpu-offloading-num-layers 3 {PP2}", 0, "several pipeline ranks"),
        ("--cpu-offloading-num-layers 8", 0, "not all blocks"),
        ("--cpu-offloading-num-layers 3 --recompute-granularity selective", 0, "--recompute-granularity is given"),
    ],
)  # fmt: skip
def test_offloaded_blocks(tmp_path, flags, blocks, message):
    text = f"run {SIZES}{BATCHES}{flags}"
    if message is not None:
        finding = refusal(tmp_path, text)
        assert (finding.code, message in finding.message) == ("PP171", True)
        return
    assert imported(tmp_path, text).plan["memory"].get("offload_blocks", 0) == blocks


@pytest.mark.parametrize(
    ("flags", "num_bytes"),
    [
        ("", None), ("--exp-avg-dtype bf16", None), ("--use-precision-aware-optimizer", 10),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8", 5),
        ("--use-precision-aware-optimizer --no-store-param-remainders", 12),
        ("--use-precision-aware-optimizer --main-params-dtype fp16", 10),
    ],
)  # fmt: skip
def test_bytes_of_the_optimizers_state(tmp_path, flags, num_bytes):
    assert imported(tmp_path, f"run {SIZES}{BATCHES}--bf16 {flags}").plan["memory"].get("optimizer_bytes") == num_bytes


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", {"overlap": ["tp"]}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"overlap": ["tp_backward"]}),
        ("--no-rope-fusion", {"fused_rotary": False}), ("--position-embedding-type yarn", {"fused_rotary": False}),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess",
         {"replayed": ["attention", "router"]}),
        ("--cuda-graph-impl local --cuda-graph-scope attn mlp", {"replayed": ["attention"]}),
        ("--cuda-graph-impl full_iteration", {"execution": "graph"}),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", {"execution": "graph"}),
        ("--cuda-graph-impl local", {}), ("--cuda-graph-impl none", {}),
    ],
)  # fmt: skip
def test_overlap_and_graphs_on_a_device(tmp_path, flags, keys):
    made = imported(tmp_path, f"run {SIZES}{BATCHES}{flags} --bf16")
    assert with_device(made, "h100").plan["cost"]["analytic"] == {"device": "h100", **keys}
    assert any(setting.name == "--cuda-graph-impl local" for setting in made.ignored) == flags.endswith("local")


@pytest.mark.parametrize(
    ("frequency", "dense", "note"),
    [
        ("1", 0, None),
        ("'([0]*3+[1]*5)'", 3, None),
        ("'[0]+[1]*7'", 1, None),
        ("'[0,0,1,1,1,1,1,1]'", 2, None),
        ("2", 0, "4 later blocks"),
        ("'([0]+[1])*4'", 1, "3 later blocks"),
    ],
)
def test_blocks_with_experts(tmp_path, frequency, dense, note):
    made = imported(tmp_path, f"{MOE}--moe-layer-freq {frequency}")
    assert made.plan["model"]["moe"].get("dense_layers", 0) == dense
    assert [why for why in (setting.why for setting in made.ignored) if "later blocks" in why] == (
        [] if note is None else [f"{note} without experts have them here"]
    )


@pytest.mark.parametrize(
    ("flags", "world", "topology"),
    [
        (f"--expert-model-parallel-size 4 {TP2}", 16, {"ep": 4, "dp": 1}),
        (f"--expert-model-parallel-size 4 {TP2} --expert-tensor-parallel-size 1", 8, {"ep": 2, "dp": 1}),
        ("--expert-model-parallel-size 2 --context-parallel-size 4", 8, {"ep": 1, "dp": 1}),
        (f"--expert-model-parallel-size 2 {TP2}", 4, "expert tp x ep x pp = 8"),
    ],
)  # fmt: skip
def test_experts_over_ranks_of_one_replica(tmp_path, flags, world, topology):
    if isinstance(topology, str):
        finding = refusal(tmp_path, f"{MOE}{flags}", world_size=world)
        assert finding.code == "PP171"
        assert topology in finding.message
        return
    made = imported(tmp_path, f"{MOE}{flags}", world_size=world)
    assert {axis: made.plan["topology"][axis] for axis in topology} == topology
    is_folded = f"--expert-model-parallel-size {topology['ep']} " not in f"{flags} "
    assert any("have their own micro-batches" in setting.why for setting in made.ignored) == is_folded
    assert errors(made) == []


def test_overlapped_all_to_alls(tmp_path):
    text = f"run {SIZES}{BATCHES}{PP2}{OVERLAPPED}--moe-token-dispatcher-type alltoall"
    made = imported(tmp_path, text)
    assert made.plan["schedule"]["overlap"] == "pairs"
    assert errors(made) == []
    assert any("segments of their own" in setting.why for setting in made.ignored)
    split = imported(tmp_path, f"{text} --tensor-model-parallel-size 2 --sequence-parallel", world_size=8)
    assert "sequence_parallel_activations" not in split.plan["memory"]
    assert any("gathers them again" in setting.why for setting in split.ignored)
    assert errors(split) == []
    delayed = imported(tmp_path, f"{text} --delay-wgrad-compute")
    assert not any("segments of their own" in setting.why for setting in delayed.ignored)


def test_a_stage_of_one_prediction_module_sends_shapes(tmp_path):
    text = f"run {SIZES}{BATCHES}--pipeline-model-parallel-size 4 --mtp-num-layers 1 --pipeline-model-parallel-layout"
    alone, together = (imported(tmp_path, f"{text} {layout}") for layout in ("'Et*4|t*4|m|L'", "'Et*3|t*3|tt|mL'"))
    assert [stage[-1] for stage in alone.plan["stages"]] == ["layer.3", "norm", "mtp.0", "head"]
    assert alone.plan["transport"]["shape_exchange"] == "per_message"
    assert "shape_exchange" not in together.plan["transport"]
    assert errors(alone) == errors(together) == []


STEPS = f"run {SIZES}{PP2}--micro-batch-size 1 --step-batch-size-schedule "


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("'0:8 200B:16'", 16),
        ("'1.5K:32 0:8'", 32),
        (f"'0:2 10M:16' {CHUNKS} 2", 16),
        (f"'0:1 10M:16' {CHUNKS} 2", "1 micro-batches in the first steps"),
        ("'0:8 200B'", "needs pairs such as"),
        ("'5:8 10:16'", "the first threshold is 0"),
        ("'0:8' --global-batch-size 8", "are given together"),
    ],
)
def test_batches_that_grow(tmp_path, flags, expected):
    if isinstance(expected, str):
        assert expected in refusal(tmp_path, STEPS + flags).message
    else:
        assert imported(tmp_path, STEPS + flags).plan["schedule"]["num_micro_batches"] == expected
