"""Checkpoints: whole, named tensors in safetensors files, and one JSON file that says everything else."""
