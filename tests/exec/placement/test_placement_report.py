"""Ranks on hosts that differ from the plan: findings, bytes, predicted times and the proposed map."""

import io
import itertools
import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeproof.exec.launch.launcher_table import KUBERNETES, OPEN_MPI, SLURM, TORCHRUN
from pipeproof.exec.placement.placed_times import PlacedTimes
from pipeproof.exec.placement.placement_console import render_placement
from pipeproof.exec.placement.placement_report import placement_report
from pipeproof.exec.placement.rank_map import Costs, proposed_map
from pipeproof.exec.placement.rank_placement import GpuPlace, RankPlacement
from pipeproof.exec.placement.traffic import Traffic
from pipeproof.exec.rehearse import rehearsal_console
from pipeproof.exec.rehearse.rehearsal_report import Rehearsal
from pipeproof.sim.simulate import simulate
from tests.exec.placement.invented_hosts import NETWORK, blocks, cyclic, places, planned
from tests.exec.test_rehearse_command import require_fit
from tests.plans import subject

TWO_NODES = {"pp": 2, "tp": 4, "dp": 2}


def codes(report):
    return [finding.code for finding in report.findings]


def rendered(report):
    console = Console(file=io.StringIO(), width=200)
    render_placement(report, None, console)
    return console.file.getvalue()


def on_hosts(report):
    """Hosts of each rank by the proposed map."""
    return [report.placements[process].host for process in report.proposal.processes]


def test_round_robin_over_hosts_is_found_and_the_map_keeps_tp_inside_hosts():
    report = placement_report(planned(TWO_NODES), places(cyclic(8, 2)))
    (finding,) = report.findings
    assert finding.code == "PP950"
    assert finding.message.startswith("ranks 0 and 1 of one tp group are on n0 and n1")
    assert report.placed_us > report.planned_us
    assert report.proposal.cost.step_us == report.planned_us
    assert on_hosts(report) == ["n0"] * 8 + ["n1"] * 8
    text = rendered(report)
    assert "tp    3.19 GiB       3.19 GiB" in text
    assert "start it with `srun --distribution=block`" in text


@pytest.mark.parametrize("network", [NETWORK, None])
def test_ranks_host_by_host_are_accepted_in_one_line(network):
    report = placement_report(planned(TWO_NODES, network), places(blocks(8, 2)))
    assert (codes(report), report.proposal) == ([], None)
    assert rendered(report) == "placement: 2 hosts of 8 ranks, as planned; between them in a step: pp 256 MiB\n"


def test_hosts_in_another_order_are_accepted():
    report = placement_report(planned(TWO_NODES), places([*[1] * 8, *[0] * 8]))
    assert (codes(report), report.proposal) == ([], None)


def test_one_host_prints_nothing():
    report = placement_report(planned(TWO_NODES), places([0] * 16))
    assert (codes(report), rendered(report)) == ([], "")


def test_without_a_network_bytes_decide_and_no_time_is_predicted():
    report = placement_report(planned(TWO_NODES, None), places(cyclic(8, 2)))
    assert codes(report) == ["PP950"]
    assert (report.planned_us, report.placed_us) == (None, None)
    assert on_hosts(report) == ["n0"] * 8 + ["n1"] * 8
    assert "a step takes" not in rendered(report)
    assert report.to_json()["map"]["step_us"] is None


def test_a_plan_that_the_simulator_refuses_has_no_times():
    """PP154: the collectives of a stage take longer than its forward."""
    loaded = planned(TWO_NODES)
    cost = loaded.plan.spec.cost.model_copy(update={"forward_us": Fraction(1)})
    short = replace(loaded, lowered=replace(loaded.plan, spec=loaded.plan.spec.model_copy(update={"cost": cost})))
    report = placement_report(short, places(cyclic(8, 2)))
    assert (codes(report), report.placed_us) == (["PP950"], None)
    assert on_hosts(report) == ["n0"] * 8 + ["n1"] * 8


def test_smaller_hosts_than_planned_are_found():
    report = placement_report(planned(TWO_NODES), places(blocks(4, 4)))
    assert codes(report) == ["PP950", "PP951"]
    assert "dp group" in report.findings[0].message
    assert report.findings[1].message == "host n0 has 4 ranks, and `ranks_per_node` is 8"
    assert report.findings[1].help == "set `ranks_per_node` to 4"


def test_hosts_of_as_many_ranks_as_planned_have_no_other_size():
    assert codes(placement_report(planned(TWO_NODES, NETWORK | {"ranks_per_node": 4}), places(blocks(4, 4)))) == []


def test_an_order_of_axes_is_preferred_where_the_launcher_numbers_hosts():
    subject = planned({"pp": 2, "tp": 4, "dp": 2, "order": ["dp", "tp", "cp", "ep", "pp"]})
    report = placement_report(subject, places(blocks(4, 4), TORCHRUN.name))
    assert report.proposal.order == ("tp", "dp", "cp", "ep", "pp")
    assert report.proposal.cost.step_us < report.placed_us
    assert "topology.order: [tp, dp, cp, ep, pp]" in report.findings[0].help


def test_the_order_that_is_proposed_takes_the_time_of_a_plan_with_that_order():
    subject = planned({"pp": 2, "tp": 4, "dp": 2, "order": ["dp", "tp", "cp", "ep", "pp"]})
    report = placement_report(subject, places(blocks(4, 4), TORCHRUN.name))
    changed = planned({**TWO_NODES, "order": list(report.proposal.order)})
    again = placement_report(changed, places(blocks(4, 4), TORCHRUN.name))
    assert again.placed_us == report.proposal.cost.step_us


def test_a_proposed_map_is_accepted_where_it_was_applied():
    report = placement_report(planned(TWO_NODES), places(cyclic(4, 4)))
    applied = [report.placements[process] for process in report.proposal.processes]
    again = placement_report(planned(TWO_NODES), applied)
    assert again.placed_us == report.proposal.cost.step_us
    assert again.proposal is None


def test_whole_groups_are_placed_before_what_is_left_over():
    report = placement_report(planned({"pp": 1, "tp": 4, "dp": 4}), places([*"aaaaabbbbbbccccc"], OPEN_MPI.name))
    groups = [set(on_hosts(report)[start : start + 4]) for start in range(0, 16, 4)]
    assert sorted(map(len, groups)) == [1, 1, 1, 3]
    assert "mpirun --hostfile HOSTS --map-by seq" in rendered(report)


def test_an_nvlink_domain_of_several_hosts_is_a_node():
    hosts = cyclic(8, 2)
    gpus = [GpuPlace("GB200", f"GPU-{rank}", domain="rack.0") for rank in range(16)]
    racks = [RankPlacement(f"n{host}", f"boot-{host}", gpu=gpu) for host, gpu in zip(hosts, gpus, strict=True)]
    assert rendered(placement_report(planned(TWO_NODES, NETWORK | {"ranks_per_node": 16}), racks)) == ""


def test_kubernetes_takes_no_map():
    report = placement_report(planned(TWO_NODES), places(cyclic(8, 2), KUBERNETES.name))
    assert "docs/job-files.md" in rendered(report)


def test_the_report_is_json():
    content = json.loads(json.dumps(placement_report(planned(TWO_NODES), places(cyclic(8, 2))).to_json()))
    assert content["map"]["hosts"] == ["n0"] * 8 + ["n1"] * 8
    assert content["map"]["order"] is None
    assert {"axis": "tp", "link": "between_hosts", "bytes": 3422846976} in content["bytes"]
    assert content["placed_us"] > content["map"]["step_us"]


@pytest.mark.parametrize("hosts", [cyclic(8, 2), blocks(4, 4), [0] * 16])
def test_the_report_fits_its_schema(hosts):
    gpu = GpuPlace("GB200", "GPU-0", nvlinks=("GPU-1",))
    report = placement_report(planned({**TWO_NODES, "order": ["dp", "tp", "cp", "ep", "pp"]}), places(hosts, gpu=gpu))
    require_fit("rehearse", placed_rehearsal(report).to_json())


def test_the_rehearsal_prints_its_placement():
    console = Console(file=io.StringIO(), width=200)
    rehearsal_console._render(
        placed_rehearsal(placement_report(planned(TWO_NODES), places(blocks(8, 2)))), console, timed=False
    )
    assert console.file.getvalue().startswith("placement: 2 hosts of 8 ranks, as planned;")


def placed_rehearsal(report):
    """A rehearsal of a small plan that carries this report."""
    return Rehearsal(subject().unfolded(), "0" * 64, True, Fraction(1), {}, (), (), None, {"n0": 1.0}, {}, report)


def test_another_number_of_places_is_refused():
    with pytest.raises(ValueError, match="15 places"):
        placement_report(planned(TWO_NODES), places([0] * 15))


@pytest.mark.parametrize(
    ("topology", "sections"),
    [
        (TWO_NODES, {}),
        ({"pp": 4, "tp": 4}, {}),
        ({"pp": 2, "dp": 8}, {"schedule": {"kind": "gpipe"}}),
        ({"pp": 2, "tp": 2, "cp": 2, "dp": 2}, {}),
    ],
)
def test_ranks_as_planned_take_the_time_that_the_simulator_prints(topology, sections):
    subject = planned(topology, **sections)
    times = PlacedTimes.of(subject.plan)
    assert times.step_us([rank // 8 for rank in range(16)]) == times.planned_us == simulate(subject.plan).makespan


def test_the_own_work_of_a_stage_takes_the_same_time_on_any_host():
    """A plan for smaller nodes has the slower collectives inside the given time of a stage; a placement adds them."""
    whole, halved = (PlacedTimes.of(planned(TWO_NODES, NETWORK | {"ranks_per_node": size}).plan) for size in (8, 2))
    placed = whole.step_us([rank // 2 for rank in range(16)])
    assert placed > whole.planned_us
    assert placed > halved.planned_us


def labelings(hosts):
    """Every way to put ranks onto these hosts, the host of each rank; hosts of one size are interchangeable."""
    every = sorted(set(itertools.permutations(hosts)))
    is_regular = len({hosts.count(host) for host in hosts}) == 1
    return [each for each in every if not is_regular or list(dict.fromkeys(each)) == sorted(set(hosts))]


def cost_of(subject, hosts):
    """Cost of ranks on hosts, and of the proposed map, which are equal if there is none."""
    placed = places(hosts)
    costs = Costs(Traffic(subject.plan), PlacedTimes.of(subject.plan), [hosts.index(host) for host in hosts])
    present, proposal = costs.of(range(len(hosts))), proposed_map(subject.plan.mesh, placed, costs)
    return present, present if proposal is None else proposal.cost


@pytest.mark.parametrize(
    ("topology", "hosts", "tolerance"),
    [
        ({"pp": 1, "tp": 4, "dp": 2}, "aaaabbbb", 0),
        ({"pp": 2, "tp": 2, "dp": 2}, "aaaabbbb", 0),
        ({"pp": 2, "tp": 2, "dp": 2}, "aabbccdd", 0),
        ({"pp": 2, "tp": 4}, "aabbbbcc", 0),
        ({"pp": 4, "dp": 2}, "aaabbbcc", Fraction(1, 100)),
    ],
    ids=["tp dp", "pp tp dp", "four hosts", "one split group", "irregular"],
)
@pytest.mark.slow(but=["tp dp", "pp tp dp"])
def test_no_map_at_all_is_faster(topology, hosts, tolerance):
    """Brute force. On irregular hosts that cut every group, exchanges of two ranks may end before the best map."""
    subject = planned(topology, NETWORK | {"ranks_per_node": 4})
    times = PlacedTimes.of(subject.plan)
    every = labelings(hosts)
    best = min(times.step_us([hosts.index(host) for host in each]) for each in every)
    for given_hosts in every[:: max(1, len(every) // 8)]:
        assert best <= cost_of(subject, given_hosts)[1].step_us <= best * (1 + tolerance)


@settings(deadline=None)
@given(
    st.sampled_from(
        [{"pp": 2, "tp": 4}, {"pp": 1, "tp": 2, "dp": 4}, {"pp": 2, "tp": 2, "dp": 2}, {"pp": 2, "cp": 2, "dp": 2}]
    ),
    st.lists(st.sampled_from("abc"), min_size=8, max_size=8),
)
def test_a_proposed_map_is_never_worse_and_a_permutation(topology, hosts):
    subject = planned(topology, NETWORK | {"ranks_per_node": 4})
    present, best = cost_of(subject, hosts)
    assert not present < best
    report = placement_report(subject, places(hosts))
    if report.proposal is not None:
        assert sorted(report.proposal.processes) == list(range(8))
        assert report.proposal.cost < present
        moved = [hosts.index(hosts[process]) for process in report.proposal.processes]
        assert PlacedTimes.of(subject.plan).step_us(moved) == report.proposal.cost.step_us


def test_bytes_of_axes_are_those_of_the_graph():
    """By hand: two micro-batches of a pipeline, and one all-reduce of gradients."""
    subject = planned({"pp": 2, "dp": 2}, schedule={"num_micro_batches": 2, "micro_batch_size": 1})
    between = Traffic(subject.plan).between(np.array([0, 1, 2, 3]))
    activation = 512 * 1024 * 4
    assert between["pp"] == 2 * 2 * 2 * activation  # replicas, micro-batches, directions
    block = 4 * 1024**2 + 3 * 1024 * 4096  # attention and gated MLP
    weights = 8 * block + 2 * 1024 * 1024  # embedding and head
    norms = (2 * 8 + 1) * 1024
    biases = between["dp"] / 2 / 4 - weights - norms
    assert 0 <= biases < 0.01 * weights


@pytest.mark.parametrize(
    ("topology", "sections"),
    [
        ({"pp": 2, "tp": 2, "dp": 2}, {"memory": {"shard_optimizer": "dp"}}),
        ({"pp": 2, "tp": 2, "cp": 2, "sequence_parallel": True}, {"transport": "partial"}),
        ({"pp": 2, "ep": 4}, {"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 64}}}),
        ({"pp": 4, "dp": 2}, {"schedule": {"kind": "zb_v", "num_chunks": 2}}),
    ],
)
def test_a_folded_graph_has_the_bytes_of_the_graph_of_all_ranks(topology, sections):
    loaded = subject(topology=topology, **{"model": {"num_layers": 8}, **sections}).unfolded().plan
    whole = replace(loaded, canonical=loaded.graph)
    assert loaded.canonical.num_ranks < whole.canonical.num_ranks
    for nodes in (range(8), [rank // 2 for rank in range(8)], [rank % 3 for rank in range(8)]):
        placed = np.array(nodes)
        assert Traffic(loaded).between(placed) == pytest.approx(Traffic(whole).between(placed))
        assert sum(Traffic(loaded).between(placed).values()) > 0


@pytest.mark.parametrize("launcher", [SLURM.name, OPEN_MPI.name])
def test_an_irregular_map_goes_through_a_file_of_hosts(launcher):
    subject = planned({"pp": 1, "tp": 4, "dp": 4}, NETWORK | {"ranks_per_node": 4})
    report = placement_report(subject, places([*"aaaaabbbbbbccccc"], launcher))
    assert ".placement.map.hosts[]" in report.to_json()["map"]["how"]
    assert report.proposal.cost.step_us <= Fraction(report.placed_us)
