"""Importers of what PaddlePaddle's users have: Fleet strategies and the training files of its trainers."""
