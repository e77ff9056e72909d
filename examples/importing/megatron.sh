#!/bin/bash
GPUS_PER_NODE=8
NNODES=${NNODES:-4}
PP=${PP:-4}

MODEL_ARGS=(
    --num-layers 13
    --hidden-size 512
    --num-attention-heads 8
    --seq-length 1024
    --vocab-size 32000
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights
)

PARALLEL_ARGS="--tensor-model-parallel-size 2 --sequence-parallel \
    --pipeline-model-parallel-size $PP \
    --pipeline-model-parallel-layout Et|(tt|)*6L"

torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
    ${MODEL_ARGS[@]} $PARALLEL_ARGS \
    --micro-batch-size 1 --global-batch-size $((NNODES * 8)) --bf16 --use-distributed-optimizer
