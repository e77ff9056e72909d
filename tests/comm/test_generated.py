"""A plan's request to a generator: stages of each rank, the variant, and keys that do not go together."""

import pytest

from pipeproof.comm.generated_schedule import default_variant, plan_schedule
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.schedule.programs import stages_of
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.plans import plan_dict


def plan(pp=4, **schedule):
    schedule = {"num_micro_batches": 8, **schedule}
    return plan_dict(model={"num_layers": 8}, topology={"pp": pp}, schedule=schedule)


def spec(**schedule):
    return plan_from_dict(plan(**schedule)).spec


PLACED = {
    "1f1b": [[2], [0], [3], [1]],
    "interleaved": [[1, 5], [0, 4], [3, 7], [2, 6]],
    "zb_v": [[3, 4], [0, 7], [2, 5], [1, 6]],
    "dualpipe": [[1, 2], [0, 3], [3, 0], [2, 1]],
    "looped_bfs": [[0, 1, 7], [2], [5, 3], [4, 6]],
    "optimal": [[0, 7], [1, 2, 3], [4], [5, 6]],
}


@pytest.mark.parametrize("kind", PLACED)
def test_stages_lie_where_the_plan_lists_them(kind):
    placement = PLACED[kind]
    report = check(plan_from_dict(plan(kind=kind, placement=placement)))
    assert stages_of(report.subject.plan.programs) == tuple(tuple(sorted(stages)) for stages in placement)
    assert report.errors == ()


@pytest.mark.parametrize("kind", ["gpipe", "seq1f1b", "zb_h1"])
def test_a_schedule_on_other_ranks_is_the_same_schedule(kind):
    own = plan_schedule(spec(kind=kind)).programs
    moved = plan_schedule(spec(kind=kind, placement=[[3], [1], [0], [2]])).programs
    assert moved == (own[3], own[1], own[0], own[2])


def test_stages_there_and_back_may_be_asked_for_where_any_placement_goes():
    assert stages_of(plan_schedule(spec(kind="looped_bfs", num_chunks=2, placement="v")).programs) == (
        (0, 7), (1, 6), (2, 5), (3, 4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "key", "fragment", "fix"),
    [
        ({"kind": "zb_v", "num_chunks": 1}, "num_chunks",
         "2 stages on each rank, and schedule.num_chunks is 1", "num_chunks to 2"),
        ({"kind": "interleaved"}, "num_chunks", "2 or more stages on each rank", "set num_chunks to 2"),
        ({"kind": "1f1b", "num_chunks": 2}, "num_chunks", "one stage on each rank, and", "num_chunks to 1"),
        ({"kind": "1f1b", "placement": [[0, 1], [2, 3], [4, 5], [6, 7]]}, "placement", "placement lists 2", "list 1"),
        ({"kind": "zb_v", "num_chunks": 2, "placement": "loop"}, "placement", "(v)", "remove the key"),
        ({"kind": "zb_v", "placement": [[0, 4], [1, 5], [2, 6], [3, 7]]}, "placement",
         "rank 0 has the stages [0, 4]", "[0, 7], [1, 6], [2, 5], [3, 4]"),
        ({"kind": "interleaved", "placement": [[0, 1, 2], [3], [4, 5], [6]]}, "placement",
         "lists 7 stages for 4 ranks", "looped_bfs or optimal"),
        ({"kind": "looped_bfs", "placement": [[0, 1], [1, 0], [2, 3], [3, 2]]}, "placement",
         "one copy of each stage", "dualpipe or chimera"),
        ({"kind": "1f1b", "variant": "fleet"}, "variant", "is the same in all tools", "remove the key"),
        ({"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 6}, "num_micro_batches",
         "best_unbalanced_scheduler", "variant fleet_balanced"),
        ({"kind": "interleaved", "num_chunks": 2, "micro_batch_group_size": 4}, "micro_batch_group_size",
         "goes with variant megatron", "set kind to interleaved and variant to megatron"),
        ({"kind": "zb_h1", "num_sequence_splits": 2}, "num_sequence_splits", "works on whole sequences", "seq1f1b"),
        ({"kind": "optimal", "num_chunks": 2, "memory_limit": 1}, "memory_limit", "1", "2"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused_at_its_key(schedule, key, fragment, fix):
    with pytest.raises(BadPlanAtError) as caught:
        plan_schedule(spec(**schedule))
    (finding,) = caught.value.findings
    assert finding.code == "PP140"
    assert caught.value.path == ("schedule", key)
    assert fragment in finding.message
    assert fix in finding.help


def test_the_backends_own_tool_gives_the_default_variant():
    interleaved = SCHEDULE_KINDS["interleaved"]
    assert default_variant(interleaved, "paddle") == "fleet"
    assert default_variant(interleaved, "torch") == "torch"
    assert default_variant(SCHEDULE_KINDS["1f1b"], "paddle") is None
    sizes = {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 10}
    assert plan_schedule(spec(**sizes)) == plan_schedule(spec(**sizes, variant="fleet"))
    assert plan_schedule(spec(**sizes)) != plan_schedule(spec(**sizes, variant="torch"))


def test_megatrons_groups_may_be_larger_than_the_ranks():
    sizes = {"kind": "interleaved", "num_chunks": 2, "num_micro_batches": 12, "variant": "megatron"}
    assert plan_schedule(spec(**sizes)) == plan_schedule(spec(**sizes, micro_batch_group_size=4))
    wide = check(plan_from_dict(plan(**sizes, micro_batch_group_size=6)))
    assert wide.errors == ()
    assert wide.subject.plan.schedule != plan_schedule(spec(**sizes))
