"""Fleet's own pipeline beside ours: ``PipelineLayer`` and ``train_batch``, unchanged, on the CPU."""
