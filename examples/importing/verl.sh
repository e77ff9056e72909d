#!/bin/bash
# 64 blocks on 4 pipeline ranks with two chunks each.
NNODES=${NNODES:-4}
train_pp=4

python3 -m verl.trainer.main_ppo \
    --config-name=ppo_megatron_trainer.yaml \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-32B-Instruct \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${train_pp} \
    actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=2 \
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=${train_pp} \
    trainer.nnodes="${NNODES}" \
    trainer.n_gpus_per_node=8
