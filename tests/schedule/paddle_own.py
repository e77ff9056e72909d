"""The orders of Paddle's own schedulers, from the installed Paddle without processes, devices or a model.

Its classes are made without their constructors, which want a running fleet,
and given the inputs of their loops. Fleet's two forward-then-backward classes have no ``get_static_scheduler``: their
own loop runs, with the steps noted down and the transfers left out.
"""

import contextlib
import logging
from types import SimpleNamespace

STATIC = "PipelineParallelWithInterleave"


def fleet(class_name, num_ranks, num_micro_batches, num_chunks, *, best_unbalanced=False):
    """The static-scheduler text of each rank (``f0_vp0;b0_vp0;``), of a class of ``fleet/meta_parallel``."""
    from paddle.distributed.fleet.meta_parallel import pipeline_parallel

    texts = []
    with quiet():
        for rank in range(num_ranks):
            scheduler = object.__new__(getattr(pipeline_parallel, class_name))
            vars(scheduler).update(
                _read_by_its_loop(rank, num_ranks, num_micro_batches, num_chunks),
                _best_unbalanced_scheduler=best_unbalanced,
            )
            texts.append(scheduler.get_static_scheduler() if class_name == STATIC else _noted(scheduler))
    return texts


def semi_auto(num_ranks, num_micro_batches, num_chunks):
    """The operations of each rank of ``ScheduleVPP`` (``auto_parallel/pipelining``), without its idle slots."""
    from paddle.distributed.auto_parallel.pipelining.schedules import ScheduleVPP

    schedule = object.__new__(ScheduleVPP)
    num_rounds = max(1, num_micro_batches // num_ranks)
    vars(schedule).update(
        pp_group_size=num_ranks,
        n_local_stages=num_chunks,
        _n_microbatches=num_micro_batches,
        number_of_rounds=num_rounds,
        microbatches_per_round=num_micro_batches // num_rounds,
    )
    return [
        [repr(action) for action in schedule._calculate_single_rank_operations(rank) if action is not None]
        for rank in range(num_ranks)
    ]


def static_pass(name, num_ranks, num_micro_batches, num_chunks=1):
    """(job, micro-batch) in order, for each rank, of a pass of ``passes/pipeline_scheduler_pass``."""
    from paddle.distributed.passes.pass_base import new_pass

    programs = []
    for rank in range(num_ranks):
        made = new_pass(f"pipeline_scheduler_{name}")
        attributes = {"num_micro_batches": num_micro_batches, "pp_stage": rank, "pp_degree": num_ranks}
        for key, value in {**attributes, "vpp_degree": num_chunks}.items():
            made.set_attr(key, value)
        *jobs, last = made._create_job_list()
        assert last.type() == "optimizer"
        programs.append([(job.type(), job.micro_batch_id()) for job in jobs])
    return programs


@contextlib.contextmanager
def quiet():
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _read_by_its_loop(rank, num_ranks, num_micro_batches, num_chunks):
    def nothing(*_, **__):
        return None

    return {
        "stage_id": rank,
        "num_stages": num_ranks,
        "accumulate_steps": num_micro_batches,
        "num_model_chunks": num_chunks,
        "_real_pp_rank": rank,
        "_real_pp_world_size": num_ranks,
        "_virtual_pp_rank": 0,
        "_virtual_pp_world_size": num_chunks,
        "_forward_micro_step_counter": dict.fromkeys(range(num_chunks), 0),
        "_backward_micro_step_counter": dict.fromkeys(range(num_chunks), 0),
        "input_tensors": [[] for _ in range(num_chunks)],
        "output_tensor_grads": [[] for _ in range(num_chunks)],
        "training": True,
        "processed_steps": 1_000,
        "bubble_hooks": SimpleNamespace(run_hook=nothing),
        "_layers": SimpleNamespace(allreduce_shared_weight_gradients=nothing),
        "_p2p_helper": _NoTransfers(),
        "_using_cache": True,
        **dict.fromkeys(
            (
                "_profiling", "_overlap_p2p_comm", "_use_batch_p2p_comm", "_enable_timer", "_dynamic_shape",
                "_clear_every_step_cache", "_enable_offload_queue", "_comm_overlap", "_strategy",
            ),
            False,
        ),
        **dict.fromkeys(
            (
                "_reset_user_hooks_status", "_check_user_hooks_status_at_step_end", "_init_buffers", "_wrap_data",
                "_release_output", "_broadcast_final_loss", "timer_printer",
            ),
            nothing,
        ),
    }  # fmt: skip


class _NoTransfers:
    """Stands for the helper that sends and receives: a receive that is asked for gives a tensor."""

    def send_forward_recv_forward(self, output_tensor, recv_prev, **_):
        return "received" if recv_prev else None

    def send_backward_recv_backward(self, input_tensor_grad, recv_next, **_):
        return "received" if recv_next else None

    def _transfer(self, *_, **__):
        return "received"

    recv_forward = recv_backward = send_forward = send_backward = _transfer


def _noted(scheduler):
    """The text of a scheduler's loop; micro-batches of a chunk go by index, as in its queues."""
    steps = []

    def step(mark, *, forward):
        counter = scheduler._forward_micro_step_counter if forward else scheduler._backward_micro_step_counter

        def run(*arguments, **_):
            chunk = scheduler._get_virtual_pp_rank(arguments[-1], forward=forward)
            scheduler.set_virtual_pipeline_rank(chunk)
            steps.append(f"{mark}{counter[chunk]}_vp{chunk};")
            counter[chunk] += 1
            return "computed"

        return run

    scheduler._forward_step_helper = step("f", forward=True)
    scheduler._backward_step_helper = step("b", forward=False)
    scheduler.forward_backward_pipeline(data=None, scaler=None)
    return "".join(steps)
