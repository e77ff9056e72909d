"""Plans from Python recipes, which are read and never run."""

import pytest

from pipeproof.cli.file_kinds import kind_of
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.interop.importers.recipes.megatron_bridge import recipes_of
from pipeproof.interop.importers.recipes.modules import Modules

HEAD = """from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, TrainingConfig
from .shared import base_config, provider

PP = 2 * 2
"""
SHARED = """import os
from dataclasses import dataclass
from megatron.bridge.training.config import ConfigContainer, TrainingConfig

@dataclass
class Small:
    num_layers: int = 16
    hidden_size: int = 256
    num_attention_heads: int = 8

@dataclass
class provider(Small):
    num_layers: int = 60

def base_config(sequence=128, **more):
    cfg = ConfigContainer(model=None, train=TrainingConfig(global_batch_size=32, micro_batch_size=2), dataset=None)
    cfg.path = os.path.join(os.getcwd(), "runs")
    if "batch" in more:
        cfg.train.global_batch_size = more["batch"]
    cfg.dataset.seq_length = sequence
    return cfg
"""


def recipe(body, name="small_pretrain_16gpu_h100_config"):
    return f"def {name}() -> ConfigContainer:\n" + "".join(f"    {line}\n" for line in body) + "    return cfg\n"


START = ["cfg = base_config()", "cfg.model = provider(seq_length=256)", "cfg.model.tensor_model_parallel_size = 2"]


def imported(path, *bodies, head=HEAD, text=None, **flags):
    (path / "shared.py").write_text(SHARED, encoding="utf-8")
    file = path / "recipe.py"
    file.write_text(head + "\n" + (text or "\n".join(recipe(body) for body in bodies)), encoding="utf-8")
    return import_files("megatron-bridge", [file], Flags(**flags))


def refusal(path, *bodies, **options):
    with pytest.raises(PlanFileError) as caught:
        imported(path, *bodies, **options)
    return caught.value.findings[0]


def test_a_recipe_is_a_plan_with_places(tmp_path):
    made = imported(
        tmp_path, [*START, "cfg.model.pipeline_model_parallel_size = PP", "cfg.model.sequence_parallel = True"]
    )
    assert made.plan["topology"] == {"tp": 2, "pp": 4, "sequence_parallel": True, "dp": 2}
    assert made.plan["schedule"]["num_micro_batches"] == 32 // (2 * 2)
    assert (made.plan["model"]["num_layers"], made.plan["model"]["seq_length"]) == (60, 256)
    assert made.source.locate(("topology", "pp")).line == len(HEAD.splitlines()) + 6
    assert made.source.locate(("model", "num_layers")).file.endswith("shared.py")
    assert not check_imported(made).errors


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["cfg.model.pipeline_model_parallel_size = 8"], "60 layers do not divide by"),
        (
            ["cfg.model.pipeline_model_parallel_size = 4", "cfg.model.virtual_pipeline_model_parallel_size = 4"],
            "15 layers of a pipeline rank do not divide by 4 chunks",
        ),
    ],
)
def test_layers_that_do_not_divide(tmp_path, lines, message):
    finding = refusal(tmp_path, [*START, *lines], world_size=16)
    assert finding.code == "PP171"
    assert message in finding.message
    assert finding.location.line == len(HEAD.splitlines()) + 5 + len(lines)
    assert finding.location.file.endswith("recipe.py")


def test_an_uneven_partition_and_a_layout(tmp_path):
    ends = ["cfg.model.pipeline_model_parallel_size = 8", "cfg.model.num_layers_in_first_pipeline_stage = 4",
            "cfg.model.num_layers_in_last_pipeline_stage = 8"]  # fmt: skip
    made = imported(tmp_path, [*START, *ends], world_size=16)
    assert [sum(name.startswith("layer.") for name in stage) for stage in made.plan["stages"]] == [4, *[8] * 7]
    rows = [
        "cfg.model.num_layers = 7",
        "cfg.model.pipeline_model_parallel_size = 2",
        "cfg.model.virtual_pipeline_model_parallel_size = 2",
        "ends = [['embedding', 'decoder']], [['decoder'] * 2 + ['loss']]",
        "cfg.model.pipeline_model_parallel_layout = ends[0] + [['decoder'] * 2] * 2 + ends[1]",
    ]
    made = imported(tmp_path, [*START, *rows])
    assert [sum(name.startswith("layer.") for name in stage) for stage in made.plan["stages"]] == [1, 2, 2, 2]
    assert made.plan["schedule"]["num_chunks"] == 2


@pytest.mark.parametrize(
    ("lines", "message", "line"),
    [
        (["import os", "cfg.model.pipeline_model_parallel_size = int(os.environ['PP'])"], "is the result of int", 2),
        (["if len(unknown()) > 1:", "    cfg.model.pipeline_model_parallel_size = 2"], "set under the condition", 1),
        (["from elsewhere import change", "change(cfg)"], "`change` may change the configuration", 2),
        (["cfg.model = AutoBridge.from_hf_pretrained('a/b').to_megatron_provider()",
          "cfg.model.pipeline_model_parallel_size = 2"], "blocks of `a/b` is not in the recipe", 1),
        (["raise ValueError('no')"], "raises an exception", 1),
        (["cfg = missing()"], "is not known without running it: the result of missing", None),
    ],
)  # fmt: skip
def test_what_only_a_run_determines_is_refused(tmp_path, lines, message, line):
    finding = refusal(tmp_path, [*START, *lines])
    assert message in finding.message
    assert finding.location.line == (len(HEAD.splitlines()) + 2 if line is None else len(HEAD.splitlines()) + 5 + line)


def test_a_public_checkpoint_has_its_number_of_blocks(tmp_path):
    model = ["cfg.model = AutoBridge.from_hf_pretrained('Qwen/Qwen3.5-397B-A17B').to_megatron_provider()"]
    finding = refusal(tmp_path, [START[0], *model, "cfg.model.pipeline_model_parallel_size = 8"])
    assert "60 layers do not divide by --pipeline-model-parallel-size 8" in finding.message
    made = imported(tmp_path, [START[0], *model, "cfg.model.pipeline_model_parallel_size = 4"])
    assert made.plan["topology"]["dp"] == 4


def test_one_of_several_recipes(tmp_path):
    text = recipe([*START, "cfg.model.pipeline_model_parallel_size = 2"], "first_config") + recipe(
        [*START, "cfg.model.pipeline_model_parallel_size = 4"], "second_config"
    )
    assert "has 2 recipes: first_config, second_config" in refusal(tmp_path, text=text).message
    assert imported(tmp_path, text=text, recipe="second_config").plan["topology"]["pp"] == 4
    assert refusal(tmp_path, text=text, recipe="secnd_config").help == "did you mean `second_config`?"
    assert recipes_of(Modules().read(tmp_path / "recipe.py")) == ("first_config", "second_config")
    kind = kind_of(tmp_path / "recipe.py")
    assert kind is not None
    assert "check --from megatron-bridge FILE" in kind.commands


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "no valid Python"),
        ("x = 1\n", "no function here"),
        ("def a_config():\n  a_config()\n", "nested too"),
    ],
)
def test_other_python(tmp_path, text, message):
    assert message in refusal(tmp_path, head="", text=text).message


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "ran"
    lines = [f"open({str(mark)!r}, 'w')", f"__import__('os').system('touch {mark}')", "x = [0] * 10**9"]
    imported(tmp_path, [*START, *lines, "cfg.model.pipeline_model_parallel_size = 2"])
    assert not mark.exists()
