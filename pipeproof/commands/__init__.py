"""What the commands do, one file each; ``pipeproof.cli`` has those that need few lines."""
