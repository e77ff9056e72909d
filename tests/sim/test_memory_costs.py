"""Times that go with memory: recomputation, and the optimizer's step."""

from fractions import Fraction

import pytest

from pipeproof.analysis.tune.frameworks import every_schedule
from pipeproof.analysis.tune.layouts import Layout
from pipeproof.analysis.tune.plan_layouts import PlanLayouts
from pipeproof.comm.lower import lower
from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.cost.plan_times import with_times
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.op_work import Phase
from pipeproof.stages.describe.stage_memory import memory_dtype
from tests.cli.commands import invoke
from tests.plans import FLAT, plan_dict, plan_file, plan_spec

H200 = {"device": "h200", "dtype": "bfloat16", **FLAT}
STAGES = [["embed", "layer.0", "layer.1"], ["layer.2", "layer.3", "norm", "head"]]


def computed(analytic=H200, **sections):
    """The given times that the plan's computed ones come to."""
    sections.setdefault("stages", STAGES)
    return with_times(plan_spec(cost={"analytic": analytic}, **sections)).cost


def test_full_recompute_adds_the_blocks_forward_to_i_and_nothing_else():
    plain, full = computed(), computed(memory={"recompute": "full"})
    assert full.forward_us == plain.forward_us
    assert full.backward_weight_us == plain.backward_weight_us
    blocks = computed(stages=[["embed", "layer.0"], ["layer.1", "layer.2", "layer.3", "norm", "head"]])
    one = plain.forward_us[0] - blocks.forward_us[0]
    for stage in range(2):
        more = full.backward_input_us[stage] - plain.backward_input_us[stage]
        assert abs(more - 2 * one) <= Fraction(3, 1000)  # each time is rounded to a nanosecond


def test_selective_recompute_adds_the_core_of_attention():
    sections = {"model": {"hidden_size": 4096, "num_heads": 32, "seq_length": 4096, "num_layers": 2}}
    stages = [["embed"], ["layer.0", "layer.1", "norm", "head"]]
    plain, selective = (
        computed(stages=stages, memory={"recompute": which}, **sections) for which in ("none", "selective")
    )
    pairs = 2 * 4096 * 4097 // 2
    one = Fraction(4 * pairs * 4096) / (989 * 10**6 * Fraction(1, 2))  # two products at half of the H200's peak
    assert abs(selective.backward_input_us[1] - plain.backward_input_us[1] - 2 * one) < Fraction(1, 100)
    assert selective.backward_input_us[0] == plain.backward_input_us[0]
    assert selective.forward_us == plain.forward_us


SIZES = {"hidden_size": 4096, "num_heads": 32, "ffn_size": 16384, "seq_length": 4096, "num_layers": 2}
PEAK, BANDWIDTH = 989 * 10**6 * Fraction(7, 10), 4800 * 1000 * Fraction(4, 5)
"""FLOPs of products and bytes of an H200 in a microsecond."""
T = 2 * 4096


def time_again(modules, **model):
    """Microseconds that one block computes again."""
    stages = [["embed"], ["layer.0", "layer.1", "norm", "head"]]
    sections = {"stages": stages, "model": {**SIZES, **model}}
    memory = {"recompute": "selective", "recompute_modules": modules}
    plain, selective = computed(**sections), computed(memory=memory, **sections)
    assert selective.forward_us == plain.forward_us
    assert selective.backward_weight_us == plain.backward_weight_us
    return (selective.backward_input_us[1] - plain.backward_input_us[1]) / 2


@pytest.mark.parametrize(
    ("modules", "model", "flops", "num_bytes"),
    [
        (["mlp"], {}, 3 * 2 * T * 4096 * 16384, 2 * 3 * T * 16384),  # three products; SwiGLU reads two and writes one
        (["layernorm"], {}, 0, 2 * 2 * 2 * T * 4096),  # two norms, each reads and writes
        (["moe_act"], {"moe": {"num_experts": 8, "top_k": 2, "ffn_size": 2048}}, 0, 2 * 3 * 2 * T * 2048),
        (
            ["shared_experts"],
            {"moe": {"num_experts": 8, "top_k": 2, "ffn_size": 2048, "num_shared_experts": 2}},
            3 * 2 * T * 4096 * 4096,
            2 * 3 * T * 4096,
        ),
        (
            ["mla_up_proj"],
            {
                "mla": {
                    "q_rank": 1536, "kv_rank": 1024, "nope_head_size": 128, "rope_head_size": 64, "value_head_size": 128
                }
            },
            2 * T * 32 * (1536 * 192 + 1024 * 256),
            2 * 2 * T * (32 * 64 + 64),  # rotations of all heads, and of the part of the keys that they share
        ),
    ],
)  # fmt: skip
def test_modules_add_their_forward(modules, model, flops, num_bytes):
    expected = Fraction(flops) / PEAK + Fraction(num_bytes) / BANDWIDTH
    assert abs(time_again(modules, **model) / expected - 1) < Fraction(1, 10**4)


def test_a_router_with_its_experts_adds_its_exchanges():
    moe = {"num_experts": 8, "top_k": 2, "ffn_size": 8}
    sections = {"model": {"moe": moe}, "topology": {"ep": 2}, "stages": STAGES, "cost": {"analytic": H200}}

    def stage(**memory):
        spec = plan_spec(memory=memory, **sections)
        return AnalyticCosts(spec, spec.cost.analytic).stages[1]

    plain, again = stage(), stage(recompute="selective", recompute_modules=["moe"])
    more = again[Phase.INPUT].links_us - plain[Phase.INPUT].links_us
    assert more == plain[Phase.FORWARD].links_us > 0
    assert again[Phase.INPUT].flops - plain[Phase.INPUT].flops < plain[Phase.FORWARD].flops


def test_gathering_again_adds_the_forwards_gathers_to_w():
    sections = {"model": {"hidden_size": 1024, "num_heads": 8}, "topology": {"tp": 2, "sequence_parallel": True}}
    kept, again = (computed(memory={"sequence_parallel_activations": how}, **sections) for how in ("keep", "regather"))
    numel = 8 * 2 * 1024 // 2
    gather = 20 + 1 + Fraction(2 * numel) / (450 * 1000 * Fraction(3, 4))  # a launch, a step, the bytes of the other
    for stage, gathers in ((0, 2 * 2), (1, 2 * 2 + 1)):  # two a block, one for the head
        more = again.backward_weight_us[stage] - kept.backward_weight_us[stage]
        assert 0 <= more - gathers * gather <= Fraction(gathers, 1000)  # each rounded up, as it is simulated
    assert (again.forward_us, again.backward_input_us) == (kept.forward_us, kept.backward_input_us)


def test_the_optimizers_step_takes_its_bytes_at_the_memorys_bandwidth():
    sections = {"model": {"hidden_size": 1024, "num_heads": 8, "ffn_size": 4096, "vocab_size": 4096}}
    alone = computed(**sections)
    block = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024
    numel = 4096 * 1024 + 2 * block
    moved = (2 * 2 + 4 + 2 * 12) * numel  # weights twice, gradients once, moments and a float32 copy twice
    expected = moved / (Fraction(4800) * 1000 * Fraction(8, 10))
    assert abs(alone.optimizer_of(0) - expected) <= Fraction(1, 1000)
    assert alone.optimizer_of(1) > alone.optimizer_of(0)  # a norm more
    shared = computed(topology={"dp": 4}, memory={"shard_optimizer": "dp"}, **sections)
    assert abs(shared.optimizer_of(0) - expected / 4) <= Fraction(1, 1000)


def test_given_times_are_taken_as_they_are():
    spec = plan_spec(cost={"forward_us": 10, "backward_us": 20, "optimizer_us": [3, 4]}, memory={"recompute": "full"})
    assert with_times(spec) is spec
    assert [spec.cost.optimizer_of(stage) for stage in range(2)] == [3, 4]
    assert plan_spec().cost.optimizer_of(0) == 0


def test_a_list_of_steps_has_an_entry_for_each_stage():
    with pytest.raises(BadPlanError, match=r"PP109: `cost.optimizer_us` has 3 entries"):
        plan_spec(cost={"optimizer_us": [1, 2, 3]})


def test_types_that_the_device_was_asked_about_stay_those_of_memory():
    lowered = lower(plan_spec(cost={"analytic": {**H200, "attention": "unfused"}}))
    assert (lowered.spec.memory.dtype, lowered.spec.memory.attention) == ("bfloat16", "unfused")
    own = plan_spec(cost={"analytic": H200}, memory={"dtype": "float16"})
    assert memory_dtype(own) == lower(own).spec.memory.dtype == "float16"


def test_a_candidate_with_other_stages_has_the_optimizers_time_of_its_own():
    loaded = plan_from_dict(plan_dict(cost={"optimizer_us": [10, 14]}))
    layout = Layout(2, 2, 1, 1, 1, 1, 2, 4, "interleaved", None, "even", "none", "none")
    repartitioned = plan_from_dict(PlanLayouts(loaded, every_schedule(), {}).plan_of(layout)).spec
    assert repartitioned.num_stages == 4
    assert sum(repartitioned.cost.optimizer_of(stage) for stage in range(4)) == 24


def test_the_table_of_costs_names_the_optimizers_step(tmp_path):
    path = plan_file(tmp_path / "plan.json", cost={"analytic": H200})
    result = invoke("show", path, "--costs")
    assert result.exit_code == 0
    assert "the optimizer's step takes 0." in result.output


def test_show_memory_prints_every_stage(tmp_path):
    path = plan_file(tmp_path / "plan.json")
    result = invoke("show", path, "--memory")
    assert result.exit_code == 0
    assert "head.loss" in result.output
