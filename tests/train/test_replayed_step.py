"""Arguments, gradients and losses of replayed steps; a capture that runs its work again replaces the CUDA graph."""

import copy

import pytest
import torch
from torch import nn

from pipeproof.exec.rank.torch.cuda_graph import CaptureStream
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.module_stage import StepData
from pipeproof.exec.train.torch.replayed_step import MOST_GRAPHS, ReplayedStep, Replays, require_replayable
from pipeproof.exec.train.torch.stage_values import MicroBatches
from pipeproof.exec.train.torch.step_loss import LossTerms, StepTerms

pytestmark = pytest.mark.needs_torch


class Trained:
    """A module with its steps, replayed or not, and the stream that captures; ``unused`` never receives a gradient."""

    def __init__(self, *, is_replayed, device="cpu"):
        torch.manual_seed(0)
        self.module = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)}).to(device)
        self.dropout = nn.Dropout(0.5)
        stream = self if device == "cpu" else CaptureStream(torch.device(device))
        self.replay = ReplayedStep(self.parameters, stream, {}) if is_replayed else None
        self.num_captured = 0

    def parameters(self):
        return dict(self.module.named_parameters())

    def captured(self, work):
        self.num_captured += 1
        return work

    def run(self, work):
        return work()

    def execute(self, values):
        ((x, factor),) = values
        terms = StepTerms()
        for index, part in enumerate(x.split(2)):
            loss = (factor * self.dropout(self.module["used"](part))).pow(2).sum()
            loss.backward()
            own = loss.detach()
            terms.add(index, LossTerms(own, own.double() + 1, {"twice": 2 * own}), "the loss")
        return StepData(terms=terms)

    def step(self, x, factor=2.0):
        values = ((x, factor),)
        return self.execute(values) if self.replay is None else self.replay.run(values, self.execute)


def batches(num, rows=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 3, generator=generator) for _ in range(num)]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("reset", ["to_none", "to_zero", "never", "replaced"])
def test_replayed_steps_give_the_losses_and_gradients_of_plain_ones(reset, device):
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    plain, replayed = (Trained(is_replayed=each, device=device) for each in (False, True))
    optimizers = [torch.optim.AdamW(each.module.parameters(), 0.1, weight_decay=0.5) for each in (plain, replayed)]
    kept = []
    for number, x in enumerate(batches(6)):
        results = []
        for trained in (plain, replayed):
            torch.manual_seed(number)  # both draw the same masks
            results.append(trained.step(x.to(device)))
        first, second = results
        kept.append((first.terms, second.terms))
        for a, b in zip(plain.module.parameters(), replayed.module.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad, b.grad)
        for trained, optimizer in zip((plain, replayed), optimizers, strict=True):
            optimizer.step()
            if reset == "replaced" and number == 3:
                for weight in trained.module["used"].parameters():
                    weight.grad = torch.ones_like(weight)
            elif reset != "never":
                optimizer.zero_grad(set_to_none=reset != "to_zero")
        for a, b in zip(plain.module.parameters(), replayed.module.parameters(), strict=True):
            assert torch.equal(a, b)
    assert replayed.replay.is_captured
    assert replayed.num_captured == (device == "cpu")
    for first, second in kept:  # of all steps: a later replay does not write to losses that the script holds
        assert first == second


def test_two_signatures_have_a_graph_each_and_their_gradients_in_common():
    plain, replayed = (Trained(is_replayed=False) for _ in range(2))
    replays = Replays(replayed.parameters, replayed)
    for x in [*batches(6), *batches(6, rows=6), *batches(2), *batches(2, rows=6)]:
        torch.manual_seed(len(x))
        plain.step(x)
        torch.manual_seed(len(x))
        replays.of((len(x),), {(4,), (6,)}).run(((x, 2.0),), replayed.execute)
        for a, b in zip(plain.module["used"].parameters(), replayed.module["used"].parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    assert replayed.num_captured == 2


def test_there_is_a_limit_of_graphs_and_forgotten_signatures_free_theirs():
    trained = Trained(is_replayed=False)
    replays = Replays(trained.parameters, trained)
    every = [(number,) for number in range(MOST_GRAPHS + 1)]
    assert all(replays.of(words, every) is not None for words in every[:-1])
    assert replays.of(every[-1], every) is None
    assert replays.of(every[-1], every[1:]) is not None


def captured():
    trained = Trained(is_replayed=True)
    for x in batches(3):
        trained.step(x)
    assert trained.replay.is_captured
    return trained


def test_the_arguments_of_the_script_are_not_written():
    trained, (x, _) = captured(), batches(2)
    before = x.clone()
    trained.step(x)
    trained.step(2 * x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (((torch.zeros(6, 3), 2.0),), r"argument 0 of this step is torch.float32\[6, 3\], not torch.float32\[4, 3\]"),
        (((torch.zeros(4, 3, dtype=torch.float64), 2.0),), r"argument 0 of this step is torch.float64"),
        (((torch.zeros(4, 3), 3.0),), "argument 1 of this step is 3.0, not 2.0"),
        (((torch.zeros(4, 3), 2.0, 1),), "another structure"),
    ],
)
def test_a_step_that_a_graph_cannot_repeat_is_refused(values, text):
    trained = captured()
    with pytest.raises(PipelineError, match=text):
        trained.replay.run(values, trained.execute)


@pytest.mark.parametrize("change", ["data", "assign"])
def test_another_parameter_and_one_with_other_memory_are_refused(change):
    trained = captured()
    if change == "data":
        trained.module["used"].weight.data = trained.module["used"].weight.data.clone()
    else:
        trained.module.load_state_dict(copy.deepcopy(trained.module.state_dict()), assign=True)
    with pytest.raises(PipelineError, match=r"parameter used\.weight is not the one of the captured step"):
        trained.step(batches(1)[0])


def test_a_step_that_cannot_be_captured_is_an_error_with_its_reason():
    trained = Trained(is_replayed=True)

    def captured(work):
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    trained.captured = captured
    first, second, third = batches(3)
    trained.step(first)
    trained.step(second)
    with pytest.raises(PipelineError, match=r"cannot be captured.*not permitted when stream is capturing"):
        trained.step(third)


def test_a_failed_capture_leaves_random_numbers_and_memory_as_before():
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    device = torch.device("cuda", 0)
    size = 2**28
    before = torch.cuda.memory_reserved(device)

    def work():
        x = torch.rand(size // 4, device=device)
        x.sum().item()

    with pytest.raises(RuntimeError):
        CaptureStream(device).captured(work)
    torch.manual_seed(1)
    first = torch.rand(4, device=device)
    kept = torch.empty(4 * size, dtype=torch.uint8, device=device)
    del kept
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) < before + size
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4, device=device), first)
    total = torch.zeros(1, device=device)
    replay = CaptureStream(device).captured(lambda: total.add_(torch.rand(4, device=device).sum()))
    torch.manual_seed(1)
    replay()
    assert torch.isclose(total[0], first.sum())


def test_a_gradient_that_comes_late_is_refused():
    trained = Trained(is_replayed=True)
    plain = trained.execute

    def captured(work):
        work()
        return work

    trained.captured = captured

    def other(values):
        trained.module["unused"](values[0][0]).sum().backward()
        return plain(values)

    first, second, third = batches(3)
    trained.step(first)
    trained.step(second)
    trained.execute = other
    with pytest.raises(PipelineError, match=r"the gradient of unused\.weight is not added up in place"):
        trained.step(third)


@pytest.mark.parametrize(
    ("device", "is_sharded", "reads", "text"),
    [
        ("cpu", False, False, "the modules are on cpu"),
        ("cuda", True, False, "fully_shard"),
        ("cuda", False, True, "check_finite=True"),
    ],
)
def test_what_cannot_be_replayed_is_refused_at_the_start(device, is_sharded, reads, text):
    with pytest.raises(PipelineError, match=f"replay=True: .*{text}.*use replay=False"):
        require_replayable(torch.device(device), is_sharded=is_sharded, reads=reads)


def test_a_replicated_pipeline_on_gpus_can_be_replayed():
    require_replayable(torch.device("cuda"), is_sharded=False, reads=False)


class Mask:
    """An object without rows of its own; all such objects have the same text."""

    def __repr__(self):
        return "Mask()"


def test_an_object_that_is_not_the_captured_one_is_refused():
    step, mask = Trained(is_replayed=True), Mask()
    step.execute = lambda values: StepData()
    for x in batches(4):
        step.replay.run(((x, mask),), step.execute)
    with pytest.raises(PipelineError, match="argument 1 of this step is a Mask"):
        step.replay.run(((x, Mask()),), step.execute)


def test_values_listed_by_micro_batch_are_copied_to_the_graph():
    step, seen = Trained(is_replayed=True), []

    def execute(values):
        seen[:] = list(values[0])
        return StepData()

    for x in batches(4):
        step.replay.run((MicroBatches(x.split(2)),), execute)
    assert torch.equal(torch.cat(seen), x)


def test_a_tensor_that_is_two_arguments_is_two_objects_in_each_step():
    step, seen = Trained(is_replayed=True), []

    def execute(values):
        seen.append(values)
        return StepData()

    for tokens in (torch.full((2,), number) for number in range(3)):
        step.replay.run((tokens, tokens), execute)
    step.replay.run((torch.full((2,), 3), torch.full((2,), 4)), execute)
    assert len(seen) == 4
    assert not any(tokens is target for tokens, target in seen)
    assert [values.tolist() for values in seen[-1]] == [[3, 3], [4, 4]]
