"""The plan of a script's modules: arguments of the script become keys, and contradictions are refused."""

import re
from pathlib import Path

import pytest
import yaml

from pipeproof.comm.lower import lower
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.exec.rank.executor_support import require_executable
from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import (
    Request,
    complete_plan,
    forward_plan,
    given_plan,
    in_script_words,
    placement_of,
    schedule_section,
    stages_of_rank,
)
from pipeproof.exec.train.plan_layers import StageFacts
from pipeproof.exec.train.train_rank import checked_plan
from pipeproof.schedule.ops import PART_KINDS, parse_op
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict
from tests.train.fake_store import FakeStore, on_ranks

OUT = [{"shape": ["b", 8], "dtype": "float32", "gradient": True}]


def request(plan=None, schedule="1f1b", num_micro_batches=4, num_ranks=2, num_replicas=1, *, overlap=False):
    section = schedule_section(schedule)
    return Request(plan, section, num_micro_batches, "torch", "cpu", "float32", num_ranks, num_replicas, overlap)


def facts(num_stages):
    return [
        StageFacts.whole(n, "Block", [{"name": "w", "shape": [8, 8]}], OUT if n < num_stages - 1 else [], 64)
        for n in range(num_stages)
    ]


def completed(num_stages=2, tied=(), **options):
    return complete_plan(request(**options).skeleton(num_stages), facts(num_stages), tied, 2)


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("zb_v", 4), ("interleaved", 4), ("dualpipe", 2)])
def test_a_plan_of_modules_is_proved(schedule, num_stages):
    report = check(plan_from_dict(completed(num_stages, schedule=schedule)))
    assert not report.errors


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("interleaved", 4), ("dualpipe_v", 4)])
def test_pairs_of_modules_are_whole_in_the_graph_and_proved(schedule, num_stages):
    plan = plan_from_dict(completed(num_stages, schedule=schedule, num_micro_batches=8, overlap=True))
    assert not check(plan).errors
    graph = lower(plan.spec).graph
    assert len(graph.pairs)
    assert not {op.kind for op in graph.ops} & PART_KINDS


@pytest.mark.parametrize("schedule", ["zb_h1", "optimal"])
def test_a_schedule_without_pairs_is_left_as_it_is(schedule):
    assert "overlap" not in completed(schedule=schedule, overlap=True)["schedule"]


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"schedule": {"overlap": {"order": ["B", "F"]}}}, "orders the parts of a GPT's blocks"),
        ({"cost": {"collective_slowdown": 0.1}, "schedule": {"overlap": "pairs"}}, "the model has custom layers"),
        ({"schedule": {"kind": "optimal", "overlap": "pairs"}}, "`kind: optimal` has none"),
    ],
)
def test_what_custom_layers_have_no_parts_for_is_refused(section, text):
    plan = completed()
    for name, keys in section.items():
        plan.setdefault(name, {}).update(keys)
    with pytest.raises(PlanFileError) as caught:
        plan_from_dict(plan)
    assert text in str([finding.message for finding in caught.value.findings])


def test_pairs_of_modules_are_not_run_without_their_script():
    with pytest.raises(PipeproofError, match="declares the layers of a training script"):
        require_executable(make_subject(plan_from_dict(completed(overlap=True))))


def test_a_shared_weight_belongs_to_its_first_stage():
    layers = completed(tied=[{0: "w", 1: "w"}])["model"]["layers"]
    assert [layer.get("borrows") for layer in layers] == [None, ["stage.0.w"]]
    assert [len(layer["parameters"]) for layer in layers] == [1, 0]


def test_a_placement_is_known_before_the_layers():
    assert placement_of(request(schedule="zb_v").skeleton(4), 4) == [[0, 3], [1, 2]]
    assert stages_of_rank("zb_v", 2, 4, 1) == [1, 2]


def test_uneven_stages_are_placed_as_the_ranks_have_them():
    skeleton = request(schedule=[["0F0", "2F0", "2B0", "0B0"], ["1F0", "1B0"]], num_micro_batches=1)
    assert skeleton.skeleton(3, [[0, 2], [1]])["schedule"]["placement"] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"topology": {"pp": 4}}, "topology.pp 4, and here it is 2"),
        ({"topology": {"dp": 2}}, "topology.dp 2, and here it is 1"),
        ({"schedule": {"kind": "1f1b", "num_micro_batches": 8}}, "num_micro_batches 8, and here it is 4"),
    ],
)
def test_a_plan_that_contradicts_the_script_is_refused(plan, text):
    with pytest.raises(PipelineError, match=text):
        request(plan).skeleton(2)


def test_the_number_of_micro_batches_is_needed():
    with pytest.raises(PipelineError, match="num_micro_batches"):
        request(num_micro_batches=None).skeleton(2)


def test_sizes_without_a_schedule_are_a_finding_with_the_nearest_sizes():
    with pytest.raises(PlanFileError) as raised:
        placement_of(request(schedule="interleaved", num_micro_batches=5).skeleton(4), 4)
    (finding,) = raised.value.findings
    assert finding.code == "PP140"
    assert "4 or 6" in finding.help


def test_an_unknown_schedule_is_a_finding_on_the_argument():
    with pytest.raises(PlanFileError, match="PP106: `schedule` must be"):
        stages_of_rank("zb_x", 2, 4, 0)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "remedies"),
    [("zb_v", 3, [4]), ("zb_v", 1, [4]), ("1f1b", 4, [2]), ("interleaved", 5, [4, 6]), ("dualpipe", 3, [2])],
)
def test_stages_that_a_schedule_does_not_have_are_refused_with_the_number_to_cut(schedule, num_stages, remedies):
    with pytest.raises(PipelineError, match=rf"cut the model into {' or '.join(map(str, remedies))} stages"):
        stages_of_rank(schedule, 2, num_stages, 0)
    assert all(stages_of_rank(schedule, 2, number, 0) for number in remedies)


def test_looped_bfs_takes_any_number_of_stages():
    assert [stages_of_rank("looped_bfs", 2, 3, rank) for rank in (0, 1)] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("programs", "num_micro_batches", "text", "remedy"),
    [
        ([["0F0", "0B0"], ["1F0", "1B0"]], 4, "num_micro_batches is 4", "set num_micro_batches to 1"),
        ([["0F0", "0B0"]], 1, "the group of the pipeline has 2", "start 1 ranks"),
        ([["0F0", "1F0", "1B0", "0B0"], ["2F0", "2B0"]], 1, "there are 2 stage", "cut the model into"),
    ],
)
def test_findings_speak_of_what_the_script_wrote(programs, num_micro_batches, text, remedy):
    skeleton = request(schedule=programs, num_micro_batches=num_micro_batches).skeleton(2)
    with pytest.raises(PlanFileError) as raised:
        in_script_words(lambda: placement_of(skeleton, 2), has_plan=False)
    (finding,) = raised.value.findings
    assert text in finding.message
    assert remedy in finding.help
    assert "schedule." not in finding.message + finding.help
    with pytest.raises(PlanFileError, match=r"schedule\.|topology\.|the plan"):
        in_script_words(lambda: placement_of(skeleton, 2), has_plan=True)


@pytest.mark.parametrize("schedule", [None, {"kind": "1f1b"}, 3, ["1f1b"]])
def test_a_schedule_is_a_name_or_the_operations_of_each_rank(schedule):
    with pytest.raises(PipelineError, match="`schedule` is "):
        schedule_section(schedule)


def test_paths_in_a_plan_file_start_in_its_folder(tmp_path):
    (tmp_path / "plan.yaml").write_text("schedule: {kind: file, path: ops.csv}\ncost: {profile: p.json}\n")
    content = given_plan(tmp_path / "plan.yaml")
    assert content["schedule"]["path"] == str(tmp_path / "ops.csv")
    assert content["cost"]["profile"] == str(tmp_path / "p.json")
    assert content["model"] == {"kind": "layers"}


def test_a_dict_is_not_changed():
    plan = {"schedule": {"kind": "1f1b", "num_micro_batches": 4}}
    request(given_plan(plan)).skeleton(2)
    assert plan == {"schedule": {"kind": "1f1b", "num_micro_batches": 4}}


@pytest.mark.parametrize(
    ("text", "code"),
    [("topology: {pp: 2\n", "PP101"), ("topology: [2]\n", "PP105"), ("- 1\n", "PP105"), ("a: 1\na: 2\n", "PP10")],
    ids=["syntax", "section", "list", "twice"],
)
def test_a_bad_plan_file_is_refused_with_its_place(tmp_path, text, code):
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    with pytest.raises(PlanFileError) as raised:
        given_plan(str(file))
    assert code in " ".join(finding.code for finding in raised.value.findings)
    assert {finding.location.file for finding in raised.value.findings} == {str(file)}


def test_a_file_that_does_not_exist_is_a_finding(tmp_path):
    with pytest.raises(PlanFileError, match=r"PP100: .*no such file"):
        given_plan(tmp_path / "none.yaml")


@pytest.mark.parametrize("plan", [{"model": {"kind": "gpt"}}, 7], ids=["gpt", "number"])
def test_what_is_no_plan_of_modules_is_refused(plan):
    with pytest.raises(PipelineError, match=r"your modules|give the name of a file"):
        given_plan(plan)


def test_a_section_that_is_none_is_refused():
    with pytest.raises(PlanFileError, match="PP105"):
        given_plan({"schedule": ["1f1b"]})


def test_the_forward_plan_has_the_forwards_in_their_order():
    content = completed()
    programs = [[parse_op(text) for text in program] for program in (["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0"])]
    forward = forward_plan(content, programs)
    assert forward["schedule"]["programs"] == [["0F0", "0F1"], ["1F0"]]
    assert forward["schedule"]["num_micro_batches"] == content["schedule"]["num_micro_batches"]
    assert yaml.safe_load(yaml.safe_dump(forward)) == forward


@pytest.mark.parametrize("schedule", ["ops.csv", Path("ops.txt")], ids=["name", "path"])
def test_a_written_schedule_is_named_by_its_file(schedule):
    section = schedule_section(schedule)
    assert section == {"kind": "file", "path": str(Path(schedule).resolve())}


def test_a_schedule_with_scales_is_not_trained_without_them(tmp_path):
    """The scales cancel out, so the plan is proved; the transfers of modules apply neither."""
    text = (
        "rank 0: 0F0 0SEND_F0 WAIT(0SEND_F0) 0RECV_B0{scale=2} WAIT(0RECV_B0) 0B0\n"
        "rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0{scale=1/2} WAIT(1SEND_B0)\n"
    )

    def trained(schedule):
        (tmp_path / "s.txt").write_text(schedule)
        section = {"kind": "file", "path": str(tmp_path / "s.txt"), "num_micro_batches": 1}
        store, content = FakeStore(), plan_dict(schedule=section)
        return on_ranks(2, lambda rank: checked_plan(content, Agreement(store, rank, 2, 20.0), "plan", unsafe=False))

    assert all(plan.findings == () for plan in trained(re.sub(r"\{.*?\}", "", text)))
    assert {str(error)[:40] for error in trained(text)} == {"in the schedule 0RECV_B0 has scale 2, wh"}
