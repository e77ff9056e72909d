"""A script's own Paddle layers, or Fleet's `PipelineLayer`, trained by a checked plan in the script's own processes."""
