"""Facts of one process about its place, and the kind of link between two."""

import pytest

from pipeproof.exec.launch.launched_rank import launched_rank
from pipeproof.exec.measure import nvidia_smi
from pipeproof.exec.placement import rank_placement
from pipeproof.exec.placement.link_kinds import LinkKind, link_kind
from pipeproof.exec.placement.rank_placement import (
    MOST_BYTES,
    GpuPlace,
    RankPlacement,
    own_placement,
    placement_from_json,
    switches_of,
)

SLURM = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[0-1]", "SLURMD_NODENAME": "n1",
    "SLURM_TOPOLOGY_ADDR": "spine.leaf2.n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}  # fmt: skip
IDENTITIES = """\
0, NVIDIA GB200, GPU-a, 00000008:01:00.0
1, NVIDIA GB200, GPU-b, 00000009:01:00.0
2, NVIDIA GB200, GPU-c, 00000018:01:00.0
"""
FABRIC = """\
0, Completed, 32766, 5c8a1f80-0000-4000-8000-3f0d2ad5d0a1
1, Completed, 32766, 5c8a1f80-0000-4000-8000-3f0d2ad5d0a1
2, Completed, 0, 00000000-0000-0000-0000-000000000000
"""
MATRIX = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV18\tSYS\nGPU1\tNV18\t X \tSYS\nGPU2\tSYS\tSYS\t X \n"


@pytest.fixture
def three_gpus(monkeypatch):
    """A machine whose driver knows the fabric; the texts of its answers can be replaced."""
    answers = {"uuid": IDENTITIES, "fabric": FABRIC, "topo": MATRIX}

    def answer(*arguments):
        return next(text for key, text in answers.items() if any(key in argument for argument in arguments))

    monkeypatch.setattr(nvidia_smi, "_output", lambda *arguments: answer(*sorted(arguments, key=len, reverse=True)))
    return answers


def test_a_task_of_slurm():
    place = own_placement(SLURM, launched_rank(SLURM, "torch"))
    assert (place.host, place.local_rank, place.launcher) == ("n1", 1, "Slurm (srun)")
    assert place.switches == ("spine", "leaf2")
    assert place.gpu is None
    assert placement_from_json(place.to_json()) == place


def test_a_process_without_a_launcher():
    place = own_placement({})
    assert (place.local_rank, place.launcher, place.switches) == (None, "", ())
    assert place.host


@pytest.mark.parametrize(
    ("environment", "switches"),
    [
        ({"SLURM_TOPOLOGY_ADDR": "s0.s1.node3", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}, ("s0", "s1")),
        ({"SLURM_TOPOLOGY_ADDR": "s0.n3.x.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, ("s0",)),
        ({"SLURM_TOPOLOGY_ADDR": "node3", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, ()),
        ({"SLURM_TOPOLOGY_ADDR": "node3", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, ()),
        ({"SLURM_TOPOLOGY_ADDR": "s0.node3"}, ()),
        ({"SLURM_TOPOLOGY_ADDR": "s\n0.node3", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, ()),
        ({"PIPEPROOF_ZONE": "z", "PIPEPROOF_RACK": "r4"}, ("z", "r4")),
        ({"PIPEPROOF_RACK": "r4" * 200}, ()),
    ],
)
def test_switches(environment, switches):
    assert switches_of(environment) == switches


def test_the_node_of_a_pod_is_its_host(monkeypatch):
    monkeypatch.setattr(rank_placement, "boot_id", lambda: "boot-1")
    assert own_placement({"PIPEPROOF_NODE": "gke-7"}).host_key == "name gke-7"
    assert own_placement({"SLURMD_NODENAME": "n1"}).host_key == "boot boot-1"
    assert own_placement({"PIPEPROOF_NODE": "not printable \x07"}).host != "not printable \x07"


@pytest.mark.parametrize(
    ("visible", "local_rank", "uuid"),
    [(None, 1, "GPU-b"), ("2,0", 0, "GPU-c"), ("GPU-b,GPU-a", 1, "GPU-a"), ("0", 1, None), ("MIG-1", 0, None)],
)
def test_the_gpu_that_cuda_will_give(three_gpus, visible, local_rank, uuid):
    environment = {"LOCAL_RANK": str(local_rank)} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    gpu = own_placement(environment, on_gpu=True).gpu
    assert (None if gpu is None else gpu.uuid) == uuid


def test_the_nvlink_domain_and_the_links_of_a_gpu(three_gpus):
    first, _, third = (own_placement({"LOCAL_RANK": str(rank)}, on_gpu=True).gpu for rank in range(3))
    assert first.domain == "5c8a1f80-0000-4000-8000-3f0d2ad5d0a1.32766"
    assert first.nvlinks == ("GPU-b",)
    assert (third.domain, third.nvlinks, third.pcie) == ("", (), ("GPU-a", "GPU-b"))


def test_a_gpu_that_its_process_does_not_see_is_of_the_host_at_most(three_gpus):
    """Two pods of one host, each with its own GPU: nothing is known about the link between these."""
    three_gpus["uuid"], three_gpus["topo"] = IDENTITIES.splitlines()[0], "\tGPU0\nGPU0\t X \n"
    three_gpus["fabric"] = "0, N/A, N/A, N/A\n"  # an H200 on a virtual machine
    first = own_placement({}, on_gpu=True)
    three_gpus["uuid"] = IDENTITIES.splitlines()[0].replace("GPU-a", "GPU-b")
    second = own_placement({}, on_gpu=True)
    assert (first.gpu.uuid, second.gpu.uuid, first.gpu.domain) == ("GPU-a", "GPU-b", "")
    assert link_kind(first, second) is LinkKind.HOST


def test_an_old_driver_knows_no_fabric(three_gpus):
    three_gpus["fabric"] = 'Field "fabric.cliqueId" is not a valid field to query.\n'
    assert own_placement({}, on_gpu=True).gpu.domain == ""
    three_gpus["topo"] = MATRIX.replace("NV18", "X4")
    assert own_placement({}, on_gpu=True).gpu.nvlinks == ()
    assert own_placement({}, on_gpu=True).gpu.pcie == ("GPU-c",)


def test_different_gpus_are_numbered_otherwise_by_cuda(three_gpus):
    three_gpus["uuid"] = IDENTITIES.replace("GB200, GPU-c", "T400, GPU-c")
    assert own_placement({}, on_gpu=True).gpu is None
    assert own_placement({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, on_gpu=True).gpu.uuid == "GPU-a"


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {"host": ""},
        {"host": "n0", "local_rank": -1},
        {"host": "n0", "local_rank": "1"},
        {"host": "n0\n"},
        {"host": "n" * 257},
        {"host": "n0", "switches": ["s"] * 17},
        {"host": "n0", "gpu": {"nvlinks": ["x" * 250] * 65}},
        {"host": "n0", "gpu": {"nvlinks": ["x" * MOST_BYTES]}},
    ],
)
def test_facts_of_another_rank_are_validated(content):
    with pytest.raises(ValueError, match=r"\S"):
        placement_from_json(content)


def place(host="n0", boot="b0", switches=(), **gpu):
    return RankPlacement(host, boot, switches=switches, gpu=GpuPlace(**gpu) if gpu else None)


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (place(), place(), LinkKind.HOST),
        (place("pod-0"), place("pod-1"), LinkKind.HOST),
        (place(uuid="a"), place(uuid="a"), LinkKind.SAME_GPU),
        (place(uuid="a", nvlinks=("b",)), place(uuid="b", nvlinks=("a",)), LinkKind.NVLINK),
        (place(uuid="a", nvlinks=("b",)), place(uuid="b"), LinkKind.NVLINK),
        (place(uuid="a", pcie=("b",)), place(uuid="b", nvlinks=("c",)), LinkKind.PCIE),
        (place(uuid="a", pcie=("c",)), place(uuid="b", nvlinks=("c",)), LinkKind.HOST),
        (place(uuid="a"), place(uuid="b"), LinkKind.HOST),
        (place(domain="d"), place("n1", "b1", domain="d"), LinkKind.NVLINK),
        (place(domain="d"), place("n1", "b1", domain="e"), LinkKind.BETWEEN_HOSTS),
        (place(boot=""), place(boot=""), LinkKind.HOST),
        (place(boot=""), place(), LinkKind.UNKNOWN),
        (place(), place("n1", "b1"), LinkKind.BETWEEN_HOSTS),
        (place(), place("n1", "b1", ("s0",)), LinkKind.BETWEEN_HOSTS),
        (place(switches=("s0", "s1")), place("n1", "b1", ("s0", "s1")), LinkKind.SWITCH),
        (place(switches=("s0", "s1")), place("n1", "b1", ("s0", "s2")), LinkKind.HIGHER_SWITCH),
        (place(switches=("s0",)), place("n1", "b1", ("s0", "s2")), LinkKind.HIGHER_SWITCH),
        (place(switches=("s0", "s1")), place("n1", "b1", ("s3", "s1")), LinkKind.BEYOND),
    ],
)
def test_kinds_of_links(first, second, kind):
    assert link_kind(first, second) is link_kind(second, first) is kind
