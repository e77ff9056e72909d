"""Configurations of torchtitan in Python, as in its ``config_registry.py``: read by pipeproof, never run."""

from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def llama3_70b() -> Trainer.Config:
    """Return 80 blocks on 4 pipeline ranks with two stages each."""
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-70B",
        model_spec=model_registry("70B"),
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8192, max_context_length=8192),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=8,
            pipeline_parallel_degree=4,
            pipeline_parallel_schedule="Interleaved1F1B",
            num_pp_microbatches=16,
        ),
        activation_checkpoint=FullAC.Config(),
    )


def llama3_70b_single_stage() -> Trainer.Config:
    """Return the same with one stage on each rank, and too few micro-batches for it."""
    config = llama3_70b()
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.num_pp_microbatches = 2
    return config
