"""Train a small mixture of experts on bytes, with its experts spread over the ranks, and draw how even their loads are.

    zerorun --nproc-per-node 2 examples/train_moe.py --config examples/configs/moe.json

The model is Hugging Face's Mixtral, unmodified. The weights are random and the text is that of train_gpt.py, so nothing is
downloaded. The section expert_parallel alone says over how many ranks experts are spread. Loads are drawn as text and, if
matplotlib is installed, as a picture: a row for each layer and expert, a column for each report.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path

import torch
import torch.distributed as dist
from train_gpt import load_text, mean_over_ranks, windows
from transformers import MixtralConfig, MixtralForCausalLM

import zerorun

BAR = 40  # characters, for the expert with most rows

Loads = dict[str, list[int]]  # layer -> rows, by expert


def build_model(args: argparse.Namespace) -> MixtralForCausalLM:
    """A small Mixtral with a vocabulary of bytes, whose loss wants even loads."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=256,
            hidden_size=args.width,
            intermediate_size=2 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads,
            num_local_experts=args.experts,
            num_experts_per_tok=2,
            max_position_embeddings=args.context,
            output_router_logits=True,
            router_aux_loss_coef=0.05,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def busiest(rows: list[int]) -> float:
    """The load of the busiest expert, over the mean."""
    return len(rows) * max(rows) / sum(rows)


def as_text(loads: Loads) -> str:
    """A bar for each expert."""
    lines = []
    for layer, rows in loads.items():
        lines.append(f"{layer}: {sum(rows):,} rows, the busiest expert has {busiest(rows):.2f} x the mean")
        bars = ["#" * round(BAR * count / max(rows)) for count in rows]
        lines += [f"  {expert:3} {bar:{BAR}} {rows[expert]:,}" for expert, bar in enumerate(bars)]
    return "\n".join(lines)


def draw(history: list[tuple[int, Loads]], path: Path) -> None:
    """Save a picture: the share of each expert in the rows of its layer, over steps."""
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: no picture is drawn")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layers = list(history[0][1])
    figure, axes = pyplot.subplots(len(layers), 1, sharex=True, squeeze=False, figsize=(7, 1.6 * len(layers) + 1))
    for layer, axis in zip(layers, axes[:, 0], strict=True):
        shares = torch.tensor([loads[layer] for _, loads in history], dtype=torch.float64)
        shares = len(shares[0]) * shares / shares.sum(1, keepdim=True)
        image = axis.imshow(shares.T.tolist(), aspect="auto", cmap="RdBu_r", vmin=0, vmax=2)
        axis.set_ylabel(f"{layer.removeprefix('model.').removesuffix('.mlp.experts')}\nexpert", fontsize=8)
    axes[-1, 0].set_xticks(range(len(history)), [str(step) for step, _ in history])
    axes[-1, 0].set_xlabel("step")
    figure.colorbar(image, ax=axes, label="rows, over the mean of the layer")
    figure.savefig(path, dpi=120)
    print(f"{path} shows the loads")


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    engine = zerorun.initialize(model=build_model(args), config=args.config)
    first = dist.get_rank() == 0
    text, _ = load_text(args.data, args.context)
    history: list[tuple[int, Loads]] = []
    losses, began = [], time.perf_counter()
    for step in range(1, args.steps + 1):
        for _ in range(engine.gradient_accumulation_steps()):
            inputs, _ = windows(text, args.context, engine.train_micro_batch_size_per_gpu(), seed=engine.micro_steps)
            inputs = inputs.to(engine.device)
            loss = engine(input_ids=inputs, labels=inputs).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        if step % args.report_every == 0 or step in (1, args.steps):
            loads = engine.expert_load()  # all ranks must call it
            history.append((step, loads))
            train, speed = mean_over_ranks(losses), len(losses) * inputs.numel() / (time.perf_counter() - began)
            worst = max(map(busiest, loads.values()), default=1.0)
            if first:
                print(
                    f"step {step}/{args.steps}: loss {train:.3f}, {speed * dist.get_world_size():,.0f} tokens/s, "
                    f"busiest expert {worst:.2f} x the mean",
                    flush=True,
                )
            losses, began = [], time.perf_counter()
    if first and history[-1][1]:
        print(as_text(history[-1][1]))
        draw(history, Path(args.out))
    engine.destroy()


def parse_arguments() -> argparse.Namespace:
    parser = zerorun.add_config_arguments(argparse.ArgumentParser(description="Train a mixture of experts."))
    parser.set_defaults(config=str(Path(__file__).parent / "configs" / "moe.json"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--data", help="file or folder (default: the sources of Python's standard library)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--context", type=int, default=128, help="bytes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report-every", type=int, default=10, help="steps")
    parser.add_argument("--out", default="expert_loads.png", help="the picture")
    return parser.parse_args()


if __name__ == "__main__":
    main()
