"""accelerate: ``Accelerator(deepspeed_plugin=plugin("ds.json"))`` trains by zerorun, on CPUs and GPUs.

Importing this module begins the DeepSpeed mode, because accelerate finds out at its own import whether there is a
DeepSpeed. So import it before accelerate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config.source import read_source
from ..deepspeed.activation import activate
from ..distributed.device import default_device, on_host

activate()

from accelerate import DeepSpeedPlugin, PartialState  # noqa: E402  accelerate must find the mode


def plugin(config: str | Path | dict[str, Any], **settings: Any) -> DeepSpeedPlugin:
    """Return accelerate's plugin for this configuration: path of a JSON file, or a dict. ``settings`` are the plugin's own.

    Without a GPU it also tells accelerate to let ranks exchange on CPUs: with DeepSpeed it would not. Raises ConfigError if
    the file cannot be read.
    """
    if on_host(default_device()):
        PartialState(cpu=True)
    content = dict(read_source(config)[0])
    content.setdefault("zero_optimization", {"stage": 0})
    content.setdefault("train_micro_batch_size_per_gpu", "auto")
    return DeepSpeedPlugin(hf_ds_config=content, **settings)
