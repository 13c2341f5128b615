"""Where optimizers and precisions come to: a small GPT learns a random chain, every row beside AdamW in fp32.

    python tests/perf/optimizers.py [--json tests/perf/results/optimizers.json] [--plot examples/optimizers.png]

Each row trains 400 steps for each of 2 seeds, on two ranks with one thread each; all rows of a seed begin with the same
weights and read the same batches. Its figure is the loss in nats on sentences that it was not trained on, averaged over
seeds. A chain has a known entropy, below which no loss can be, and where a model comes near it, roundings no longer decide
how much it has learned: on English text, bf16 and fp32 were 0.05 nats apart after as many steps.
Learning rates are usual ones and were not tuned, so the rows say whether an optimizer works, and not which one is best.
Fails if a row that claims the result of another one, AdamW in fp32 for most, is further from it than its limit.
Rows of fp8 and ScheduleFree need packages: pip install torchao schedulefree.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 8  # BATCH: samples per rank
SYMBOLS = 64
STEPS, WARM_UP, SEEDS, RANKS = 400, 20, 2, 2
HELD_OUT = 512  # samples per rank
EVERY = 20  # steps between two points of the plot
BASE = "AdamW, fp32"
NATS = 0.01  # within which a row is as good as AdamW in fp32
WORSE = 0.005  # from which on it is worse: five times of what rounding in other ways makes


@dataclass(frozen=True)
class Row:
    """One way to train. ``bytes``: per parameter, of weights, gradients and states, as ``docs/memory.md`` counts them.

    ``above``, ``below``: limits of its loss minus that of the row ``beside``, in nats. ``curvature_every``: steps between
    two backwards on sampled labels. ``own_linear``: whether products are summed in fp32, see ``build_model``.
    """

    optimizer: str
    params: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    above: float = -1.0
    below: float = 1.0
    curvature_every: int = 0
    beside: str = BASE
    own_linear: bool = True


_ADAM: dict[str, Any] = {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
_MUON: dict[str, Any] = {**_ADAM, "momentum": 0.95}
_LAMB: dict[str, Any] = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}
_CODES: dict[str, Any] = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
_BF16: dict[str, Any] = {"bf16": {"enabled": True}}


def _kept(*keys: str, rounding: str = "stochastic") -> dict[str, Any]:
    """bf16 in which ``keys`` of its section are true."""
    return {"bf16": {"enabled": True, **dict.fromkeys(keys, True), "rounding": rounding}}


_PURE = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
ROWS: dict[str, Row] = {
    BASE: Row("AdamW", _ADAM),
    "AdamW, bf16": Row("AdamW", _ADAM, _BF16, below=NATS),
    "bf16 alone, 8 bytes": Row("AdamW", _ADAM, _kept(*_PURE), below=NATS),
    "bf16 alone, nearest": Row("AdamW", _ADAM, _kept(*_PURE, rounding="nearest"), above=WORSE),
    "bf16 alone, Kahan, 10 bytes": Row("AdamW", _ADAM, _kept(*_PURE, rounding="kahan"), below=NATS),
    "bf16 moments, 14 bytes": Row("AdamW", _ADAM, _kept("bf16_optimizer_states"), below=NATS),
    "bf16 and remainders, 16 bytes": Row("AdamW", _ADAM, _kept("store_param_remainders"), below=NATS),
    "AdamW8bit": Row("AdamW8bit", _ADAM, below=NATS),
    "AdamW8bit, bf16": Row("AdamW8bit", _ADAM, _BF16, below=NATS),
    "Muon": Row("Muon", _MUON),
    "Muon, bf16 masters": Row("Muon", _MUON, _kept(_PURE[0]), below=NATS, beside="Muon"),
    "Lion": Row("Lion", {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.5}),
    "LAMB": Row("Lamb", _LAMB),
    "LAMB, bf16 alone": Row("Lamb", _LAMB, _kept(*_PURE), below=NATS, beside="LAMB"),
    "Adafactor": Row("Adafactor", {"lr": 3e-2}),
    "Adafactor, bf16 alone": Row("Adafactor", {"lr": 3e-2}, _kept(*_PURE), below=NATS, beside="Adafactor"),
    "AdamSAGE": Row("AdamSAGE", {"lr": 1e-2, "betas": [0.9, 0.95], "beta3": 0.75}),
    "Sophia": Row("Sophia", {"lr": 1e-3, "bs": RANKS * BATCH * CONTEXT, "weight_decay": 0.1}, curvature_every=10),
    "RAdam": Row("RAdam", {"lr": 3e-3, "betas": [0.9, 0.95]}),
    "SGD, momentum": Row("SGD", {"lr": 0.3, "momentum": 0.9}),
    "Adagrad": Row("Adagrad", {"lr": 3e-2}),
    "ScheduleFree": Row("schedulefree.AdamWScheduleFree", {**_ADAM, "warmup_steps": WARM_UP}, {"scheduler": None}),
    "fp8, bf16": Row("AdamW", _ADAM, {**_BF16, "fp8": {"enabled": True, "recipe": "rowwise"}}, own_linear=False),
    "codes on the wire": Row("AdamW", _ADAM, {"zero_optimization": _CODES}),
}


# -- one row, one seed, on one rank ------------------------------------------------------------------------------------


def build_model(own_linear: bool = True) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional as F

    class SumsInFp32(nn.Linear):
        """Sums in fp32 and rounds once, as processors with bf16 do; what others have takes 9 times as long."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            bias = None if self.bias is None else self.bias.float()
            return F.linear(x.float(), self.weight.float(), bias).to(x.dtype)

    Linear = SumsInFp32 if own_linear else nn.Linear  # fp8 replaces layers of torch, not those with a forward of their own

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.out = Linear(WIDTH, 3 * WIDTH), Linear(WIDTH, WIDTH)
            self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
            q, k, v = (part.transpose(1, 2).float() for part in qkv.unbind(2))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape).to(x.dtype))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(SYMBOLS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm, self.head = nn.LayerNorm(WIDTH), Linear(WIDTH, SYMBOLS, bias=False)
            for name, param in self.named_parameters():
                if param.dim() == 2:
                    scale = 0.02 / (2 * LAYERS) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 0.02
                    nn.init.normal_(param, std=scale)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Gpt()


class Data:
    """Sentences of a random chain: how likely a symbol is depends on the one before it. The same for all rows."""

    def __init__(self, seed: int) -> None:
        import torch

        logits = 2.0 * torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(0))
        self._follows = torch.softmax(logits, 1)
        self._random = torch.Generator().manual_seed(seed)

    def batch(self, size: int = BATCH) -> tuple[Any, Any]:
        """(symbols [size, CONTEXT], those that follow them)."""
        import torch

        symbols = [torch.randint(SYMBOLS, (size,), generator=self._random)]
        for _ in range(CONTEXT):
            symbols.append(torch.multinomial(self._follows[symbols[-1]], 1, generator=self._random)[:, 0])
        found = torch.stack(symbols, 1)
        return found[:, :-1], found[:, 1:]

    def entropy(self) -> float:
        """The least loss that there can be, in nats: the mean over symbols, as often as they come."""
        import torch

        often = torch.linalg.matrix_power(self._follows.double(), 100)[0]
        return float(-(often[:, None] * self._follows * self._follows.log()).sum())


def train(row: Row, seed: int, steps: int) -> dict[str, Any]:
    """The losses of training, averaged over every ``EVERY`` steps, and the held-out loss; all ranks' means."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F

    import zerorun

    torch.manual_seed(seed)
    rank = int(os.environ["RANK"])
    data, unseen = Data(1000 * seed + rank), Data(-1 - rank)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": row.optimizer, "params": row.params},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": WARM_UP}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        **row.config,
    }
    engine = zerorun.initialize(build_model(row.own_linear), config)
    averages = hasattr(engine.optimizer, "eval")  # ScheduleFree evaluates with other weights than it trains
    if averages:
        engine.optimizer.train()

    def loss_of(batch: tuple[Any, Any]) -> Any:
        return F.cross_entropy(engine(batch[0]).float().flatten(0, 1), batch[1].flatten())

    curve, recent = [], []
    for step in range(steps):
        batch = data.batch()
        if row.curvature_every and step % row.curvature_every == 0:
            logits = engine(batch[0]).float()
            labels = zerorun.sampled_labels(logits)
            engine.backward(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), curvature=True)
        loss = loss_of(batch)
        engine.backward(loss)
        engine.step()
        recent.append(loss.detach())
        if (step + 1) % EVERY == 0:
            curve.append(_mean(torch.stack(recent).mean()))
            recent.clear()
    engine.eval()
    if averages:
        engine.optimizer.eval()
    with torch.no_grad():
        held_out = _mean(loss_of(unseen.batch(HELD_OUT)))
    engine.destroy()
    dist.destroy_process_group()
    return {"curve": curve, "held_out": held_out}


def _mean(value: Any) -> float:
    import torch.distributed as dist

    value = value.double()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


# -- all rows ----------------------------------------------------------------------------------------------------------


def run(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train in processes of its own. Raises RuntimeError with their last lines if they fail."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
        command += ["--worker", name, "--seed", str(seed), "--steps", str(steps), "--json", result.name]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        written = Path(result.name).read_text()
        if not written:
            raise RuntimeError(f"{name} failed:\n" + "\n".join(done.stderr.splitlines()[-15:]))
        return dict(json.loads(written))


def difference(found: dict[str, list[dict[str, Any]]], name: str, beside: str = BASE) -> float:
    """The held-out loss of a row minus that of another one, averaged over seeds."""
    pairs = zip(found[name], found[beside], strict=True)
    return statistics.fmean(one["held_out"] - base["held_out"] for one, base in pairs)


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = [f"The entropy of the chain is {Data(0).entropy():.3f} nats.", ""]
    lines += ["| row | lr | loss on new sentences, nats | minus AdamW in fp32 | limit |", "|---|---:|---:|---:|---|"]
    for name, results in found.items():
        row, loss = ROWS[name], statistics.fmean(result["held_out"] for result in results)
        limit = f"at most {row.below:+g}" if row.below < 1 else f"at least {row.above:+g}" if row.above > -1 else ""
        if row.beside != BASE:
            limit += f" from {row.beside}: {difference(found, name, row.beside):+.3f}"
        lines.append(f"| {name} | {row.params['lr']:g} | {loss:.3f} | {difference(found, name):+.3f} | {limit} |")
    return "\n".join(lines)


def _as_claimed(found: dict[str, list[dict[str, Any]]], name: str) -> bool:
    row = ROWS[name]
    return row.above <= difference(found, name, row.beside) <= row.below


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (whole, end) = pyplot.subplots(1, 2, figsize=(13, 4.8), layout="constrained")
    for number, (name, results) in enumerate(found.items()):
        curves = [result["curve"] for result in results]
        mean = [statistics.fmean(points) for points in zip(*curves, strict=True)]
        steps = [EVERY * (index + 1) for index in range(len(mean))]
        style = {"color": f"C{number % 10}", "linestyle": ("-", "--", ":", "-.")[number // 10], "linewidth": 1.3}
        whole.plot(steps, mean, label=name, **style)
        end.plot(steps[-6:], mean[-6:], **style)
    whole.set(title="training loss, nats", xlabel="step")
    end.set(title="its end", xlabel="step")
    figure.legend(fontsize=7, loc="outside right upper")
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", nargs="*", choices=list(ROWS), help="with those that they are compared with; all if not given"
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--plot", type=Path, help="file for the picture")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result = train(ROWS[args.worker], args.seed, args.steps)
        if os.environ["RANK"] == "0":
            args.json.write_text(json.dumps(result))
        return 0
    wanted = set(args.rows if args.rows is not None else ROWS)
    wanted |= {BASE, *(ROWS[name].beside for name in wanted)}
    names = [name for name in ROWS if name in wanted]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for seed in range(args.seeds):
        for name in names:
            found[name].append(run(name, seed, args.steps))
            print(f"seed {seed}, {name}: {found[name][-1]['held_out']:.4f}", flush=True)
    print(table(found))
    if args.plot:
        draw(found, args.plot)
    if args.json:
        versions = {"python": platform.python_version(), "machine": platform.machine()}
        record = {"command": " ".join(sys.argv), "versions": versions, "cpus": os.cpu_count(), "found": found}
        args.json.write_text(json.dumps(record, indent=1))
    wrong = [name for name in names if not _as_claimed(found, name)]
    for name in wrong:
        print(f"NOT AS IT SHOULD BE: {name}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
