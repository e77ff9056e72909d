"""Fleet's own pipeline next to pipeproof's: ``PipelineLayer`` and ``train_batch``, unchanged, on the CPU."""
