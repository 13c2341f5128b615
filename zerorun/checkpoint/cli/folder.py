"""``zerorun-checkpoint inspect`` for a folder without a manifest, such as an export, or one from transformers or PEFT."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...log import counted, listed
from ..manifest import MANIFEST
from ..tensorfile import TensorFile
from ..write_plan import ADAPTER
from .choose import OWN_FILES, in_bytes, survey

_ADAPTER_CONFIG, _MODEL_CONFIG = "adapter_config.json", "config.json"
_INDEX = "*.safetensors.index.json"
_MOST_BYTES = 256 << 20  # of a small file that is read


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files in ``directory``, and those of adapters in folders of their own."""
    return sorted(directory.glob("*.safetensors")) + sorted(directory.glob(f"*/{ADAPTER}.safetensors"))


def is_folder(directory: Path) -> bool:
    """True for a directory that is neither a checkpoint nor has any in it, but has tensor files."""
    if not directory.is_dir() or (directory / MANIFEST).is_file() or not tensor_files(directory):
        return False
    return not any(entry.manifest for entry in survey(directory))


def describe_folder(directory: Path) -> dict[str, Any]:
    """Everything that --json prints about the folder. Sizes are in bytes. Reads headers and configurations only."""
    problems: list[str] = []
    tensors = list(_tensors(directory, problems))
    held = {(entry["file"], entry["name"]) for entry in tensors}
    for path in sorted(directory.glob(_INDEX)):
        places = _json(path, problems).get("weight_map")
        if not isinstance(places, dict):
            problems.append(f"{path.name} is no index")
            continue
        wrong = [name for name, file in places.items() if (file, name) not in held]
        if wrong:
            problems.append(f"{path.name}: {listed(wrong, 1)} cannot be found in {places[wrong[0]]}")
    files = [path.relative_to(directory).as_posix() for path in tensor_files(directory)]
    kinds = Counter(entry["dtype"] for entry in tensors)
    return {
        "path": str(directory),
        "kind": _kind(directory, problems),
        "adapters": [_adapter(directory, path, problems) for path in _adapter_configs(directory)],
        "dtypes": dict(kinds),
        "bytes": sum(entry["bytes"] for entry in tensors),
        "files": {"names": files, "bytes": sum((directory / name).stat().st_size for name in files), "problems": problems},
        "tensors": tensors,
    }


def _tensors(directory: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    for path in tensor_files(directory):
        name = path.relative_to(directory).as_posix()
        try:
            with TensorFile(path) as file:
                for tensor in file.tensors.values():
                    shape = list(tensor.shape)
                    yield {"name": tensor.name, "shape": shape, "dtype": tensor.dtype, "bytes": tensor.nbytes, "file": name}
        except CheckpointError as error:
            problems.append(str(error).removeprefix(f"{directory}/"))


def _kind(directory: Path, problems: list[str]) -> str:
    """What the folder is, in words."""
    if any(next(directory.glob(own), None) for own in OWN_FILES):
        problems.append(f"{MANIFEST} is missing")
        return "files of a checkpoint that is not complete"
    if _adapter_configs(directory):
        return "adapters of PEFT: PeftModel.from_pretrained(the base model, this folder) opens them"
    if (directory / _MODEL_CONFIG).is_file():
        found = _json(directory / _MODEL_CONFIG, problems).get("architectures")
        name = found[0] if isinstance(found, list) and found else "a model that its config.json does not name"
        return f"the weights of {name}: from_pretrained() of transformers opens them"
    return "weights alone, without a configuration: zerorun.load_pretrained(model, this folder) reads them"


def _adapter_configs(directory: Path) -> list[Path]:
    return sorted(directory.glob(_ADAPTER_CONFIG)) + sorted(directory.glob(f"*/{_ADAPTER_CONFIG}"))


def _adapter(directory: Path, path: Path, problems: list[str]) -> dict[str, Any]:
    config = _json(path, problems)
    known = {key: config.get(key) for key in ("peft_type", "r", "lora_alpha", "base_model_name_or_path")}
    return {"name": path.parent.name if path.parent != directory else "default", **known}


def _json(path: Path, problems: list[str]) -> dict[str, Any]:
    """Read the JSON object in a small file. If there is none, add a problem and return an empty one."""
    try:
        found = json.loads(path.read_bytes()) if path.stat().st_size <= _MOST_BYTES else None
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.name} cannot be read")
        return {}
    return found


def head_of_folder(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what ``inspect`` prints about the folder above its tensors."""
    files = report["files"]
    yield "what it is", report["kind"]
    yield "manifest", f"none: it is no checkpoint, has no {MANIFEST}, and can be neither loaded into an engine nor verified"
    for adapter in report["adapters"]:
        of = f" of {adapter['base_model_name_or_path']}" if adapter["base_model_name_or_path"] else ""
        rank = f", r {adapter['r']}, alpha {adapter['lora_alpha']}" if adapter["r"] is not None else ""
        yield "adapter", f"{adapter['name']}: {adapter['peft_type']}{rank}{of}"
    dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in report["dtypes"].items())
    yield "tensors", f"{counted(len(report['tensors']), 'tensor')}, {in_bytes(report['bytes'])}: {dtypes or 'none'}"
    yield "files", f"{counted(len(files['names']), 'file')}, {in_bytes(files['bytes'])}"
