"""Proves by numbers that a block which a plan divides computes the same as before: output and all gradients.

A copy of the block gets random values for every parameter, so that no bias is zero and no norm is one. It is run once whole
and once divided, with threads as ranks, on the same input: batch 2, an odd number of tokens. A block that does something
else in training than in evaluation, with the same result each time, is tried in both modes. Dropout is left out: ranks drop
other elements of what they divide.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..distributed.generators import generators_as_before
from ..distributed.tensor_shard import partial_of, shards_of
from .axis import Axis
from .collectives import Region
from .convert import convert
from .layers import whole_of
from .sequence import SequenceParallel
from .styles import ParallelPlan
from .thread_ranks import Outcome, ThreadAxis, first_difference, in_short, on_threads

BATCH, TOKENS = 2, 5
NOT_ALONE = "cannot be run on"
# Relative to the largest element of a tensor, and to that of all tensors, because some gradients are nothing but rounding,
# such as those of key biases. fp32 rounds at 1e-6; a wrong layout differs in the first digit.
_TOLERANCE, _TOLERANCE_OF_ALL = 1e-3, 1e-4
Call = tuple[tuple[Any, ...], dict[str, Any]]


class _Stop(Exception):
    """Ends a forward as soon as the block's inputs are known."""


def capture(model: nn.Module, block: nn.Module, width: int) -> Call | None:
    """Return the arguments of ``block`` when ``model`` gets token ids; None if the model then does not call it.

    The model runs up to the block. If the model does not take token ids, the block's only argument is hidden states
    [BATCH, TOKENS, width]. A block that is the model itself runs once.
    """
    if block is model:
        return _taken_by(model, width)
    caught: list[Call] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise _Stop

    device = next(model.parameters()).device
    ids = (torch.arange(BATCH * TOKENS, device=device) % 3).view(BATCH, TOKENS)
    extra = {"use_cache": False} if hasattr(model, "config") and hasattr(model, "get_input_embeddings") else {}
    modes = [(module, module.training) for module in model.modules()]
    handle = block.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            model.eval()(ids, **extra)
    except Exception:  # whatever the model says to token ids that it does not take
        if not (caught and _takes_floats(caught[0])):
            caught.clear()
            try:
                with torch.no_grad():
                    block(torch.zeros(BATCH, TOKENS, width, device=device))
            except _Stop:
                pass
    finally:
        handle.remove()
        for module, training in modes:
            module.training = training
    return caught[0] if caught else None


def _taken_by(model: nn.Module, width: int) -> Call | None:
    """Return the argument that ``model`` runs on, token ids or else hidden states; None for neither."""
    device = next(model.parameters()).device
    whole = copy.deepcopy(model).eval()  # a forward may change buffers
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long, device=device)
    for argument in (ids, torch.zeros(BATCH, TOKENS, width, device=device)):
        with torch.no_grad(), suppress(Exception):  # whatever the model says to what it does not take
            whole(argument)
            return (argument,), {}
    return None


def _takes_floats(call: Call) -> bool:
    """False if token ids went straight into the block: the model takes no token ids."""
    found = [leaf for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    return not found or found[0].is_floating_point()


def difference(block: nn.Module, plan: ParallelPlan, call: Call, width: int, *, along_sequence: bool = False) -> str | None:
    """Return how ``block`` divided by ``plan`` differs from the whole, or None.

    ``call``: the block's arguments, in which hidden states [BATCH, TOKENS, width] are replaced by random ones.
    ``along_sequence``: between the layers that it divides, each rank has some of the tokens.
    """
    pattern = _randomized(block)
    args, kwargs = _randomized_call(call, width)
    with torch.enable_grad():
        try:
            expected = _run(_copy(pattern), args, kwargs)
        except Exception as error:
            return f"{NOT_ALONE} {BATCH} x {TOKENS} tokens ({in_short(error)})"
        found = _divided(pattern, plan, args, kwargs, expected, along_sequence)
        if found is None and (trained := _trained(pattern, args, kwargs, expected)) is not None:
            found = _divided(pattern.train(), plan, args, kwargs, trained, along_sequence)
            found = None if found is None else f"{found}, in training"
    return found


def _divided(
    pattern: nn.Module, plan: ParallelPlan, args: Any, kwargs: Any, expected: Outcome, along_sequence: bool
) -> str | None:
    """Return how a copy of ``pattern`` that is divided differs from what is ``expected``, or None."""

    def work(axis: ThreadAxis) -> Outcome:
        mine, region = _copy(pattern), Region(axis)
        convert(mine, plan, region)
        if along_sequence:
            SequenceParallel(nn.ModuleDict({"of": nn.ModuleList([mine])}), plan.beneath("of.0"), region, "of")
        return _whole(mine, _run(mine, args, kwargs), axis)

    try:
        outcomes = on_threads(plan.size, work)
    except Exception as error:
        return f"cannot be run when it is divided ({in_short(error)})"
    name = first_difference(outcomes, expected, _TOLERANCE, _TOLERANCE_OF_ALL)
    return f"differs in {name}" if name else None


def _trained(pattern: nn.Module, args: Any, kwargs: Any, evaluated: Outcome) -> Outcome | None:
    """Return what ``pattern`` gives in training without dropout; None if that is what it gives in evaluation, or chance."""
    _leave_out_dropout(pattern)

    def run(seed: int) -> Outcome:
        torch.manual_seed(seed)
        return _run(_copy(pattern).train(), args, kwargs)

    with generators_as_before(gpus=False), suppress(Exception):  # what needs more to be trained is tried in evaluation
        found = run(1)
        if not _are_equal(found, evaluated) and _are_equal(found, run(2)):
            return found
    return None


def _leave_out_dropout(pattern: nn.Module) -> None:
    """Let dropout drop nothing: that of torch's layers, and what attributes of other modules say of it."""
    for module in pattern.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.modules.dropout._DropoutNd)):
                vars(module)[name] = 0.0


def _are_equal(one: Outcome, other: Outcome) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def bytes_of_trial(block: nn.Module, size: int) -> int:
    """Return the host memory that ``difference`` takes for ``block`` on ``size`` ranks, beside ``block`` itself.

    These are fp32 values: the random ones, and on each rank its part, the gradients, these put together, and what of them
    is on its way. As measured; what a thread has freed may stay with it.
    """
    return 4 * (4 * size + 6) * sum(param.numel() for param in block.parameters())


def _randomized(block: nn.Module) -> nn.Module:
    """Return a copy of ``block`` in fp32 on the CPU with random values. Tied parameters stay tied."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for module in block.modules():
        for param in module._parameters.values():
            if param is not None and id(param) not in memo:
                value = torch.randn(param.shape, generator=generator)
                value = value / param.shape[-1] ** 0.5 if param.dim() > 1 else 1 + value / 4
                memo[id(param)] = nn.Parameter(value)
        for buffer in module._buffers.values():
            if buffer is not None:
                memo[id(buffer)] = _plain(buffer, generator)
        config = vars(module).get("config")
        if config is not None:
            memo[id(config)] = config
    return copy.deepcopy(block, memo).eval()


def _copy(block: nn.Module) -> nn.Module:
    """Return a copy with gradients of its own, whose parameters share the memory of ``block`` until they are divided."""
    memo: dict[int, Any] = {id(param): nn.Parameter(param.data) for param in block.parameters()}
    return copy.deepcopy(block, memo)


def _plain(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return ``tensor`` on the CPU, in fp32 if it is floating. A meta tensor gets values: random, zero or true."""
    if tensor.is_meta:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator)
        return (
            torch.ones(tensor.shape, dtype=tensor.dtype)
            if tensor.dtype == torch.bool
            else torch.zeros_like(tensor, device="cpu")
        )
    tensor = tensor.detach().cpu().clone()
    return tensor.float() if tensor.is_floating_point() else tensor


def _randomized_call(call: Call, width: int) -> Call:
    """Return the arguments with random hidden states."""
    generator = torch.Generator().manual_seed(1)

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point() and value.shape[-1:] == (width,) and value.shape[:2] == (BATCH, TOKENS):
            return torch.randn(value.shape, generator=generator).requires_grad_()
        return _plain(value, generator)

    args, kwargs = tree_map(plain, call)
    return args, kwargs


def _run(block: nn.Module, args: Any, kwargs: Any) -> Outcome:
    """Return the output and the gradients of the inputs and of all parameters, keyed by what they are.

    The loss is the sum of the output, weighted by random numbers.
    """
    fresh_args, fresh_kwargs = copy.deepcopy((args, kwargs))
    output = block(*fresh_args, **fresh_kwargs)
    output = output if isinstance(output, torch.Tensor) else output[0]
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output * weight).sum().backward()
    outcome = {"the output": output.detach()}
    for index, value in enumerate(_tensors(fresh_args) + _tensors(fresh_kwargs)):
        if value.grad is not None:
            outcome[f"the gradient of input {index}"] = value.grad
    for name, param in block.named_parameters():
        outcome[f"the gradient of {name}"] = torch.zeros_like(param) if param.grad is None else param.grad
    return outcome


def _tensors(tree: Any) -> list[torch.Tensor]:
    values = tree.values() if isinstance(tree, Mapping) else tree
    return [value for value in values if isinstance(value, torch.Tensor)]


def _whole(block: nn.Module, outcome: Outcome, axis: Axis) -> Outcome:
    """Return ``outcome`` with the gradients of divided parameters put together, and partial gradients summed."""
    shards, partial = shards_of(block), partial_of(block)
    for name, param in block.named_parameters():
        key = f"the gradient of {name}"
        if id(param) in shards:
            outcome[key] = whole_of(outcome[key], shards[id(param)], axis)
        elif id(param) in partial:
            outcome[key] = axis.all_reduce(outcome[key], "proof")
    return outcome
