"""Interfaces for scripts that were written for DeepSpeed and Megatron, and the mode in which zerorun stands for DeepSpeed."""

from __future__ import annotations

from .activation import ActivationError, activate, is_active

__all__ = ["ActivationError", "activate", "is_active"]
