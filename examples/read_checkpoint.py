"""Read a checkpoint of zerorun without zerorun: the format, written down as a program.

    python examples/read_checkpoint.py CHECKPOINT

A checkpoint is a directory. zerorun.json, the manifest, says everything but the tensors. They stand whole, under the names
of module.state_dict(), in sets of safetensors files: "model" has weights and buffers, "master" the fp32 weights that the
optimizer updates, where the model's have another dtype, "optimizer.exp_avg" and so on the optimizer's state. The set
"state" has what is no parameter's: values {"$": "tensor", "name": NAME} in the manifest stand for its tensors.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor


def read(path: str | Path) -> dict[str, Any]:
    """The manifest's content, and under "tensors" set -> name -> tensor. Raises ValueError if a file is not as written."""
    manifest = json.loads((Path(path) / "zerorun.json").read_bytes())
    content = manifest["content"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    if zlib.crc32(canonical.encode()) != int(manifest["crc32"], 16) or content["schema"] != 1:
        raise ValueError("zerorun.json is damaged, or of a schema that this program does not know")
    for name, record in content["files"].items():
        check(Path(path) / name, record["bytes"], record["crc32"], content["block_bytes"])
    content["tensors"] = {kind: read_set(Path(path), kind, files) for kind, files in content["sets"].items()}
    for alias, name in content["aliases"].items():  # tied weights are stored once
        if name in content["tensors"]["model"]:
            content["tensors"]["model"][alias] = content["tensors"]["model"][name]
    return content


def check(path: Path, nbytes: int, crcs: str, block_bytes: int) -> None:
    """The manifest has a CRC-32 in 8 hexadecimal digits for each block of a file; the last block may be shorter."""
    with path.open("rb") as file:
        found = "".join(f"{zlib.crc32(block):08x}" for block in iter(lambda: file.read(block_bytes), b""))
    if (path.stat().st_size, found) != (nbytes, crcs):
        raise ValueError(f"{path} is not what was written")


def read_set(path: Path, kind: str, files: list[str]) -> dict[str, Tensor]:
    """All tensors of one set. An index, as Hugging Face's, says which file holds which; only "state" needs none."""
    stored = {file: load_file(path / file) for file in files}
    if kind == "state":
        return {name: tensor for tensors in stored.values() for name, tensor in tensors.items()}
    index = json.loads((path / f"{kind}.safetensors.index.json").read_bytes())
    return {name: stored[file][name] for name, file in index["weight_map"].items()}


if __name__ == "__main__":
    checkpoint = read(sys.argv[1])
    print(f"{checkpoint['tag']}, saved {checkpoint['saved_at']}: {checkpoint['counters']}")
    for kind, tensors in checkpoint["tensors"].items():
        print(f"{kind}: {len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values())} elements")
    for key, entries in (checkpoint["optimizer"] or {"scalars": {}})["scalars"].items():  # those alike are stored once
        print(f"optimizer.{key}: {[(entry['value'], len(entry['names'])) for entry in entries]} as (value, parameters)")
