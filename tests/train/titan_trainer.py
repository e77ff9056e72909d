"""torchtitan's own trainer on CPU processes over gloo; run under torchrun, one process a rank.

``python -m torch.distributed.run --nproc-per-node N -m tests.train.titan_trainer REQUEST.json`` writes a line of JSON
for each step of each rank to ``REQUEST.rank0``, ``REQUEST.rank1``, ...: the loss and the norm of the gradients as the
trainer logs them, and after the last step a checksum of the weights.

torchtitan 0.3.0 is not changed. Its trainer needs this around it on a CPU with PyTorch 2.13:

1. Its device is an accelerator: ``torchtitan.tools.utils`` gets the CPU's name and counters before other imports.
2. Its attention (flex, varlen) has no backward on a CPU: the configuration of the model has SDPA, which is causal.
3. Its trainer hands micro-batches that are already split to ``step(arg_mbs=...)``. Schedules of PyTorch 2.13 do not
   know these keywords (https://github.com/pytorch/pytorch/pull/188500): for PyTorch's schedules they are put together.
4. It calls ``torch.distributed.set_timeout``, which PyTorch 2.13 has under another name.
5. It has ``fully_shard`` divide gradients by a factor, for which gloo has no reduction: they are summed, then divided.
6. One module of kernels that no model here uses imports triton, which the CPU's PyTorch does not install.
7. No data set can be downloaded: tokens come from a formula, through the configuration's own parts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def use_cpu() -> None:
    """Make torchtitan's device the CPU; before any other module of it is imported."""
    from torchtitan.tools import utils

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        device_count=lambda: 1,
        set_device=lambda device: None,
        current_device=lambda: 0,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        synchronize=lambda: None,
    )


def leave_out_kernels() -> None:
    """Put an empty module in the place of the kernels of torchtitan's asynchronous expert parallelism."""
    kernels = ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__path__ = []
    kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
    sys.modules[kernels.__name__] = kernels


def name_set_timeout() -> None:
    """Give PyTorch 2.13 the name that torchtitan 0.3.0 calls."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = _set_pg_timeout


def sum_shards() -> None:
    """Reduce gradients of ``fully_shard`` by plain sums, which gloo has."""
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def divide_after_sum(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = divide_after_sum


def accept_split_micro_batches() -> None:
    """Give PyTorch's schedules the keywords that torchtitan 0.3.0 calls them with."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
        schedule.step = _with_split_micro_batches(schedule.step)


def _with_split_micro_batches(step: Any) -> Any:
    def whole(self: Any, *, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **keywords: Any) -> Any:
        args = [torch.cat(parts) for parts in zip(*arg_mbs or (), strict=True)]
        kwargs = {name: torch.cat([each[name] for each in kwarg_mbs]) for name in kwarg_mbs[0]}
        target = None if target_mbs is None else torch.cat(target_mbs)
        keywords.pop("target", None)  # None, from eval
        return step(self, *args, target=target, **kwargs, **keywords)

    return whole


def configuration(request: dict[str, Any]) -> Any:
    """torchtitan's configuration of a debug model, with what a request asks for."""
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.components.validate import Validator
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class Tokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Config, **keywords: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **keywords: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **keywords: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return 2048

    class Tokens(BaseDataLoader):
        """Sequences that count up from a random start, in steps of three."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            infinite: bool = True

        def __init__(
            self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **keywords: Any
        ) -> None:
            self._random = torch.Generator().manual_seed(1234 + dp_rank)
            self._shape = (local_batch_size, seq_len)

        def __iter__(self) -> Any:
            rows, length = self._shape
            positions = torch.arange(length).expand(rows, length)
            while True:
                start = torch.randint(2048, (rows, 1), generator=self._random)
                tokens = (start + 3 * torch.arange(length + 1)) % 2048
                yield (
                    {"input": tokens[:, :-1].contiguous(), "positions": positions.contiguous()},
                    tokens[:, 1:].contiguous(),
                )

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Losses(MetricsProcessor):
        @dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config):
            pass

        def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **more: Any) -> None:
            _write(step=step, loss=global_avg_loss, grad_norm=grad_norm)
            super().log(step, global_avg_loss, global_max_loss, grad_norm, **more)

        def log_validation(self, loss: float, step: int, **more: Any) -> None:
            _write(step=step, validation=loss)
            super().log_validation(loss, step, **more)

    name = request["model"]
    registry = import_module(f"torchtitan.models.{name}.config_registry")
    config = getattr(registry, request.get("config", f"{name}_debugmodel"))()
    spec = config.model_spec
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if request.get("pipeproof") is not None:
        from pipeproof.exec.train.torch.titan import pipelining

        spec.pipelining_fn = pipelining(**request["pipeproof"])
    config.metrics = Losses.Config(log_freq=1, disable_color_printing=True)
    config.tokenizer = Tokenizer.Config()
    config.dataloader = Tokens.Config()
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.validator = Validator.Config(
        enable=request.get("validate", False), freq=5, steps=2, dataloader=Tokens.Config()
    )
    config.training = replace(
        config.training, disable_cuda_graphs=True, mixed_precision_param="float32", **request["training"]
    )
    config.parallelism = replace(config.parallelism, **request["parallelism"])
    config.debug.seed = 7
    if "activation_checkpoint" in request:
        config.activation_checkpoint = None
    if request.get("loss") == "whole":
        config.loss = config.loss.loss_fn
    config.__post_init__()
    return config


def _write(**values: Any) -> None:
    rank = torch.distributed.get_rank()
    with Path(sys.argv[1]).with_suffix(f".rank{rank}").open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def main(path: str) -> None:
    """Train as torchtitan does, with what the request's file asks for."""
    request = json.loads(Path(path).read_text(encoding="utf-8"))
    use_cpu()
    leave_out_kernels()
    name_set_timeout()
    sum_shards()
    if request.get("pipeproof") is None:
        accept_split_micro_batches()
    from torchtitan.tools.logging import init_logger

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    init_logger()
    trainer = configuration(request).build()
    try:
        trainer.train()
        for number, part in enumerate(trainer.model_parts):
            weights = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in part.parameters()]
            _write(part=number, weights=sum(weight.double().abs().sum().item() for weight in weights))
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
