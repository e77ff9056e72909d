"""Importers for PaddlePaddle: Fleet strategies and the training files of its trainers."""
