"""Activations between forward and backward: gradient checkpointing of blocks, and where the kept tensors are stored."""
