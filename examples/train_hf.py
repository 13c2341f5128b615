"""Train an unmodified Hugging Face model with zerorun: Llama, GPT-2, Qwen and others, in full or with LoRA (peft).

    zerorun --nproc-per-node 2 examples/train_hf.py --config examples/configs/zero3.json --architecture qwen3
    zerorun --nproc-per-node 2 examples/train_hf.py --config examples/configs/zero3.json --architecture llama --lora

The weights are random and the text is that of train_gpt.py, so nothing is downloaded. To fine-tune a model of yours,
replace ``AutoModelForCausalLM.from_config(...)`` by ``.from_pretrained(...)``; nothing else changes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from train_gpt import load_text, mean_over_ranks, usage, windows
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import zerorun


def build_model(args: argparse.Namespace) -> PreTrainedModel:
    """A small model of the architecture, with a vocabulary of bytes."""
    config = AutoConfig.for_model(
        args.architecture,
        vocab_size=256,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        head_dim=args.width // args.heads,
        max_position_embeddings=args.context,
        bos_token_id=0,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def add_lora(model: PreTrainedModel) -> torch.nn.Module:
    """Freeze the model and put small trainable matrices beside all of its linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model = build_model(args)
    if args.lora:
        model = add_lora(model)
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)

    engine = zerorun.initialize(model=model, config=args.config)
    say = print if dist.get_rank() == 0 else lambda *unused, **options: None
    say(f"{args.architecture}: {trainable:,} of {total:,} parameters are trained", flush=True)
    text, _ = load_text(args.data, args.context)
    losses, began = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            inputs, _ = windows(text, args.context, engine.train_micro_batch_size_per_gpu(), seed=engine.micro_steps)
            inputs = inputs.to(engine.device)
            loss = engine(input_ids=inputs, labels=inputs).loss  # the model shifts the labels itself
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        if step % args.report_every == 0 or step == args.steps:
            train = mean_over_ranks(losses)
            speed = inputs.numel() * len(losses) * dist.get_world_size() / (time.perf_counter() - began)
            flops = 4 * total + 2 * trainable  # forward, backward; no weight gradients where nothing is trained
            say(f"step {step}/{args.steps}: loss {train:.3f}, {usage(engine.device, speed, flops)}", flush=True)
            losses, began = [], time.perf_counter()
    engine.destroy()


def parse_arguments() -> argparse.Namespace:
    parser = zerorun.add_config_arguments(argparse.ArgumentParser(description="Train a Hugging Face model."))
    parser.set_defaults(config=str(Path(__file__).parent / "configs" / "zero3.json"))
    parser.add_argument("--architecture", default="llama", help="llama, gpt2, qwen2, qwen3, mistral, ...")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters only (needs peft)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--data", help="file or folder (default: the sources of Python's standard library)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report-every", type=int, default=10, help="steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
