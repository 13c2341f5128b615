"""Experts benchmark: a Mixtral whose experts are spread over ranks, beside stage 3 without, and DeepSpeed's AutoEP.

    python tests/perf/experts.py --json tests/perf/results/experts.json

DeepSpeed is optional. Ranks of a host read each other's memory, so that stage 3 gathers for nothing; with
ZERORUN_PEER_MEMORY=0 they send messages, as between hosts. "busiest" is how many times the mean the rank has to compute to
which most rows go, over layers: all wait for it. With --balanced each expert gets as many rows, whatever the routers say
(DeepSpeed has routers of its own: with --only, leave it out).
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from contenders import ONE_PROCESS, VOCABULARY, Benchmark, Step, configuration, engine_step, main, plain_step

# name: (stage, ranks over which experts are spread)
CONTENDERS = {
    "zerorun-3": (3, 1),
    "zerorun-3-spread": (3, 2),
    "zerorun-2-spread": (2, 2),
    "deepspeed-2-spread": (2, 2),
    "deepspeed-3-spread": (3, 2),
}


def build_model(args: argparse.Namespace) -> Any:
    """A Mixtral, with the same weights for every contender."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.width,
            intermediate_size=2 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=args.experts,
            num_experts_per_tok=2,
            max_position_embeddings=args.context,
        )
    )
    if args.balanced:
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(chosen_evenly)
    return model


def chosen_evenly(router: Any, given: Any, made: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """What a router returns, with rows that go to one expert after the other."""
    import torch

    logits, weights, index = made
    return logits, weights, torch.arange(index.numel(), device=index.device).view(index.shape) % logits.shape[-1]


def batches_of(args: argparse.Namespace) -> Any:
    import torch

    shape = (args.warmup + args.steps, args.ranks, args.batch, args.context)
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def make_step(args: argparse.Namespace) -> Step:
    model = build_model(args)
    if args.worker == ONE_PROCESS:
        return plain_step(model)
    stage, spread = CONTENDERS[args.worker]
    experts: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": spread}} if spread > 1 else {}
    if args.worker.startswith("zerorun"):
        import zerorun

        engine: Any = zerorun.initialize(model, configuration(stage, args, **experts))
    else:
        import deepspeed

        experts["expert_parallel"] |= {"preset_model": "mixtral", "use_grouped_mm": False}
        config = configuration(stage, args, **experts)
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def figures() -> dict[str, float]:
        return {"busiest": busiest(engine, spread) if spread > 1 and args.worker.startswith("zerorun") else 1.0}

    return engine_step(engine, figures)


def busiest(engine: Any, spread: int) -> float:
    """Of the step that is over: the rows of the rank with most, times the mean, over layers."""
    most = []
    for rows in engine.expert_load().values():
        local = len(rows) // spread
        most.append(max(sum(rows[at : at + local]) for at in range(0, len(rows), local)) * spread / sum(rows))
    return statistics.mean(most)


if __name__ == "__main__":
    main(
        Benchmark(
            file=__file__,
            about=__doc__,
            contenders=tuple(CONTENDERS),
            options={
                "ranks": 2,
                "width": 256,
                "layers": 4,
                "experts": 8,
                "batch": 2,
                "context": 128,
                "steps": 8,
                "warmup": 3,
            },
            batches=batches_of,
            make_step=make_step,
            flags=(("balanced", "each expert gets as many rows"),),
        )
    )
