"""Sequences benchmark: a Llama whose sequences ranks divide, beside stage 3 without, and DeepSpeed's ALST.

    python tests/perf/sequences.py --json tests/perf/results/sequences.json

All ranks together take one sequence a step. "zerorun-3-whole" takes it whole on each rank: what a rank needs and does
where sequences are not divided. ALST runs its documented loop, on sequences that are cut before the model sees them; each
framework attends with torch's scaled dot product. DeepSpeed is optional.
"""

from __future__ import annotations

import argparse
from typing import Any

from contenders import ONE_PROCESS, VOCABULARY, Benchmark, Step, configuration, engine_step, main, plain_step

# name: (stage, ranks that divide a sequence; 0: all)
CONTENDERS = {
    "zerorun-3-whole": (3, 1),
    "zerorun-1": (1, 0),
    "zerorun-2": (2, 0),
    "zerorun-3": (3, 0),
    "deepspeed-1": (1, 0),
    "deepspeed-2": (2, 0),
    "deepspeed-3": (3, 0),
}


def build_model(args: argparse.Namespace) -> Any:
    """A Llama, with the same weights for every contender."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.width,
            intermediate_size=2 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=args.context,
            attn_implementation="sdpa",
        )
    )


def batches_of(args: argparse.Namespace) -> Any:
    """One batch a step for all ranks."""
    import torch

    shape = (args.warmup + args.steps, 1, args.batch, args.context)
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def make_step(args: argparse.Namespace) -> Step:
    model = build_model(args)
    if args.worker == ONE_PROCESS:
        return plain_step(model)
    stage, divided = CONTENDERS[args.worker]
    sizes = {"sequence_parallel_size": divided or args.ranks}
    if not args.worker.startswith("zerorun"):
        return alst_step(model, configuration(stage, args, **sizes), args)
    import zerorun

    engine = zerorun.initialize(model, configuration(stage, args, **sizes))

    return engine_step(engine)


def alst_step(model: Any, config: dict[str, Any], args: argparse.Namespace) -> Step:
    """Each rank gives the model its part of the tokens; the loss is that of all parts, by their numbers of labels."""
    import deepspeed
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from torch.distributed.nn.functional import all_gather

    deepspeed.init_distributed(dist_backend="gloo")
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=args.ranks,
        micro_batch_size=args.batch,
        seq_length_is_variable=True,
    )
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)[0]
    group, rank, length = mpu.get_sequence_parallel_group(), mpu.get_sequence_parallel_rank(), args.context // args.ranks
    part = slice(rank * length, (rank + 1) * length)
    positions = torch.arange(args.context).expand(args.batch, -1)[:, part]

    def train(ids: Any) -> tuple[float, float]:
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:][:, part].contiguous()
        logits = engine(input_ids=ids[:, part], position_ids=positions).logits
        loss = model.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=VOCABULARY)
        losses = all_gather(loss, group=group)
        counts = all_gather((labels != -100).sum(), group=group)
        whole = sum(own * count for own, count in zip(losses, counts, strict=True)) / sum(counts)
        engine.backward(whole)
        engine.step()
        return whole.item(), float(engine.get_global_grad_norm())

    return Step(train)


if __name__ == "__main__":
    main(
        Benchmark(
            file=__file__,
            about=__doc__,
            contenders=tuple(CONTENDERS),
            options={"ranks": 2, "width": 256, "layers": 4, "batch": 1, "context": 1024, "steps": 8, "warmup": 3},
            batches=batches_of,
            make_step=make_step,
        )
    )
