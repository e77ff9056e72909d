"""Times of layers on a GPU, whose queue and host are simulated by two clocks."""

import pytest

from pipeproof.analysis.tune.layer_cuts import LayerCost, _stage_of
from pipeproof.exec.train.layer_samples import RunWay, Sample, _of_layers, _shares, samples_of
from pipeproof.exec.train.torch import measure_layers
from pipeproof.exec.train.torch.meta_buffers import with_memory

pytestmark = pytest.mark.needs_torch


class Gpu:
    """The host's time, and the time at which the GPU has done all launched work."""

    def __init__(self, monkeypatch):
        self.host, self.end, self.idle = 0, 0, 0
        cuda = measure_layers.torch.cuda
        monkeypatch.setattr(cuda, "Event", lambda **_: Event(self))
        monkeypatch.setattr(cuda, "synchronize", lambda device: self.wait(self.end))
        monkeypatch.setattr(measure_layers.time, "perf_counter_ns", lambda: self.host)
        monkeypatch.setattr(measure_layers.time, "monotonic", lambda: self.host / 1e9)

    def launch(self, duration, host=0):
        self.host += host
        self.idle += max(0, self.host - self.end)
        self.end = max(self.end, self.host) + duration

    def wait(self, moment):
        self.host = max(self.host, moment)


class Event:
    def __init__(self, gpu):
        self.gpu = gpu

    def record(self):
        self.moment = max(self.gpu.host, self.gpu.end)

    def synchronize(self):
        self.gpu.wait(self.moment)

    def elapsed_time(self, end):
        assert self.gpu.host >= end.moment >= self.moment, "not completed"
        return (end.moment - self.moment) / 1e6


def cost_of(monkeypatch, gpu, device_us, host_us):
    repeated = object.__new__(measure_layers._Repeated)
    repeated._is_gpu, repeated._device = True, None
    repeated._memory = lambda: LayerCost(kept=5)
    repeated._occupy = lambda ns: gpu.launch(int(ns))

    def one_round(mark):
        mark()
        for device, host in zip(device_us, host_us, strict=True):
            gpu.launch(1000 * device, 1000 * host)
            mark()

    repeated._round = one_round
    return repeated.cost()


@pytest.mark.parametrize("host_us", [(20, 30, 10), (90, 150, 60), (400, 900, 500)], ids=["fast", "near", "slow"])
def test_the_times_of_the_gpu_are_seen_behind_a_host_of_any_speed(monkeypatch, host_us):
    gpu = Gpu(monkeypatch)
    cost = cost_of(monkeypatch, gpu, (100, 150, 80), host_us)
    assert cost == LayerCost(100_000, 150_000, 80_000, kept=5, host=1000 * sum(host_us))


def test_a_gpu_with_a_fast_host_is_never_idle(monkeypatch):
    gpu = Gpu(monkeypatch)
    cost_of(monkeypatch, gpu, (100, 150, 80), (20, 30, 10))
    assert gpu.idle < 1e-3 * gpu.end


def test_a_recomputed_module_of_a_sequential_is_compiled_as_one_graph():
    torch, nn = measure_layers.torch, measure_layers.nn
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.BatchNorm1d(4))
    cutter = measure_layers.Cutter.of(model)
    assert [cutter.can_recompute(layer) for layer in range(2)] == [True, False]
    cutter.run_as(RunWay("whole", is_compiled=False, recomputes=True))
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    torch.compile(model[0], backend=backend, fullgraph=True)(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert [graph.count("tag_activation_checkpoint") > 0 for graph in graphs] == [True]


def test_two_neighbours_and_each_of_them_alone_are_measured_on_one_device():
    nn = measure_layers.nn
    cutter = measure_layers.Cutter.of(nn.Sequential(nn.Embedding(9, 4), *(nn.Linear(4, 4) for _ in range(4))))
    of, samples = samples_of(cutter)
    ways = [RunWay("whole", is_compiled=True), RunWay("graph", is_compiled=False)]
    tasks = [(way, number) for way in ways for number in range(len(samples))]
    shares = _shares(cutter, samples, of, tasks, 2)
    assert sorted(position for share in shares for position in share) == list(range(len(tasks)))
    ranks = {tasks[position]: rank for rank, share in enumerate(shares) for position in share}
    for way in ways:
        assert ranks[way, of[1]] == ranks[way, len(samples) - 1]
    assert ranks[ways[0], of[1]] != ranks[ways[1], of[1]]


def test_gradients_that_are_there_together_make_the_peak_of_a_longer_stage():
    """MiB of a Qwen3-MoE block as a graph, alone and two of them, on an H200; four of them took about 5,300 MiB."""
    one, two = LayerCost(kept=576, backward_peak=1513), LayerCost(kept=1151, backward_peak=2786)
    of, samples = [0, 0, 0, 0], [Sample(0, 1), Sample(0, 2)]
    *layers, each_stage = _of_layers(of, samples, {0: one, 1: two}, None)
    peak = _stage_of(range(4), layers, each_stage).cost.backward_peak
    assert peak == pytest.approx(1513 + 3 * (2786 - 1513), rel=0.001)


def test_memory_of_a_meta_layer_is_given_back_even_if_something_keeps_its_tensors():
    import torch

    with torch.device("meta"):
        layer = torch.nn.BatchNorm1d(4)
        tied = torch.nn.Sequential(layer, torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
        tied[2].weight = tied[1].weight
    before = tied[1].weight
    with with_memory([tied], torch.device("cpu")):
        kept = tied[1].weight
        assert tied[2].weight is kept
        tied(torch.randn(3, 4)).sum().backward()
        assert bool(kept.grad.isfinite().all())
    assert tied[1].weight is tied[2].weight is before
    assert all(value.is_meta for value in (*tied.parameters(), *tied.buffers()))
    assert (kept.grad, kept.untyped_storage().nbytes()) == (None, 0)
