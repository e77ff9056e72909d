# 48 blocks on 2 pipeline ranks, one more on the first.
NPROC_PER_NODE=8 \
NNODES=2 \
megatron sft \
    --model Qwen/Qwen3-30B-A3B-Instruct-2507 \
    --tensor_model_parallel_size 4 \
    --sequence_parallel true \
    --pipeline_model_parallel_size 2 \
    --decoder_first_pipeline_num_layers 25 \
    --expert_model_parallel_size 4 \
    --micro_batch_size 1 \
    --global_batch_size 16 \
    --max_length 8192
