"""What exists for scripts that were written for DeepSpeed and Megatron."""
