"""Interfaces for scripts that were written for DeepSpeed and Megatron."""
