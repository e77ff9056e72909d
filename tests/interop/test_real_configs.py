"""Public training configurations, each with the verdict that it should get."""

import json

import pytest

from pipeproof.interop import Flags, check_imported, import_files
from tests.interop.importing import REAL, codes, judged

pytestmark = pytest.mark.usefixtures("known_notes")

CONFIGS = json.loads((REAL / "paddle_configs.json").read_text(encoding="utf-8"))["configs"]

VERDICTS = {
    "examples/config/sft/full_tp_pp.yaml": ("1f1b", None, "full", ["PP175"]),
    "examples/config/sft/full_tp_pp_ep.yaml": ("1f1b", None, "full", ["PP173"]),
    "examples/config/sft/lora_tp_pp.yaml": ("1f1b", None, "full", []),
    "examples/best_practices/ERNIE-4.5-VL/ernie45vl_32k_config.yaml": ("1f1b", None, "full", []),
    "examples/configs/ERNIE-4.5-300B-A47B/sft/run_sft_8k.yaml": ("1f1b", None, "full", []),
    "examples/configs/ERNIE-4.5-VL-28B-A3B-Thinking/sft/run_sft_32k.yaml": ("1f1b", None, "full", []),
    "llm/config/deepseek-v3/sft_4k_sp.json": ("1f1b", None, "full", ["PP173"]),
    "examples/best_practices/DeepSeek-V4/dsv4_sft_4K.yaml": ("interleaved", "fleet_fthenb", "full", ["PP173"]),
    "tests/config/benchmark/config/pt/GLM4.5-Air.yaml": ("1f1b", None, "full", ["PP173"]),
    "llm/config/deepseek-v2/pretrain_argument.json": ("1f1b", None, "full", ["PP174"]),
}
"""Schedule, its variant, transport, and the codes other than assumptions: none of these jobs corrupts anything.

The first is saved by a guard of the trainer; the last asks for sharding stage 2 with a pipeline, over one rank.
"""


@pytest.mark.parametrize("config", CONFIGS, ids=[config["path"] for config in CONFIGS])
def test_the_configurations_of_the_oracle(tmp_path, config):
    name = "job.json" if config["path"].endswith("json") else "job.yaml"
    report = judged("paddleformers", tmp_path, config["verbatim"], name=name)
    schedule, variant, transport, expected = VERDICTS[config["path"]]
    spec = report.subject.plan.spec
    assert not report.errors
    assert (spec.schedule.kind, spec.schedule.variant, spec.transport.forward) == (schedule, variant, transport)
    assert codes(report) == expected
    verbatim = config["verbatim"]
    tp, pp = (
        next(verbatim[name] for name in names if name in verbatim)
        for names in (
            ("tensor_model_parallel_size", "tensor_parallel_degree"),
            ("pipeline_model_parallel_size", "pipeline_parallel_degree"),
        )
    )
    assert (spec.topology.tp, spec.topology.pp) == (tp, pp)
    assert spec.schedule.num_micro_batches == verbatim["gradient_accumulation_steps"]


@pytest.mark.parametrize(
    ("name", "schedule", "axes", "expected"),
    [
        ("dsv3_pretrain.yaml", "dualpipe_v", {"pp": 4, "ep": 2, "dp": 1, "tp": 1}, []),
        ("dpo_full_tp_pp.yaml", "1f1b", {"pp": 2, "tp": 2}, []),
        ("pt_full_tp_pp.yaml", "1f1b", {"pp": 2, "tp": 2}, ["PP175"]),
        ("ernie_pretrain_300b.yaml", "1f1b", {"pp": 2, "ep": 4, "dp": 1}, []),
        ("erniekit_sft_32k.yaml", "1f1b", {"pp": 12, "tp": 8, "dp": 1}, ["PP173"]),
        ("ernie_pretrain_96.yaml", "1f1b", {"pp": 12, "ep": 8, "dp": 1, "tp": 1}, []),
        ("dsv3_pretrain_nlp.json", "dualpipe_v", {"pp": 2, "ep": 4, "dp": 1}, []),
        ("llama_pretrain_nlp.json", "1f1b", {"pp": 1, "tp": 2}, []),
    ],
)
def test_more_real_configurations(name, schedule, axes, expected):
    report = check_imported(import_files("ernie", [REAL / name], Flags()))
    spec = report.subject.plan.spec
    assert not report.errors
    assert spec.schedule.kind == schedule
    assert {axis: getattr(spec.topology, axis) for axis in axes} == axes
    assert codes(report) == expected


def test_a_nested_section_gives_the_model_its_sizes():
    spec = check_imported(import_files("ernie", [REAL / "ernie_pretrain_300b.yaml"], Flags())).subject.plan.spec
    assert spec.model.num_layers == 6
    assert (spec.model.moe.num_experts, spec.model.moe.top_k) == (8, 4)
    assert (spec.model.mtp.num_modules, spec.model.mtp.magic_send) == (1, True)
