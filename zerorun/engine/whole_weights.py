"""Whole weights in the way in which DeepSpeed's clients ask for them: gathered on rank 0, or in a file of torch.save."""

from __future__ import annotations

from pathlib import Path

import torch

from ..log import warn_once
from ..watch.board import Phase, during
from ..zero.access import full_state_dict
from .offloading import Offloading
from .saving import Saving


class WholeWeights(Saving, Offloading):
    """The part of an engine that gathers the whole model on one rank."""

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """The setting ``zero_optimization.stage3_gather_16bit_weights_on_model_save``."""
        return bool(self.config.zero_optimization.gather_16bit_weights_on_model_save)

    @during(Phase.WHOLE_WEIGHTS)
    def consolidated_state_dict(self, *, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Return the full weights in CPU memory on rank 0, and None on other ranks, which keep nothing.

        All ranks must call it. The tensors have the dtype that the model computes in. ``exclude_frozen_parameters``: leave
        out parameters that require no gradient; buffers stay. ``state_dict()`` returns the weights on every rank instead.
        """
        is_first = self.topology.rank == 0
        found = self.state_dict() if self.topology.pipe > 1 else full_state_dict(self.sharded_model, keep=is_first)
        if not is_first:
            return None
        if exclude_frozen_parameters:
            frozen = {
                name for name, param in self.module.named_parameters(remove_duplicate=False) if not param.requires_grad
            }
            return {name: value for name, value in found.items() if name not in frozen}
        return found

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """``consolidated_state_dict`` by the name that trainers use."""
        return self.consolidated_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the full weights into ``save_dir``, by torch.save on rank 0, and return True. All ranks must call it.

        At stage 3 without ``stage3_gather_16bit_weights_on_model_save``, as in DeepSpeed, nothing is written: a warning
        says so, and the result is False. ``export`` writes safetensors by parts, without all weights on one rank.
        """
        if self.zero_optimization_stage() == 3 and not self.zero_gather_16bit_weights_on_model_save():
            warn_once(
                "save_16bit_model() wrote nothing: zero_optimization.stage3_gather_16bit_weights_on_model_save is false. "
                "Remedy: set it to true, or call engine.export(dir)."
            )
            return False
        found = self.consolidated_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        if found is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(found, Path(save_dir, save_filename))
        self.sharded_model.comm.control.values(None)  # nobody reads the file before it is there
        return True

    save_fp16_model = save_16bit_model
