"""What gpu.py trains: decoders of OLMo's shapes, and the ways to train them, from a bare loop to DeepSpeed.

A contender is a function of token ids [batch, context] that does one optimizer step in bf16 with fp32 masters and AdamW,
clipped at 1.0; every one is alone in its process group. ``+ckpt`` in a name: blocks are computed again in backward.
``+offload``: masters and moments are in host memory (and parameters, where it says ``+offload-all``).
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int = 50304

    @property
    def block_numel(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.hidden

    @property
    def numel(self) -> int:
        """All parameters: blocks, embedding, head."""
        return self.layers * self.block_numel + 2 * self.vocabulary * self.width

    def flops_per_token(self, context: int) -> float:
        """6 N + 6 L h s: N without the embedding but with the head, causal attention, nothing that is computed again."""
        multiplied = self.layers * self.block_numel + self.vocabulary * self.width
        return 6.0 * multiplied + 6.0 * self.layers * self.width * context

    def with_layers(self, layers: int) -> Shape:
        return dataclasses.replace(self, layers=layers)


SHAPES = {
    "1B": Shape(2048, 16, 16, 8192),
    "7B": Shape(4096, 32, 32, 11008),
    "tiny 1B": Shape(64, 2, 2, 128, 512),
    "tiny 7B": Shape(64, 3, 2, 176, 512),
}

# -- the model -----------------------------------------------------------------------------------------------------------

_POOL = 1 << 22
_pools: dict[torch.device, torch.Tensor] = {}  # random numbers by device: drawing billions takes minutes on a CPU


def fill(tensor: torch.Tensor) -> None:
    """Weights of size 0.02, the same numbers again and again."""
    if tensor.is_meta:
        return
    if tensor.device not in _pools:
        _pools[tensor.device] = torch.randn(_POOL, device=tensor.device) * 0.02
    for part in tensor.detach().view(-1).split(_POOL):
        part.copy_(_pools[tensor.device][: part.numel()])


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        fill(self.weight)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        fill(self.weight)


class Block(nn.Module):
    """OLMo's: pre-norm without parameters, fused QKV, SwiGLU, no biases."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.heads = shape.heads
        self.qkv, self.out = Linear(width, 3 * width, bias=False), Linear(width, width, bias=False)
        self.up, self.down = Linear(width, 2 * hidden, bias=False), Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(F.layer_norm(x, (width,))).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        gate, up = self.up(F.layer_norm(x, (width,))).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Olmo(nn.Module):
    """Embedding and head are not tied. ``recompute``: blocks are computed again in backward, by torch's checkpoint."""

    def __init__(self, shape: Shape, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens = Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(F.layer_norm(x, x.shape[-1:]))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


# -- contenders ----------------------------------------------------------------------------------------------------------


def build(name: str, shape: Shape, device: torch.device) -> tuple[Step, Callable[[], None]]:
    """(the step of contender ``name``, what gives its memory back). Names: bare, fsdp2, deepspeed-2, zerorun-3, ..."""
    family, *options = name.split("+")
    base, _, stage = family.partition("-")
    if base == "zerorun":
        return _zerorun(int(stage), options, shape, device)
    builders = {"bare": _bare, "fsdp2": _fsdp2, "deepspeed": _deepspeed}
    return builders[base](stage, options, shape, device), free


def free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _bare(stage: str, options: list[str], shape: Shape, device: torch.device) -> Step:
    """The loop that one writes by hand: bf16 weights, fp32 masters."""
    with device:
        model = Olmo(shape, recompute="ckpt" in options)
    masters = [param.detach().clone() for param in model.parameters()]
    model.bfloat16()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.0, fused=True)

    def step(ids: torch.Tensor) -> None:
        model(ids).backward()
        for master, param in zip(masters, params, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            param.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        torch._foreach_copy_([param.data for param in params], masters)

    return step


def config(stage: int, options: list[str]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    for option in options:
        if option.startswith("offload"):
            zero["offload_optimizer"] = {"device": "cpu"}
        if option == "offload-part":
            zero["offload_optimizer"]["ratio"] = 0.6
        if option == "offload-all":
            zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def _zerorun(stage: int, options: list[str], shape: Shape, device: torch.device) -> tuple[Step, Callable[[], None]]:
    """Built on the device, which has room: the moments, 8 bytes per parameter, come with the first step only."""
    import zerorun

    settings = config(stage, options)
    if "ckpt" in options:
        settings["activation_checkpointing"] = {"policy": "full"}
    with device:
        model = Olmo(shape)
    engines = [zerorun.initialize(model, settings)]
    del model

    def step(ids: torch.Tensor) -> None:
        engine = engines[0]
        engine.backward(engine(ids))
        engine.step()

    def close() -> None:
        engines.pop().destroy()
        free()

    return step, close


def _fsdp2(stage: str, options: list[str], shape: Shape, device: torch.device) -> Step:
    """As its users write it: fp32 shards, bf16 computation, fp32 reduction; built without memory, then filled."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    _alone(device)
    mesh = init_device_mesh(device.type, (1,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = any(option.startswith("offload") for option in options)
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    with torch.device("meta"):
        model = Olmo(shape, recompute="ckpt" in options)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=policy)
    model.to_empty(device="cpu" if offload else device)
    for param in model.parameters():
        fill(param.to_local())  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def step(ids: torch.Tensor) -> None:
        model(ids).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _deepspeed(stage: str, options: list[str], shape: Shape, device: torch.device) -> Step:
    """With torch's fused AdamW; with its own CPU Adam if the optimizer is in host memory."""
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")
    _alone(device)
    settings = config(int(stage), options)
    with device:
        model = Olmo(shape, recompute="ckpt" in options)
    optimizer = None
    if not any(option.startswith("offload") for option in options):
        del settings["optimizer"]
        settings["zero_allow_untested_optimizer"] = True
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]

    def step(ids: torch.Tensor) -> None:
        engine.backward(engine(ids))
        engine.step()

    return step


def _alone(device: torch.device) -> None:
    """A process group of this process."""
    from zerorun.distributed.transport.process_group import init_distributed

    init_distributed(device)
