"""Adapters: which tensors of a model PEFT would write into which file, under which names, and what else it writes.

[Note: asking PEFT]
PEFT itself decides, adapter by adapter, which tensors go into ``adapter_model.safetensors``, and under which names: it
drops the names of adapters, renames DoRA's vectors, adds modules that are trained in full, embeddings that were resized,
and so on. So PEFT is asked. Its own ``save_pretrained`` is given a state dict with numbers in place of tensors, and writes
the adapters into a temporary folder. The numbers in its files tell which tensor is which. No rank needs a tensor for that.
Some methods compute what they write from values (prompts; AdaLoRA, which drops LoRA ranks that it does not need any more).
For those the trainable parameters are gathered, and PEFT is asked again with their values.

[Note: adapters.json]
A checkpoint of a model with adapters has this file, with PEFT's answer, beside its manifest. It is an object of three:

    files       path -> text of adapter_config.json, and of whatever else PEFT writes that is not a tensor file
    names       tensor file without .safetensors -> name of a tensor in it -> name in the checkpoint
    computed    tensor files whose content PEFT computes: these are not in names
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..plan.units import stored_name
from ..zero.gathered_parameters import GatheredParameters
from .inventory import Inventory, TensorPart
from .ranks import Ranks, attempt, leads_stage
from .read import Reader
from .tensorfile import TensorFile, dtype_of
from .write_plan import ADAPTER, CAST

ADAPTERS_FILE = "adapters.json"  # in a checkpoint
_PREFIX = "base_model.model."  # of names in PEFT's files; a model without PEFT's wrapper has none, so it is added


@dataclass
class Adapters:
    """The adapters of a model as PEFT writes them. ``files``: path -> content of all but the tensors.

    ``names``: set of the file -> name in it -> the model's name. ``computed``: set -> name in it -> a tensor that PEFT has
    computed; or set -> None in a checkpoint, which has only what PEFT computes it from.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, dict[str, str]] = field(default_factory=dict)
    computed: dict[str, dict[str, torch.Tensor] | None] = field(default_factory=dict)

    def add(self, other: Adapters) -> None:
        """Take in what another pipeline stage has."""
        self.files.update(other.files)
        for kind, names in other.names.items():
            self.names.setdefault(kind, {}).update(names)
        self.computed.update(other.computed)

    def parts(self, parts: Iterable[TensorPart], dtype: torch.dtype | None, *, first: bool) -> Iterator[TensorPart]:
        """Yield the adapters' share of a rank's ``parts``, under their names in PEFT's files.

        With ``first``, also yield what PEFT has computed.
        """
        wanted: dict[str, list[tuple[str, str]]] = {}
        for kind, names in self.names.items():
            for new, name in names.items():
                wanted.setdefault(name, []).append((kind, new))
        for part in parts:
            for kind, new in wanted.get(part.name, ()):
                yield replace(part, set=f"{CAST}{kind}" if part.set.startswith(CAST) else kind, name=new)
        for kind, tensors in self.computed.items() if first else ():
            for new, tensor in (tensors or {}).items():
                cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
                yield TensorPart(kind, new, 0, cast.reshape(-1), tuple(tensor.shape))

    def to_bytes(self) -> bytes:
        """The content of adapters.json, for a checkpoint. Computed tensors are left out."""
        files = {name: content.decode() for name, content in self.files.items()}
        content = {"files": files, "names": self.names, "computed": sorted(self.computed)}
        return json.dumps(content, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Adapters:
        """Undo ``to_bytes``. ``path`` is for messages. Raises CheckpointError if ``data`` describes no adapters."""
        try:
            found = json.loads(data)
            names = {str(kind): {str(n): str(name) for n, name in named.items()} for kind, named in found["names"].items()}
            files = {str(name): str(content).encode() for name, content in found["files"].items()}
            made = cls(files, names, dict.fromkeys(map(str, found["computed"])))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} does not describe adapters ({error}).") from error
        wrong = [name for name in (*made.names, *made.computed) if not _is_set(name)]
        wrong += [name for name in made.files if not _is_inside(name)]
        if wrong:
            raise CheckpointError(f"{path} names {wrong[0]!r}, which is no place for an adapter's file.")
        return made


def _is_inside(name: str) -> bool:
    """True for the name of a file, or of a file in one folder."""
    parts = name.split("/")
    plain = all(part and part == part.strip() and part not in (".", "..") for part in parts)
    return plain and len(parts) <= 2 and "\0" not in name


def _is_set(name: str) -> bool:
    return _is_inside(name) and name.split("/")[-1] == ADAPTER


def stored_adapters(reader: Reader) -> Adapters | None:
    """The adapters of a checkpoint's model; None if it has none. Raises CheckpointError."""
    if reader.manifest is None or ADAPTERS_FILE not in reader.manifest.files:
        return None
    return Adapters.from_bytes(reader.small_file(ADAPTERS_FILE), reader.path / ADAPTERS_FILE)


def peft_model(module: nn.Module) -> Any:
    """The model in ``module`` that PEFT has added adapters to; None if it has not."""
    module = getattr(module, "whole_model", module)  # a pipeline stage has only some of its layers
    while isinstance(getattr(module, "_orig_mod", None), nn.Module):  # compiled
        module = module._orig_mod  # type: ignore[assignment]
    configs = getattr(module, "peft_config", None)
    return module if "peft" in sys.modules and isinstance(configs, Mapping) and configs else None


def find_adapters(inventory: Inventory, ranks: Ranks, *, compute: bool) -> Adapters | None:
    """The adapters of the model that all ranks together have; None if it has none. Collective. Raises CheckpointError.

    With ``compute``, they include what PEFT computes. For that, trainable parameters are whole on all ranks for a moment.
    """
    model = peft_model(inventory.subject.module)
    if model is None:
        return None
    leads = leads_stage(ranks.topology)
    found, problem = attempt(lambda: _by_name(model, inventory)) if leads else (None, None)
    ranks.agree(problem)
    computed = [isinstance(answer, str) for answer in ranks.gather(found)]
    if any(computed) and compute:
        found, problem = attempt(lambda: _by_value(model, inventory))
        ranks.agree(problem)
    whole = Adapters()
    for answer in ranks.gather(found if leads else None):
        if isinstance(answer, Adapters):
            whole.add(answer)
        elif answer is not None:
            whole.computed[ADAPTER] = None
    return whole


def _by_name(model: Any, inventory: Inventory) -> Adapters | str:
    """What PEFT writes of a model of this structure; or a str that says why that depends on the values."""
    kinds = [str(config.peft_type) for config in model.peft_config.values() if config.is_prompt_learning]
    if kinds:  # these look at parameters, not at the state dict
        return kinds[0]
    try:
        return _written(model, inventory, {})
    except Exception as error:  # PEFT's code may do anything with numbers that it takes for weights
        return f"{type(error).__name__}: {error}"


def _by_value(model: Any, inventory: Inventory) -> Adapters:
    """What PEFT writes of the model, from the values of its trainable parameters. Collective."""
    params = {name: param for name, param in _named(model).items() if param.requires_grad}
    with GatheredParameters(list(params.values())), torch.no_grad():
        return _written(model, inventory, {name: param.detach() for name, param in params.items()})


def _named(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of the model's state dict, by their names there; resharded parameters are placeholders."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                found[f"{prefix}.{key}" if prefix else key] = buffer
    return found


def _written(model: Any, inventory: Inventory, values: Mapping[str, torch.Tensor]) -> Adapters:
    """What PEFT writes if it is given ``values``, and numbers for all other tensors. Raises what PEFT raises."""
    names = list(_named(model))
    numbered = {name: torch.tensor([number]) for number, name in enumerate(names)}
    made, aliases = Adapters(), {**inventory.aliases, **inventory.beside().aliases}
    with TemporaryDirectory(prefix="zerorun-adapters-") as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the shapes of the numbers
        _save(model, directory, {**numbered, **values})
        for path in sorted(Path(directory).rglob("*")):
            place = path.relative_to(directory).as_posix()
            if path.suffix != ".safetensors":
                made.files.update({place: path.read_bytes()} if path.is_file() else {})
                continue
            kind = place.removesuffix(".safetensors")
            made.names[kind] = {}
            for name, tensor in _tensors(path):
                if tensor.dtype == torch.int64 and tensor.numel() == 1:
                    stored = stored_name(names[int(tensor)])
                    made.names[kind][stored_name(name)] = aliases.get(stored, stored)
                elif values:
                    made.computed.setdefault(kind, {})[stored_name(name)] = tensor  # type: ignore[index]
                else:
                    raise CheckpointError(f"PEFT computes {name!r} from values.")
    return made


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with TensorFile(path) as file:
        for name, tensor in file.tensors.items():
            flat = torch.empty(tensor.numel, dtype=dtype_of(tensor.dtype))
            file.read(name, 0, flat)
            yield name, flat.view(tensor.shape)


def _save(model: Any, directory: str, state: dict[str, torch.Tensor]) -> None:
    """Let PEFT write all adapters as ``PeftModel.save_pretrained`` does, even if the model does not have that wrapper."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    if isinstance(model, PeftModel):
        model.save_pretrained(directory, state_dict=state)
        return
    for name, config in model.peft_config.items():
        place = Path(directory) if name == "default" else Path(directory) / name
        place.mkdir(exist_ok=True)
        found = get_peft_model_state_dict(model, state_dict=state, adapter_name=name)
        named = {key if key.startswith(_PREFIX) else _PREFIX + key: value.clone() for key, value in found.items()}
        save_file(named, place / f"{ADAPTER}.safetensors")
        config.save_pretrained(str(place))
