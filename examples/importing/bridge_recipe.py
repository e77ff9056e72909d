"""Recipes in the manner of Megatron-Bridge, as `pipeproof check --from megatron-bridge` reads them: never run."""

from megatron.bridge import AutoBridge
from megatron.bridge.training.config import ConfigContainer, DistributedDataParallelConfig, TrainingConfig


def small_pretrain_16gpu_config() -> ConfigContainer:
    """Pretraining of a model of 36 blocks on 16 GPUs."""
    cfg = ConfigContainer(
        model=AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider(load_weights=False),
        train=TrainingConfig(global_batch_size=64, micro_batch_size=1),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True),
    )
    cfg.model.seq_length = 4096
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.sequence_parallel = True
    return cfg


def small_interleaved_16gpu_config() -> ConfigContainer:
    """The same model with three stages on each pipeline rank."""
    cfg = small_pretrain_16gpu_config()
    cfg.model.virtual_pipeline_model_parallel_size = 3
    return cfg
