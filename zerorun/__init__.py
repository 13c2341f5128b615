"""zerorun: ZeRO training of unmodified PyTorch modules from one JSON file.

Public names are imported on first use, so that ``import zerorun``, ``zerorun --help`` and the configuration
checker stay fast and need no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from .import_paths import PATHS, ImportPaths

if TYPE_CHECKING:  # the names that ``__getattr__`` resolves, for type checkers; tests/unit/test_exports.py compares both
    from . import config as config
    from . import errors as errors
    from . import zero as zero
    from .checkpoint.pretrained import load_pretrained as load_pretrained
    from .config import Config as Config
    from .deepspeed.arguments import add_config_arguments as add_config_arguments
    from .distributed.process_topology import PipeDataParallelTopology as PipeDataParallelTopology
    from .distributed.process_topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
    from .distributed.process_topology import ProcessTopology as ProcessTopology
    from .distributed.topology import Topology as Topology
    from .distributed.transport.process_group import init_distributed as init_distributed
    from .engine.engine import Engine as Engine
    from .engine.initialize import initialize as initialize
    from .engine.notebook import notebook_launcher as notebook_launcher
    from .errors import CheckpointError as CheckpointError
    from .errors import ConfigError as ConfigError
    from .errors import DoesNotFitError as DoesNotFitError
    from .errors import ZerorunError as ZerorunError
    from .memory.estimate import Estimate as Estimate
    from .memory.estimate import estimate_memory as estimate_memory
    from .pipeline.layer_spec import LayerSpec as LayerSpec
    from .pipeline.layer_spec import TiedLayerSpec as TiedLayerSpec
    from .pipeline.module import PipelineModule as PipelineModule
    from .planner.answer import RunPlan as RunPlan
    from .planner.answer import plan_run as plan_run
    from .tensor_parallel.sampled_labels import sampled_labels as sampled_labels

__version__ = "0.1.0"

# In a checkout, ops/ and launcher/ are beside this folder (setup.py maps them to zerorun.ops and zerorun.launcher).
_checkout = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_checkout, "setup.py")) and os.path.isdir(os.path.join(_checkout, "ops")):
    __path__.append(_checkout)

_EXPORTS = {
    "initialize": "zerorun.engine.initialize",
    "Engine": "zerorun.engine.engine",
    "notebook_launcher": "zerorun.engine.notebook",
    "Estimate": "zerorun.memory.estimate",
    "estimate_memory": "zerorun.memory.estimate",
    "add_config_arguments": "zerorun.deepspeed.arguments",
    "init_distributed": "zerorun.distributed.transport.process_group",
    "load_pretrained": "zerorun.checkpoint.pretrained",
    "CheckpointError": "zerorun.errors",
    "Config": "zerorun.config",
    "ConfigError": "zerorun.errors",
    "DoesNotFitError": "zerorun.errors",
    "ZerorunError": "zerorun.errors",
    "PipelineModule": "zerorun.pipeline.module",
    "RunPlan": "zerorun.planner.answer",
    "plan_run": "zerorun.planner.answer",
    "sampled_labels": "zerorun.tensor_parallel.sampled_labels",
    "LayerSpec": "zerorun.pipeline.layer_spec",
    "TiedLayerSpec": "zerorun.pipeline.layer_spec",
    "Topology": "zerorun.distributed.topology",
    "ProcessTopology": "zerorun.distributed.process_topology",
    "PipeDataParallelTopology": "zerorun.distributed.process_topology",
    "PipeModelDataParallelTopology": "zerorun.distributed.process_topology",
}
_MODULES = ("zero", "config", "errors", "ops", "launcher", *PATHS)

sys.meta_path.append(ImportPaths())

__all__ = [*_EXPORTS, *_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"zerorun.{name}")
    raise AttributeError(f"module 'zerorun' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
