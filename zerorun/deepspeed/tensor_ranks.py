"""What scripts made for DeepSpeed say about ranks that divide layers or sequences.

It is said to ``tp_model_init``, and by the arguments ``mpu`` and ``mesh_param`` of ``initialize``.

zerorun divides them itself, from the whole model and the whole batch, over neighbouring ranks: that is how it knows which
part is where. What a script says is merged into the configuration if it agrees with that, and is an error if not.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.parse import Config, load_config
from ..config.rules import context_sizes, tensor_sizes
from ..config.source import read_source
from ..distributed.tensor_shard import has_marked_parts
from ..errors import ConfigError, ConfigProblem, TopologyError
from ..log import info_once
from .mpu import method_of_tensor_ranks
from .sequence_ranks import divides_in_evaluation

_TRAIN = "train_batch_size"


@dataclass(frozen=True)
class _Wish:
    """What tp_model_init() was told about a model."""

    size: int
    dtype: torch.dtype


_wishes: weakref.WeakKeyDictionary[nn.Module, _Wish] = weakref.WeakKeyDictionary()


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, tp_group: dist.ProcessGroup | None = None
) -> nn.Module:
    """Return the model as it is, and remember that ``initialize`` is to divide its layers over ``tp_size`` ranks.

    ``dtype`` has to be that of the configuration, and ``tp_group``, if it is given, this rank and its neighbours.
    ``config`` has no effect. Raises ConfigError and TopologyError, here or in ``initialize``.
    """
    if tp_size < 1:
        reason = "layers are divided over one rank or more."
        raise ConfigError([ConfigProblem("tp_size", tp_size, reason, "Pass 1 or more.")], "tp_model_init()")
    if tp_group is not None:
        _require_neighbours(tp_group, tp_size, "the tp_group given to tp_model_init()")
    _wishes[model] = _Wish(tp_size, dtype)
    return model


def with_script_ranks(source: Any, model: nn.Module, mpu: Any, mesh_param: Any = None) -> Any:
    """Return the configuration ``source`` with what the script says of ranks besides, or ``source`` itself.

    That is what tp_model_init() was told about ``model``, and how many ranks divide sequences: by ``mpu``, or by
    ``mesh_param``, the numbers of data-parallel and of sequence ranks. Raises ConfigError where they differ from
    ``source``, and TopologyError for an ``mpu`` of ranks that have parts of the model, unless they are those over which
    zerorun divides it.
    """
    wish = _wishes.get(model)
    if wish is not None and wish.size > 1:
        source = _merged(source, wish)
    sequence = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    for size, whence in ((sequence, "mpu"), (_sequence_ranks_in(mesh_param), "mesh_param")):
        source = source if size == 1 else _with_context(source, size, whence)
    if mpu is not None:
        config = load_config(source, optimizer_given=True, scheduler_given=True)
        _check_parts(mpu, model, max(tensor_sizes(config).values()))
    return with_own_samples(source, mpu)


def with_own_samples(source: Any, mpu: Any) -> Any:
    """Return the configuration ``source`` with a ``train_batch_size`` of samples that differ, or ``source`` itself.

    DeepSpeed's counts those of tensor ranks as well, which have the same ones, where no mpu tells them from data-parallel
    ranks. So do the numbers that trainers write for "auto". Raises ConfigError if tensor ranks do not divide it.
    """
    if source is None or isinstance(source, Config) or hasattr(mpu, "get_data_parallel_world_size"):
        return source
    raw, name = read_source(source)
    written = raw.get(_TRAIN)
    if type(written) is not int or "tensor_parallel" not in raw:
        return source
    size = max(tensor_sizes(load_config(source, optimizer_given=True, scheduler_given=True)).values())
    if size == 1:
        return source
    if written % size:
        reason = f"as in DeepSpeed it counts the samples of each of the {size} tensor ranks, which have the same ones."
        remedy = f"Write a multiple of {size}, or leave it out and give the other two sizes."
        raise ConfigError([ConfigProblem(_TRAIN, written, reason, remedy)], name)
    own = written // size
    info_once(f"{name}: train_batch_size {written} counts {size} tensor ranks, as in DeepSpeed: a step has {own} samples.")
    return {**raw, _TRAIN: own}


def _sequence_ranks_in(mesh_param: Any) -> int:
    """Raises ConfigError unless ``mesh_param`` is None or two numbers."""
    if mesh_param is None:
        return 1
    numbers = tuple(mesh_param) if isinstance(mesh_param, (list, tuple)) else ()
    if len(numbers) == 2 and all(isinstance(number, int) and number > 0 for number in numbers):
        return int(numbers[1])
    reason = "it is not the numbers of data-parallel and of sequence ranks."
    raise ConfigError([ConfigProblem("mesh_param", mesh_param, reason, "Pass (4, 2), or leave it out.")], "initialize()")


def _with_context(source: Any, size: int, whence: str) -> Any:
    config = load_config(source, optimizer_given=True, scheduler_given=True)
    own = max(context_sizes(config).values())
    if own not in (1, size):
        reason = f"the {whence} given to initialize() has {size} ranks that divide sequences."
        problem = ConfigProblem("sequence_parallel_size", own, reason, "Name one size in both places.")
        raise ConfigError([problem], config.provenance.file)
    if isinstance(source, Config):
        return source
    raw, _ = read_source(source)
    section = {"in_evaluation": divides_in_evaluation(), **raw.get("context_parallel", {})}
    return {**raw, "sequence_parallel_size": size, "context_parallel": section}


def _merged(source: Any, wish: _Wish) -> Any:
    config = load_config(source, optimizer_given=True, scheduler_given=True)
    size, problems = max(tensor_sizes(config).values()), []
    dtypes = [(config.bf16.enabled, torch.bfloat16, "bf16"), (config.fp16.enabled, torch.float16, "fp16")]
    for enabled, dtype, key in dtypes:
        if enabled is True and dtype != wish.dtype:
            reason = f"tp_model_init() was given dtype={wish.dtype}."
            problems.append(ConfigProblem(f"{key}.enabled", True, reason, f"Pass dtype={dtype} there."))
    if size not in (1, wish.size):
        reason = f"tp_model_init() was given tp_size={wish.size}."
        problems.append(ConfigProblem("tensor_parallel.autotp_size", size, reason, "Name one size in both places."))
    if problems:
        raise ConfigError(problems, config.provenance.file)
    if size > 1 or isinstance(source, Config):
        return source
    raw, _ = read_source(source)
    return {**raw, "tensor_parallel": {**raw.get("tensor_parallel", {}), "autotp_size": wish.size}}


def _check_parts(mpu: Any, model: nn.Module, size: int) -> None:
    """Raise TopologyError if ranks have parts of the model in another way than zerorun divides it."""
    asked, group = (method_of_tensor_ranks(mpu, question) for question in ("world_size", "group"))
    found = 1 if asked is None else asked()
    marked = has_marked_parts(model)
    if found == 1 and not (marked and asked is None):  # Megatron marks the layers of one rank, too, which are whole
        return
    if found != size or marked or group is None:
        raise TopologyError(
            "the mpu given to initialize() says that ranks have parts of each layer in a way of its own. zerorun has to "
            "divide layers itself: parts do not tell what whole layers a checkpoint has to have, nor which gradients count "
            'once. Remedy: pass the whole model, and set "tensor_parallel": {"autotp_size": N} in the configuration.'
        )
    _require_neighbours(group(), size, "the mpu given to initialize()")


def _require_neighbours(group: dist.ProcessGroup, size: int, what: str) -> None:
    first = dist.get_rank() // size * size
    wanted, found = list(range(first, first + size)), dist.get_process_group_ranks(group)
    if sorted(found) != wanted:
        raise TopologyError(
            f"{what} has the ranks {found}, and {size} ranks divide layers. zerorun divides them over neighbours, here "
            f"{wanted}, which mostly are on one host. Remedy: leave the group out."
        )
