"""Train every small model that transformers' own tests build: at a stage of ZeRO on all ranks, against one process.

    zerorun --nproc-per-node 2 tests/clients/their_models.py PATH/TO/transformers [--stage 3] [--part 0/12] [llama bert ...]

Each rank gets the same data, so the run of one process is the same. Each line is a model class with "equal", "differs",
"fails" or "none": there is no reference, because the model cannot be built or run here, or becomes NaN.
The folder tests/models of the checkout should belong to the installed version; names that this one lacks are stand-ins.
"differs" is no more than rounding where nothing but rounding is in a gradient, as before a normalization.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import re
import sys
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import zerorun

STEPS, RATE, CLOSE, LARGEST = 2, 0.01, 1e-4, 8_000_000  # elements
_LACKS_NAME = re.compile(r"cannot import name '(\w+)' from '((?:transformers|huggingface_hub)[\w.]*)'")
_LACKS_MODULE = re.compile(r"No module named '(transformers\.[\w.]+)'")


def imported(name: str) -> ModuleType:
    """Import a module of their tests. What it imports of transformers, and is not there, is a stand-in."""
    while True:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            if found := _LACKS_NAME.match(str(error)):
                missing, module = found.groups()
                setattr(sys.modules[module], missing, stand_in(missing))
            elif found := _LACKS_MODULE.match(str(error)):
                sys.modules[found[1]] = mock.MagicMock()
            else:
                raise


def stand_in(name: str) -> Any:
    if name.endswith(("MAPPING", "MAPPING_NAMES")):
        return {}
    if name.startswith("is_"):
        return lambda *unused, **unused_too: False
    return type(name, (), {}) if name[0].isupper() else lambda given, *unused: given  # a class or a decorator


def seeded(seed: int) -> None:
    """Random numbers, those of their tests too, are the same on all ranks and in both runs."""
    from transformers import set_seed

    set_seed(seed)
    for name, module in list(sys.modules.items()):
        if name.startswith("tests.") and hasattr(module, "global_rng"):
            module.global_rng.seed(seed)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor) and value.requires_grad and value.numel():
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def loss_of(call: Any, inputs: dict[str, Any], step: int) -> torch.Tensor:
    """The model's own loss, or else the sum of the mean squares of all that it returns."""
    seeded(step)
    output = call(**copy.deepcopy(inputs))
    own = output.get("loss") if isinstance(output, dict) else None
    if own is not None and own.requires_grad:
        return own.mean()  # type: ignore[no-any-return]
    return torch.stack([tensor.float().square().mean() for tensor in tensors(output)]).sum()


def reference(model: nn.Module, inputs: dict[str, Any]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        loss = loss_of(model, inputs, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if not all(bool(value.isfinite().all()) for value in (torch.tensor(losses), *model.parameters())):
        raise ArithmeticError("its loss or weights become NaN")
    return losses


def trained(model: nn.Module, inputs: dict[str, Any], stage: int) -> list[float]:
    sgd = {"type": "SGD", "params": {"lr": RATE}}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": sgd}
    engine, losses = zerorun.initialize(model, {**config, "zero_optimization": {"stage": stage}}), []
    try:
        for step in range(STEPS):
            loss = loss_of(engine, inputs, step)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    finally:
        engine.destroy()
    return losses


def compared(test: Any, kind: type, stage: int) -> str:
    """What comes of one model class."""
    try:
        seeded(1)
        config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
        inputs = test._prepare_for_class(inputs, kind, return_labels=True)
        config.return_dict = True
        with torch.device("meta"):
            if sum(param.numel() for param in kind(config).parameters()) > LARGEST:
                raise MemoryError("it is large")
        seeded(0)
        model = kind(config).train()
        alone = copy.deepcopy(model)
        wanted = reference(alone, inputs)
    except Exception as error:
        return f"none: {type(error).__name__} {error}"
    try:
        found = trained(model, inputs, stage)
    except Exception as error:
        return f"fails: {type(error).__name__} {error}"
    far = [abs(one - other) / (abs(other) + 1e-3) for one, other in zip(found, wanted, strict=True)]
    for param, other in zip(model.parameters(), alone.parameters(), strict=True):
        far.append(float((param - other).detach().abs().max() / (other.detach().abs().max() + 1e-3)))
    return f"{'equal' if max(far) < CLOSE else 'differs'}: {max(far):.1e}"


def tests_in(name: str) -> Iterator[Any]:
    """The tests of a module that know a model's classes, ready to build them."""
    for kind in vars(imported(name)).values():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == name:
            test = kind(next(method for method in dir(kind) if method.startswith("test_")))
            if hasattr(test, "all_model_classes"):
                seeded(0)
                test.setUp()
                yield test


def main() -> None:
    parser = argparse.ArgumentParser(description="Train transformers' models, as their tests build them.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("models", nargs="*", help="folders of tests/models; all if there are none")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--part", default="0/1", help="one of so many parts of all models")
    given = parser.parse_args()
    sys.path[:0] = [str(given.checkout), str(given.checkout / "utils")]
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.seed = lambda: 1  # type: ignore[assignment]  # Reformer's random numbers would be others each time
    part, parts = map(int, given.part.split("/"))
    for path in sorted(given.checkout.glob("tests/models/*/test_modeling_*.py"))[part::parts]:
        if given.models and path.parent.name not in given.models:
            continue
        try:
            results = [
                f"{kind.__name__}: {compared(test, kind, given.stage)}"
                for test in tests_in(f"tests.models.{path.parent.name}.{path.stem}")
                for kind in test.all_model_classes or ()
            ]
        except Exception as error:
            results = [f"{path.stem}: none: {type(error).__name__} {error}"]
        if dist.get_rank() == 0:
            print(*(" ".join(result.split())[:300] for result in results), sep="\n", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
