"""Optimizers by the names of DeepSpeed's kernels: zerorun's updates in a single pass, on CPUs and GPUs alike."""

from __future__ import annotations

from typing import Any

from ..ops import single_pass
from ..optim.lamb import Lamb


def _refuse_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise ValueError("amsgrad is not supported by this optimizer. Remedy: torch.optim.AdamW(..., amsgrad=True).")


class FusedAdam(single_pass.Adam):
    """Adam, or AdamW with ``adam_w_mode``. Raises ValueError for ``amsgrad``, which DeepSpeed's does not support either."""

    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        how = {"decoupled_weight_decay": adam_w_mode, "bias_correction": bias_correction}
        super().__init__(params, lr, betas, eps, weight_decay, **how)


class DeepSpeedCPUAdam(single_pass.Adam):
    """Adam, or AdamW with ``adamw_mode``. States are fp32. Raises ValueError for ``amsgrad``."""

    elementwise = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        how = {"decoupled_weight_decay": adamw_mode, "bias_correction": bias_correction}
        super().__init__(model_params, lr, betas, eps, weight_decay, **how)


class DeepSpeedCPUAdagrad(single_pass.Adagrad):
    """Adagrad. States are fp32."""

    elementwise = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, weight_decay=weight_decay, eps=eps)


class FusedLamb(Lamb):
    """LAMB. Raises ValueError for ``amsgrad``, and for ``max_grad_norm``: clipping is the engine's."""

    by_sums = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        _refuse_amsgrad(amsgrad)
        if max_grad_norm:
            raise ValueError("max_grad_norm is not the optimizer's. Remedy: set gradient_clipping in the configuration.")
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, max_coeff, min_coeff)


class FusedLion(single_pass.Lion):
    """Lion. States are fp32."""

    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class DeepSpeedCPULion(single_pass.Lion):
    """Lion. States are fp32."""

    elementwise = True

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)
