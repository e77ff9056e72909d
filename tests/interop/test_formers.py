"""Training files of PaddleFormers, PaddleNLP and ERNIE: names, values, switches, and refusals of the trainers."""

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import load_imported
from tests.interop.importing import codes, imported, judged, only, refusal

pytestmark = pytest.mark.usefixtures("known_notes")

GUARDED = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "sequence_parallel": True,
    "gradient_accumulation_steps": 4,
    "per_device_train_batch_size": 1,
    "overlap_p2p_comm": False,
    "batch_p2p_comm": True,
}
INTERLEAVED = {
    "pipeline_model_parallel_size": 4,
    "virtual_pipeline_model_parallel_size": 2,
    "gradient_accumulation_steps": 8,
}


def of(path, job, **flags):
    return judged("paddleformers", path, job, **flags)


def test_a_job_that_a_guard_saves_is_a_warning_at_the_users_own_line(tmp_path):
    text = "".join(f"{key}: {str(value).lower()}\n" for key, value in GUARDED.items())
    finding = only(judged("paddleformers", tmp_path, text), "PP175")
    assert (finding.severity, finding.location.line, finding.location.column) == ("warning", 3, 20)
    assert finding.location.file.endswith("job.yaml")
    assert "`partial_send_recv: false`" in finding.help


@pytest.mark.parametrize(
    "change",
    [
        {"partial_send_recv": 0},
        {"tensor_model_parallel_size": 1},
        {"sequence_parallel": False},
        {"overlap_p2p_comm": True},
        {"batch_p2p_comm": False},
        {"use_dualpipev": True},
        {"pipeline_model_parallel_size": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_with_one_condition_less_nothing_would_be_corrupted(tmp_path, change):
    assert "PP175" not in codes(of(tmp_path, GUARDED | change))


def test_a_tensor_that_does_not_divide_needs_no_guard(tmp_path):
    sizes = {"max_seq_len": 4, "tensor_model_parallel_size": 4, "head_dim": 8, "hidden_size": 20}
    assert "PP175" in codes(of(tmp_path, GUARDED | sizes))  # 20 elements on each of 4 ranks
    assert "PP175" not in codes(of(tmp_path, GUARDED | sizes | {"hidden_size": 18}))


def test_overlap_is_the_present_trainers_default_and_makes_p2p_unbatched(tmp_path):
    without = {key: value for key, value in GUARDED.items() if "p2p" not in key}
    assert codes(of(tmp_path, without)) == []
    assert codes(of(tmp_path, without | {"overlap_p2p_comm": "false"})) == ["PP175"]  # batched is its opposite then


def test_batched_p2p_beside_overlap_is_named(tmp_path):
    assert "PP174" in codes(of(tmp_path, GUARDED | {"overlap_p2p_comm": True}))


@pytest.mark.parametrize("value", [True, 1, "true", "True", "1", "yes", "on"])
@pytest.mark.parametrize("opposite", [False, 0, "false", "False", "0", "no"])
def test_switches_as_the_trainers_read_them(tmp_path, value, opposite):
    plan = imported("paddleformers", tmp_path, {**GUARDED, "sequence_parallel": value, "batch_p2p_comm": opposite}).plan
    assert plan["topology"]["sequence_parallel"] is True
    assert plan["transport"]["forward"] == "full"


def test_earlier_names_and_words(tmp_path):
    old = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 4, "virtual_pp_degree": 2, "sequence_parallel": 1,
           "gradient_accumulation_steps": 8, "pipeline_parallel_config": "best_unbalanced_scheduler"}  # fmt: skip
    report = of(tmp_path, old)
    assert codes(report) == ["PP175"]  # these trainers batch P2P, unless a word says otherwise
    assert report.subject.plan.spec.schedule.variant == "fleet_balanced"
    words = {"pipeline_parallel_config": ["best_unbalanced_scheduler", "disable_partial_send_recv"]}
    assert codes(of(tmp_path, old | words)) == []


def test_the_present_trainer_sets_nothing_by_words(tmp_path):
    settings = GUARDED | {"pipeline_parallel_config": "disable_partial_send_recv"}
    report = of(tmp_path, settings)
    assert codes(report) == ["PP174", "PP175"]
    assert "disable_partial_send_recv" in only(report, "PP174").message


def test_an_earlier_name_beside_present_ones_gives_nothing(tmp_path):
    report = of(tmp_path, {"tensor_model_parallel_size": 2, "pipeline_parallel_degree": 4})
    assert report.subject.plan.spec.topology.pp == 1
    assert "`pipeline_model_parallel_size`" in only(report, "PP174").message


def test_a_present_switch_beside_earlier_names_gives_nothing(tmp_path):
    old = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sequence_parallel": 1}
    report = of(tmp_path, old | {"partial_send_recv": False})
    assert codes(report) == ["PP174", "PP175"]


@pytest.mark.parametrize(
    ("change", "variant"),
    [
        ({}, "fleet"),
        ({"best_unbalanced_scheduler": True}, "fleet_balanced"),
        ({"gradient_accumulation_steps": 4}, "fleet_fthenb"),
        ({"gradient_accumulation_steps": 6, "best_unbalanced_scheduler": True}, "fleet_balanced"),
    ],
)
def test_which_of_fleets_classes_runs(tmp_path, change, variant):
    assert of(tmp_path, INTERLEAVED | change).subject.plan.spec.schedule.variant == variant


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradient_accumulation_steps": 3}, "as many micro-batches as pipeline ranks"),
        ({"gradient_accumulation_steps": 6}, "all forwards before all backwards"),
        ({"pipeline_model_parallel_size": 2}, "more than 2 pipeline ranks"),
        ({"p2p_cache_shape": False}, "cached shapes"),
        ({"sharding": "stage2", "sharding_parallel_size": 2}, "only sharding stage 1"),
        ({"use_dualpipev": True, "gradient_accumulation_steps": 7}, "DualPipeV on 4 ranks takes at least 8"),
        ({"use_dualpipev": True, "gradient_accumulation_steps": 8}, "`use_dualpipev` does not go together with"),
        ({"bf16": True, "fp16": True}, "`bf16` and `fp16` are both true"),
    ],
)
def test_what_fleet_or_the_trainer_refuses(tmp_path, change, words):
    finding = refusal(of, tmp_path, INTERLEAVED | change)
    assert finding.code == "PP171"
    assert words in finding.message
    assert finding.location is not None


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_model_parallel_size": "two"}, "must be a whole number"),
        ({"tensor_model_parallel_size": True}, "must be a whole number"),
        ({"sequence_parallel": "maybe"}, "must be true or false"),
        ({"sequence_parallel": 2}, "must be true or false"),
        ({"pipeline_parallel_config": "disable_partial_send_recieve"}, "no trainer knows"),
        ({"hybrid_parallel_topo_order": "tp_first"}, "sharding_first or pp_first"),
        ({"a": {"sequence_parallel": True}, "sequence_parallel": False}, "two values"),
        ({"_base_": "absent.yaml"}, "not a file"),
        ({"_base_": "job.yaml"}, "leads back"),
        ([1], "a mapping of keys"),
    ],
)
def test_what_cannot_be_read(tmp_path, settings, words):
    finding = refusal(of, tmp_path, settings)
    assert finding.code == "PP170"
    assert words in finding.message


def test_a_file_wins_over_its_base_and_a_place_is_in_the_file_that_says_it(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "parallel:\n  tensor_model_parallel_size: 4\n  pipeline_model_parallel_size: 2\n", encoding="utf-8"
    )
    text = "_base_: [base.yaml]\nmesh: {tensor_model_parallel_size: 2}\n"
    result = imported("paddleformers", tmp_path, text)
    assert (result.plan["topology"]["tp"], result.plan["topology"]["pp"]) == (2, 2)
    assert result.source.locate(("topology", "tp")).file.endswith("job.yaml")
    place = result.source.locate(("topology", "pp"))
    assert (place.file.endswith("base.yaml"), place.line) == (True, 3)


@pytest.mark.parametrize(
    ("name", "known"),
    [("sequence_paralel", "sequence_parallel"), ("pipeline_model_parallel_sizes", "pipeline_model_parallel_size")],
)
def test_a_misspelt_setting_is_refused(tmp_path, name, known):
    finding = refusal(of, tmp_path, GUARDED | {name: 2})
    assert (finding.code, finding.help) == ("PP170", f"did you mean `{known}`?")
    assert finding.location.line == 1


def test_an_unknown_setting_with_a_term_of_parallelism_is_named(tmp_path):
    report = of(tmp_path, GUARDED | {"pipeline_magic": True})
    assert "`pipeline_magic`: an unknown setting" in only(report, "PP173").message


FLEETX = """\
Global: {local_batch_size: 2, micro_batch_size: 2}
Model: {hidden_size: 2048, num_layers: 24, num_attention_heads: 16}
Distributed:
  mp_degree: 4
  pp_degree: 2
  sharding: {sharding_degree: 1, sharding_stage: 1}
"""


@pytest.mark.parametrize(
    ("text", "line", "message", "help"),
    [
        (FLEETX, 4, "`mp_degree` is a setting of PaddleFleetX", "`--from fleet`"),
        (FLEETX.replace("  mp_degree: 4\n", ""), 4, "`pp_degree` is a setting of PaddleFleetX", "`--from fleet`"),
        (
            "Engine: {max_epochs: 3}\nData: {workers: 2}\n",
            1,
            "no setting here is one of",
            "`pipeproof import plan --help`",
        ),
        ("bf16: {enabled: true}\ntrain_batch_size: 8\n", 2, "a trainer that is not read", "arguments that it prints"),
        ("num_hidden_layers: 2\nmodel_type: llama\n", 2, "a model's configuration", "`--model-config`"),
        ("enable_auto_parallel: 1\npipeline_parallel_degree: 2\n", 1, "automatic parallelism", "false"),
    ],
)
def test_a_file_of_another_trainer_is_refused(tmp_path, text, line, message, help):
    finding = refusal(imported, "paddleformers", tmp_path, text)
    assert (finding.code, finding.location.line) == ("PP170", line)
    assert message in finding.message
    assert help in finding.help


def test_a_file_of_these_trainers_without_a_pipeline(tmp_path):
    text = "model_name_or_path: some/model\noutput_dir: out\nenable_auto_parallel: false\n"
    made = imported("paddlenlp", tmp_path, text)
    assert (made.ignored, "pp" in made.plan["topology"]) == ((), False)


def test_fleet_opens_connections_at_their_first_message(tmp_path):
    assert of(tmp_path, GUARDED).subject.plan.spec.transport.connections == "lazy"
    declared = of(tmp_path, GUARDED, settings={("transport", "connections"): "warm"})
    assert declared.subject.plan.spec.transport.connections == "warm"


def test_flags_and_a_model_configuration_leave_nothing_to_assume(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        '{"num_hidden_layers": 8, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,'
        ' "intermediate_size": 256, "vocab_size": 512, "tie_word_embeddings": true, "rope_theta": 1e6}',
        encoding="utf-8",
    )
    settings = GUARDED | {"max_seq_len": 64}
    report = of(tmp_path, settings, model_config=config, world_size=8)
    spec = report.subject.plan.spec
    assert "PP172" not in {finding.code for finding in report.findings}
    assert (spec.model.num_kv_heads, spec.model.tied_embedding, spec.topology.dp) == (2, True, 2)
    changed = of(tmp_path, settings, model_config=config, settings={("model", "num_layers"): 4})
    assert changed.subject.plan.spec.model.num_layers == 4


def test_what_makes_no_plan_points_to_the_setting(tmp_path):
    finding = refusal(of, tmp_path, GUARDED | {"num_hidden_layers": 4, "num_attention_heads": 3, "hidden_size": 192})
    assert finding.code == "PP108"
    assert finding.location.file.endswith("job.yaml")


@pytest.mark.parametrize(
    ("order", "expected"),
    [("pp_first", ("tp", "cp", "ep", "dp", "pp")), ("sharding_first", ("tp", "cp", "pp", "ep", "dp"))],
)
def test_the_order_of_the_mesh(tmp_path, order, expected):
    settings = GUARDED | {"sharding": "stage1", "sharding_parallel_size": 2, "hybrid_parallel_topo_order": order}
    assert of(tmp_path, settings).subject.plan.spec.topology.order == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ("tp", "cp", "ep", "dp", "pp")),
        ({"hybrid_parallel_topo_order": "sharding_first"}, ("tp", "cp", "pp", "ep", "dp")),
    ],
)
def test_the_order_of_the_mesh_of_earlier_trainers_has_pipelines_outside(tmp_path, more, expected):
    """The default of paddlenlp/trainer/training_args.py is `pp_first`."""
    old = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "sharding": "stage1",
           "sharding_parallel_degree": 2, "gradient_accumulation_steps": 4}  # fmt: skip
    assert of(tmp_path, old | more).subject.plan.spec.topology.order == expected


def test_what_the_command_line_says_changes_what_depends_on_it(tmp_path):
    without = {key: value for key, value in GUARDED.items() if key != "tensor_model_parallel_size"}
    assert codes(of(tmp_path, without)) == []
    assert codes(of(tmp_path, without, settings={("topology", "tp"): 2})) == ["PP175"]
    fewer = of(tmp_path, INTERLEAVED, settings={("schedule", "num_micro_batches"): 4})
    assert fewer.subject.plan.spec.schedule.variant == "fleet_fthenb"
    with pytest.raises(PlanFileError, match="PP105"):
        of(tmp_path, GUARDED, settings={("topology", "tp"): "two"})
    with pytest.raises(PlanFileError, match="PP106"):
        of(tmp_path, GUARDED, settings={("topology", "tp"): 0})


def test_a_count_that_does_not_divide_points_to_the_stages(tmp_path):
    finding = refusal(of, tmp_path, INTERLEAVED | {"num_hidden_layers": 7})
    assert finding.code == "PP143"
    assert finding.location.column > 1
    missing = {key: value for key, value in INTERLEAVED.items() if key != "gradient_accumulation_steps"}
    assert "(the default)" in refusal(of, tmp_path, missing).message
    assert refusal(of, tmp_path, missing).location is not None


def test_experts_that_the_tensor_parallel_ranks_share_are_whole_there(tmp_path):
    model = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64,
             "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}  # fmt: skip
    job = {**GUARDED, **model, "expert_model_parallel_size": 2, "partial_send_recv": False}
    spec = load_imported(imported("paddleformers", tmp_path, job, world_size=4)).spec
    assert (spec.topology.tp, spec.topology.ep, spec.topology.experts_over_tp) == (2, 1, True)
    spec = load_imported(imported("paddleformers", tmp_path, job, world_size=8)).spec
    assert (spec.topology.tp, spec.topology.ep, spec.topology.experts_over_tp) == (2, 2, False)


@pytest.mark.parametrize(("stage", "number"), [("stage1", 1), ("stage2", 2), ("stage3", 3)])
def test_a_stage_of_sharding_without_a_pipeline_is_that_of_the_plan(tmp_path, stage, number):
    settings = GUARDED | {"sharding": stage, "sharding_parallel_size": 2, "pipeline_model_parallel_size": 1}
    memory = of(tmp_path, settings).subject.plan.spec.memory
    shards = [memory.shard_optimizer, memory.shard_gradients, memory.shard_weights]
    assert shards == ["dp"] * number + ["none"] * (3 - number)
