"""``deepspeed.utils.zero_to_fp32``: full fp32 weights from a checkpoint of zerorun, in one process without a GPU.

``main`` is the script of this name, which a save leaves beside the checkpoints (engine_names.py).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from ..checkpoint.cli import export
from ..checkpoint.cli.choose import locate, open_reader
from ..checkpoint.files import replace_file
from ..checkpoint.ranks import attempt
from ..checkpoint.write_plan import MODEL
from ..errors import CheckpointError
from ..log import listed, logger


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, torch.Tensor]:
    """Return name -> tensor on the CPU: fp32 masters where the checkpoint has them, else the weights cast to fp32.

    Names of one tied parameter lead to one tensor.
    ``tag``: by default that of the newest checkpoint. ``lazy_mode`` has no effect: tensors are read one by one anyway.
    Raises CheckpointError if there is no whole checkpoint. For one of DeepSpeed the error says how to import it.
    """
    directory = Path(checkpoint_dir)
    try:
        path = locate(directory, tag)
    except CheckpointError as error:
        if any(directory.glob("*/*_states.pt")) or any(directory.glob("*_states.pt")):
            remedy = f"it is one of DeepSpeed. Remedy: zerorun-checkpoint import-deepspeed {directory} OUT, and read OUT."
            raise CheckpointError(f"{error} But {remedy}") from None
        raise
    found: dict[str, torch.Tensor] = {}
    with open_reader(path) as reader:
        weights = export.Weights(reader, torch.float32)
        parameters = reader.manifest.parameters if reader.manifest is not None else {}
        for name in reader.places(MODEL):
            if exclude_frozen_parameters and name in parameters and not parameters[name].get("trainable", True):
                continue
            stream = weights.stream(name)
            parts = list(stream.stretches())
            found[name] = torch.cat(parts).view(stream.tensor.shape) if parts else torch.empty(stream.tensor.shape)
        left_out = sorted((reader.manifest.frozen_base if reader.manifest is not None else None) or {})
        if left_out and not exclude_frozen_parameters:
            what = "%s was saved with exclude_frozen_parameters, so that these weights are not among those returned: %s."
            logger.warning(what, path, listed(list(map(repr, left_out))))
        aliases = reader.manifest.aliases if reader.manifest is not None else {}
    return found | {alias: found[name] for alias, name in aliases.items() if name in found}


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None) -> nn.Module:
    """Load the fp32 weights of a checkpoint into ``model``, on the CPU, and return it."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint into ``output_dir``, in files of at most ``max_shard_size`` bytes (or "5GB").

    They are pytorch_model.bin or, with ``safe_serialization``, model.safetensors; several come with an index, as
    transformers reads it. Raises CheckpointError as ``get_fp32_state_dict_from_zero_checkpoint`` does, if files cannot be
    written, and if huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import split_torch_state_dict_into_shards  # comes with transformers, which reads the result
    except ModuleNotFoundError:
        raise CheckpointError(
            "huggingface_hub, which divides weights into files, is not installed. Remedy: pip install huggingface_hub; or "
            f"zerorun-checkpoint export {checkpoint_dir}, which needs nothing."
        ) from None
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    if safe_serialization:  # a file of safetensors has a tied parameter once
        first = {id(tensor): name for name, tensor in reversed(state.items())}
        state = {name: tensor for name, tensor in state.items() if first[id(tensor)] == name}
    name = "model{suffix}.safetensors" if safe_serialization else "pytorch_model{suffix}.bin"
    limit = max_shard_size if max_shard_size is not None else sum(tensor.nbytes for tensor in state.values()) + 1
    split = split_torch_state_dict_into_shards(state, filename_pattern=name, max_shard_size=limit)
    out = Path(output_dir)

    def write() -> None:
        out.mkdir(parents=True, exist_ok=True)
        for file, names in split.filename_to_tensors.items():
            _write({name: state[name] for name in names}, out / file, safe=safe_serialization)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (out / f"{name.format(suffix='')}.index.json").write_text(json.dumps(index, indent=2))

    problem = attempt(write)[1]
    if problem is not None:
        raise problem.error()


def _write(weights: dict[str, torch.Tensor], path: Path, *, safe: bool) -> None:
    """Several ranks may call this, and none may read half a file."""
    if not safe:
        replace_file(path, partial(torch.save, weights))
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(weights, unfinished, metadata={"format": "pt"})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script with DeepSpeed's ``arguments``, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Write the fp32 weights of a checkpoint of zerorun."
    )
    parser.add_argument("checkpoint_dir", help="the folder with the checkpoints, or one of them")
    parser.add_argument("output_dir", help="the folder for the weights, which is made")
    parser.add_argument(
        "--max_shard_size", type=_size, default="5GB", help="of a file, such as 5GB; bytes if it is a number"
    )
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="of the checkpoint; by default the newest is taken")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="changes nothing")
    given = vars(parser.parse_args(arguments))
    del given["debug"]
    try:
        convert_zero_checkpoint_to_fp32_state_dict(**given)
    except CheckpointError as error:
        print(f"zero_to_fp32.py: error: {error}", file=sys.stderr)
        return 1
    return 0


def _size(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
