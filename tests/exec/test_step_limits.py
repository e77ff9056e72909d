"""Limits of a step: its division by hand-written logs, the achieved rates, the largest loss, and the table."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.exec.measure.limits_report import LimitsReport, divided_step, planned_flops
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.idle_messages import product_peak
from pipeproof.exec.rank.op_log import HOST_QUEUE, Timing, op_ids_of
from pipeproof.specs.profile_file import Profile
from tests.features import FEATURES
from tests.plans import subject
from tests.profiles import COST, DIGEST, bare_of, logs_of

PARTS = ("computation", "messages", "collectives", "bubble", "launch_bound", "update")


def one_micro_batch():
    """A plan on two ranks whose step is: F, a message, F and B, a message, B."""
    return subject(cost=COST, schedule={"num_micro_batches": 1})


def tensor_parallel():
    return subject(cost=COST, topology={"pp": 2, "tp": 2}, schedule={"num_micro_batches": 1})


def profile_with(of, logs, timings=None, flops=None):
    return measured_profile(of, DIGEST, logs, bare_of(of), 1, timings or {}, flops)


def with_times(logs, times):
    """One step's logs with other microseconds of operations: start and end, or posted, start and end."""
    known = set()

    def changed(rank, entry):
        if (rank, entry.op) not in times:
            return entry
        known.add((rank, entry.op))
        *posted, start, end = (1000 * us for us in times[rank, entry.op])
        return replace(entry, posted_ns=posted[0] if posted else start, start_ns=start, end_ns=end)

    result = {rank: [changed(rank, entry) for entry in entries] for rank, entries in logs.items()}
    assert known == set(times)
    return result


def parts_of(profile, rank):
    """Microseconds of a rank by part, over all its stages."""
    own = [each for each in profile.limits.stages if each.rank == rank]
    return {part: sum(getattr(each, f"{part}_us") for each in own) for part in PARTS}


def figures(**parts):
    return pytest.approx({**dict.fromkeys(PARTS, 0), **parts})


# --- the division ---


def test_a_step_is_computation_bubble_and_messages():
    of = one_micro_batch()
    profile = profile_with(of, logs_of(of, num_steps=1))
    assert profile.limits.step_us == 110 + 7 + 130 + 190 + 7 + 210
    assert parts_of(profile, 0) == figures(computation=320, messages=7, bubble=7 + 130 + 190)
    assert parts_of(profile, 1) == figures(computation=320, messages=14, bubble=110 + 210)


def test_a_host_that_is_late_after_a_wait_or_between_operations_is_launch_bound():
    of = one_micro_batch()
    times = {(1, "WAIT(1RECV_F0)"): (0, 127), (1, "1F0"): (130, 247)}  # the message was there at 117
    profile = profile_with(of, with_times(logs_of(of, num_steps=1), times))
    assert parts_of(profile, 1) == figures(computation=117 + 190, messages=14, bubble=320, launch_bound=10 + 3)


def test_a_late_host_before_a_wait_is_bubble_as_long_as_the_message_is_not_posted():
    of = one_micro_batch()
    profile = profile_with(of, with_times(logs_of(of, num_steps=1), {(1, "WAIT(1RECV_F0)"): (115, 117)}))
    assert parts_of(profile, 1) == figures(computation=320, messages=2 + 7, bubble=320, launch_bound=5)


def test_a_message_that_came_before_the_wait_costs_nothing():
    of = one_micro_batch()
    times = {(0, "0RECV_B0"): (110, 110, 112), (1, "1SEND_B0"): (105, 105, 112), (0, "WAIT(0RECV_B0)"): (113, 113)}
    profile = profile_with(of, with_times(logs_of(of, num_steps=1), times))
    assert parts_of(profile, 0) == figures(computation=320, launch_bound=444 - 110)


def test_a_buffered_send_is_done_before_its_receiver_is_ready():
    of = one_micro_batch()
    times = {
        (1, "1SEND_B0"): (437, 437, 441), (1, "WAIT(1SEND_B0)"): (437, 444), (0, "0RECV_B0"): (443, 443, 444),
    }  # fmt: skip
    profile = profile_with(of, with_times(logs_of(of, num_steps=1), times))
    assert parts_of(profile, 1) == figures(computation=320, messages=7, bubble=110 + 4 + 210, launch_bound=3)


def test_the_time_before_the_first_computation_belongs_to_no_step():
    of = one_micro_batch()
    early = {(1, "WAIT(1RECV_F0)"): (-5000, 117), (1, "1RECV_F0"): (-5000, -5000, 117)}
    late = profile_with(of, with_times(logs_of(of, num_steps=1), early))
    assert late.limits.step_us == 654
    assert parts_of(late, 1) == figures(computation=320, messages=14, bubble=320)


def test_a_collective_is_bubble_until_its_last_member_comes():
    of = tensor_parallel()
    logs = logs_of(of, num_steps=1)
    children = {(rank, f"0F0/{i}.ALL_REDUCE:tp"): (0, 0) for rank in (0, 1) for i in range(5)}
    assert {entry.op for entry in logs[0] if entry.op.startswith("0F0/")} == {op for _, op in children}
    children |= {(0, "0F0/4.ALL_REDUCE:tp"): (40, 70), (1, "0F0/4.ALL_REDUCE:tp"): (60, 70)}
    profile = profile_with(of, with_times(logs, children))
    first, second = parts_of(profile, 0), parts_of(profile, 1)
    assert (first["collectives"], second["collectives"]) == (10, 10)
    assert first["bubble"] - second["bubble"] == 20
    assert second["computation"] - first["computation"] == 20


def test_the_optimizer_and_reductions_are_the_update_without_their_collectives():
    of = subject(cost={"forward_us": 100, "backward_us": 200}, topology={"pp": 1, "dp": 2})
    logs = logs_of(of, num_steps=1)
    end = max(entry.end_ns for entry in logs[0]) // 1000
    reduction = next(entry.op for entry in logs[0] if "REDUCE_GRAD" in entry.op and "/" not in entry.op)
    inside = [entry.op for entry in logs[0] if entry.op.startswith(f"{reduction}/")]
    times = {(rank, op): (end + 5, end + 5) for rank in (0, 1) for op in inside[1:]}
    for rank in (0, 1):
        times |= {
            (rank, reduction): (end, end + 20), (rank, inside[0]): (end + 1, end + 5),
            (rank, "0STEP"): (end + 20, end + 50),
        }  # fmt: skip
    parts = parts_of(profile_with(of, with_times(logs, times)), 0)
    assert (parts["update"], parts["collectives"], parts["launch_bound"]) == (1 + 15 + 30, 4, 0)


def test_means_are_over_all_steps_but_the_first():
    of = one_micro_batch()
    logs = logs_of(of, num_steps=3)
    for index, entry in enumerate(logs[1]):
        if entry.op == "1STEP":  # the last operation of each step
            logs[1][index] = replace(entry, end_ns=entry.end_ns + (10**8 if entry.step == 0 else 600_000 * entry.step))
    limits = profile_with(of, logs).limits
    assert limits.step_us == pytest.approx((444 + 600 + 444 + 1200) / 2)
    assert sum(parts_of(profile_with(of, logs), 0).values()) == pytest.approx(limits.step_us)


PLANS = (
    subject(cost=COST),
    subject(cost=COST, topology={"pp": 2, "tp": 2}, transport="partial"),
    subject(cost={"forward_us": 100, "backward_us": 200}, schedule={"kind": "interleaved", "num_chunks": 2}),
    subject(cost={"forward_us": 100, "backward_us": 200}, topology={"pp": 1, "dp": 2}, run={"clip_norm": 1.0}),
)


@given(st.sampled_from(PLANS), st.randoms(use_true_random=False), st.integers(1, 2000))
def test_parts_of_any_log_add_up_to_the_step_on_every_rank(of, random, longest):
    entries, hosts = {}, []
    for rank, log in logs_of(of, num_steps=1).items():
        now, ids = random.randrange(longest), op_ids_of(of.graph, rank, log)
        for op_id, entry in zip(ids, log, strict=True):
            start = (
                now + random.randrange(-longest // 4, longest)
                if entry.queue == HOST_QUEUE
                else random.randrange(longest)
            )
            end = now = start + 1 + random.randrange(longest)
            entries[op_id] = replace(entry, start_ns=start, end_ns=end, posted_ns=start - random.randrange(longest))
        hosts.append([i for i, entry in zip(ids, log, strict=True) if entry.queue == HOST_QUEUE])
    step = divided_step(of.graph, entries, hosts)
    assert len(step.ranks) == of.graph.num_ranks
    assert step.length_ns > 0
    for parts in step.ranks:
        assert sum(parts.values()) == step.length_ns
        assert all(time > 0 for time in parts.values())


# --- rates and losses ---


def test_flops_are_those_of_products_and_causal_attention():
    of = one_micro_batch()
    tokens, hidden, ffn, vocabulary, rows, length = 16, 16, 32, 32, 2, 8
    products = 2 * tokens * hidden * (4 * hidden + 3 * ffn)
    scores = 2 * rows * length * (length + 1) // 2 * hidden
    block = 3 * products + 2 * scores + 5 * scores  # flash attention computes the scores again
    first, second = profile_with(of, logs_of(of, num_steps=1)).limits.stages
    assert first.flops == 2 * block
    assert second.flops == 2 * block + 3 * 2 * tokens * hidden * vocabulary
    assert first.tflops == pytest.approx(first.flops / 320e-6 / 1e12)
    assert first.share_of_peak is None


def test_split_backwards_and_tensor_parallel_ranks_have_the_same_flops_in_all():
    whole = profile_with(one_micro_batch(), logs_of(one_micro_batch(), num_steps=1)).limits.stages
    of = subject(cost=COST, schedule={"kind": "zb_h1", "num_micro_batches": 2})
    split = profile_with(of, logs_of(of, num_steps=1)).limits.stages
    assert [each.flops for each in split] == [2 * each.flops for each in whole]
    halves = profile_with(tensor_parallel(), logs_of(tensor_parallel(), num_steps=1)).limits.stages
    assert [each.flops for each in halves] == [whole[each.stage].flops / 2 for each in halves]


@pytest.mark.parametrize("name", [name for name, sections in FEATURES.items() if "model" in sections])
def test_every_model_has_flops_on_every_stage(name):
    flops = planned_flops(subject(**FEATURES[name]))
    assert set(flops) == {(0, 0), (1, 1)}
    assert min(flops.values()) > 0


def test_micro_batches_of_other_lengths_have_other_flops():
    longest = planned_flops(subject())
    mixed, shorter = (planned_flops(subject(schedule={"seq_lengths": sizes})) for sizes in ([8, 4, 8, 4], [4, 4, 4, 4]))
    assert {key: 2 * number for key, number in mixed.items()} == {key: longest[key] + shorter[key] for key in mixed}


def peaks_of(*peaks):
    return {rank: Timing(peak_flops=peak, peak_dtype="float32") for rank, peak in enumerate(peaks)}


def test_the_share_of_the_peak_is_that_of_the_rank_s_device():
    of = one_micro_batch()
    limits = profile_with(of, logs_of(of, num_steps=1), peaks_of(8e9, 4e9)).limits
    rates = [each.flops / 320e-6 for each in limits.stages]
    assert [each.share_of_peak for each in limits.stages] == pytest.approx([rates[0] / 8e9, rates[1] / 4e9])
    assert [(peak.rank, peak.dtype, peak.tflops) for peak in limits.peaks] == [
        (0, "float32", 0.008), (1, "float32", 0.004),
    ]  # fmt: skip


def test_counted_flops_replace_those_of_the_plan_and_unknown_ones_are_none():
    of = one_micro_batch()
    first, second = profile_with(of, logs_of(of, num_steps=1), flops={(0, 0): 640, (1, 1): 0}).limits.stages
    assert (first.flops, first.tflops) == (640, pytest.approx(2e-6))
    assert (second.flops, second.tflops, second.share_of_peak) == (None, None, None)


@pytest.mark.parametrize(
    ("times", "peaks", "cause", "rank", "us"),
    [
        ({}, (), "bubble", 1, 320),
        ({}, (1e8, 1e10), "bubble", 1, 320),
        ({(0, "0B0"): (444, 2000), (0, "0STEP"): (2000, 2000)}, (), "imbalance", 0, (110 + 1556 - 320) / 2),
        ({(0, "0STEP"): (654, 1654)}, (), "update", 0, 1000),
        ({(0, "0B0"): (1444, 1654), (0, "0STEP"): (1654, 1654)}, (), "launch_bound", 0, 1000),
        (
            {
                (0, "0RECV_B0"): (110, 110, 1400), (0, "WAIT(0RECV_B0)"): (110, 1400),
                (0, "WAIT(0SEND_F0)"): (1400, 1400), (0, "0B0"): (1400, 1610), (0, "0STEP"): (1610, 1610),
            },
            (), "messages", 0, 1400 - 437,
        ),
    ],
)  # fmt: skip
def test_the_largest_loss_is_that_of_the_rank_with_the_shortest_bubble(times, peaks, cause, rank, us):
    of = one_micro_batch()
    loss = profile_with(of, with_times(logs_of(of, num_steps=1), times), peaks_of(*peaks)).limits.largest_loss
    assert (loss.cause, loss.rank) == (cause, rank)
    assert loss.us == pytest.approx(us)


def test_computation_far_below_the_peak_is_the_largest_loss():
    of = subject(cost={"forward_us": 100, "backward_us": 200}, topology={"pp": 1})
    limits = profile_with(of, logs_of(of, num_steps=1), peaks_of(1e12)).limits
    (stage,) = limits.stages
    assert limits.largest_loss.cause == "below_peak"
    assert limits.largest_loss.us == pytest.approx(stage.computation_us * (1 - stage.share_of_peak))


# --- text ---


def test_the_table_has_a_row_for_each_pipeline_rank_and_stage():
    of = one_micro_batch()
    text = str(LimitsReport(profile_with(of, logs_of(of, num_steps=1), peaks_of(8e9, 4e9))))
    *lines, loss = text.splitlines()
    assert lines == [
        "step of 654 us, mean of 1, in % of it:",
        "pp  stage  computation  bubble  exposed communication  launch-bound  update  GFLOP/s  of peak",
        " 0      0         48.9    50.0                    1.1           0.0     0.0     1.64     20 %",
        " 1      1         48.9    48.9                    2.1           0.0     0.0     1.79     45 %",
        "measured peak of products: 4 to 8 GFLOP/s in float32",
    ]
    assert loss == (
        "largest loss on the slowest rank (1): 48.9 %, bubble: it waits for other ranks; use more than 1 "
        "micro-batches, or another schedule than 1f1b: `pipeproof tune` with this profile compares them"
    )


def test_replicas_share_a_row_and_stages_of_one_rank_have_their_own():
    of = tensor_parallel()
    lines = str(LimitsReport(profile_with(of, logs_of(of, num_steps=1)))).splitlines()
    assert [line.split()[:2] for line in lines[2:4]] == [["0", "0"], ["1", "1"]]
    of = PLANS[2]
    lines = str(LimitsReport(profile_with(of, logs_of(of, num_steps=1)))).splitlines()
    assert [line.split()[:2] for line in lines[2:6]] == [["0", "0"], ["0", "2"], ["1", "1"], ["1", "3"]]
    shares = [[float(cell) for cell in line.split()[2:7]] for line in lines[2:6]]
    assert sum(shares[0] + shares[1]) == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize(
    ("cause", "changes", "remedy"),
    [
        ("messages", {}, "transport.recv_order"),
        ("collectives", {}, "smaller tp, cp, ep or dp groups"),
        ("launch_bound", {}, "larger micro-batches"),
        ("launch_bound", {"device": "gpu", "backend": "torch"}, "`run.replay: true`"),
        ("launch_bound", {"device": "gpu", "backend": "torch", "model": {"kind": "layers"}}, "as a CUDA graph"),
        ("update", {}, "more micro-batches for each update"),
        ("imbalance", {}, "move layers to other stages"),
        ("below_peak", {}, "use larger products (a larger micro-batch)"),
        ("below_peak", {"backend": "torch", "model": {"kind": "layers"}}, "`torch.compile`"),
    ],
)
def test_each_loss_has_a_remedy(cause, changes, remedy):
    of = one_micro_batch()
    content = profile_with(of, logs_of(of, num_steps=1)).to_json()
    content["limits"]["largest_loss"]["cause"] = cause
    content["plan"] |= changes
    assert remedy in str(LimitsReport(Profile.model_validate(content))).splitlines()[-1]


def test_unknown_flops_are_reported():
    of = one_micro_batch()
    text = str(LimitsReport(profile_with(of, logs_of(of, num_steps=1), flops={})))
    assert "FLOPs are not known" in text
    assert text.splitlines()[2].split()[-2:] == ["-", "-"]


def test_a_profile_from_before_steps_were_divided_is_read():
    of = one_micro_batch()
    content = profile_with(of, logs_of(of, num_steps=1)).to_json()
    del content["limits"]
    old = Profile.model_validate(content)
    assert old.limits is None
    with pytest.raises(ValueError, match="measure again"):
        str(LimitsReport(old))


# --- the peak ---


@pytest.mark.needs_torch
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_peak_is_that_of_products_of_the_type(dtype, monkeypatch):
    import torch

    from pipeproof.exec.rank.torch.arrays import TorchArrays

    products = []
    product = torch.Tensor.__matmul__

    def counted(left, right):
        products.append((left.dtype, tuple(left.shape)))
        assert left.isfinite().all()
        assert left.abs().max() <= 1
        assert left.abs().sum() > 0
        return product(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    monkeypatch.setattr("pipeproof.exec.rank.idle_messages._LARGEST_SIZE", 256)
    monkeypatch.setattr("pipeproof.exec.rank.idle_messages._REPEATS_S", 0.01)
    assert product_peak(TorchArrays(torch.device("cpu")), dtype) > 0
    assert {kind for kind, _ in products} == {getattr(torch, dtype)}
    assert products[0][1] == (128, 128)
    assert {shape for _, shape in products} <= {(128, 128), (256, 256)}


# --- real runs ---
