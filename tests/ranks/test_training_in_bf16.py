"""Masters, gradients and optimizer states in bf16: the same bits at every stage, on any number of ranks and wherever states
are, in memory as estimated; checkpoints between all of these."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import by_day
from harness import run_ranks
from races import looking_for_races
from safetensors.torch import load_file
from simulation import simulated_device
from torch import nn
from training import PLACES, make_config, merged, placed, shared_topology, take_steps

import zerorun
from zerorun import LayerSpec, PipelineModule, TiedLayerSpec
from zerorun.checkpoint import gather, inventory
from zerorun.errors import ConfigError
from zerorun.ops.rounding import MasterFormat, Origin, join
from zerorun.ops.single_pass import Adam
from zerorun.ops.state_format import StateFormat

STEPS = 4
PARAMS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
PURE = {"bf16_master_weights_and_grads": True}
STATES = {"bf16_optimizer_states": True}

# What is kept in bf16 -> keys of the section, bytes per parameter of master and weight, gradient, and states.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "8 bytes": ({**PURE, **STATES}, (2, 2, 4)),
    "8 bytes, nearest": ({**PURE, **STATES, "rounding": "nearest"}, (2, 2, 4)),
    "10 bytes, Kahan": ({**PURE, **STATES, "rounding": "kahan"}, (4, 2, 4)),
    "12 bytes, masters and gradients": (PURE, (2, 2, 8)),
    "14 bytes, states": (STATES, (6, 4, 4)),
    "16 bytes, remainders": ({"store_param_remainders": True}, (4, 4, 8)),
    "12 bytes, remainders and states": ({"store_param_remainders": True, **STATES}, (4, 4, 4)),
}
FORMATS = ("8 bytes", "10 bytes, Kahan", "16 bytes, remainders")


class Net(nn.Module):
    """Sizes that no number of ranks divides, and a weight that two modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 51), nn.Tanh(), nn.Linear(51, 24)) for _ in range(3))
        self.head = nn.Linear(24, 37, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net() -> nn.Module:
    torch.manual_seed(5)
    return Net()


def loss_of(model: Any, step: int) -> torch.Tensor:
    """The same on every rank, so that the mean over two or four ranks has the bits of one."""
    ids = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def config_of(stage: int, kind: str, **changes: Any) -> dict[str, Any]:
    own = {"optimizer": {"type": "AdamW", "params": PARAMS}, "bf16": {"enabled": True, **KINDS[kind][0]}, "seed": 3}
    return merged(merged(make_config(stage), own), changes)


def steps(engine: zerorun.Engine, first: int = 0, count: int = STEPS) -> list[float]:
    return take_steps(engine, loss_of, first, count)


def plain(kind: str) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Training in one process, parameter by parameter: (losses, weights, values of masters)."""
    section, model = KINDS[kind][0], net()
    pure, remainders = "bf16_master_weights_and_grads" in section, "store_param_remainders" in section
    nearest, kahan = (section.get("rounding") == name for name in ("nearest", "kahan"))
    names = dict(model.named_parameters())
    masters = {name: param.detach().clone() for name, param in names.items()}
    rests: dict[str, torch.Tensor | None] = dict.fromkeys(names)
    model = model.bfloat16()
    if pure or remainders:
        form = MasterFormat.REMAINDER if remainders else MasterFormat.KAHAN if kahan else MasterFormat.BF16
        for name, value in masters.items():
            own, rest = form.parts(value.reshape(-1))
            masters[name], rests[name] = own.view(value.shape), rest
            names[name].data.copy_(masters[name])
    optimizer = Adam(list(masters.values()), **PARAMS)
    for name, master in masters.items():
        optimizer.formats[master] = StateFormat.BF16 if "bf16_optimizer_states" in section else StateFormat.FP32
        if rests[name] is not None:
            optimizer.rests[master] = rests[name]
        if not nearest and (pure or "bf16_optimizer_states" in section):
            optimizer.origins[master] = (Origin(0, master.numel(), name, seed=3),)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step)
        loss.backward()
        for name, param in names.items():
            assert param.grad is not None
            optimizer.gradients[masters[name]] = param.grad
        optimizer.step()
        for name, param in names.items():
            param.data.copy_(masters[name])
            param.grad = None
        losses.append(loss.item())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    exact = {name: join(master.reshape(-1), rests[name]).view(master.shape) for name, master in masters.items()}
    return losses, weights, exact


def states_of(engine: zerorun.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in engine.module.named_parameters():
        found[f"master {name}"] = zerorun.zero.safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} {name}"] = zerorun.zero.safe_get_full_optimizer_state(param, key)
    return found


def train(config: dict[str, Any]) -> dict[str, Any]:
    engine = zerorun.initialize(net(), config, topology=shared_topology(config["zero_optimization"].get("shard_degree")))
    losses = steps(engine)
    found = {
        "losses": losses,
        "states": states_of(engine),
        "report": engine.memory_report(),
        "weights": engine.state_dict(),
        "described": engine.describe(),
    }
    engine.destroy()
    return found


def settings(row: str, kind: str, folder: Path) -> dict[str, Any]:
    stage, changes = placed(row, folder)
    return config_of(stage, kind, gradient_clipping=0.0, zero_optimization=changes)


@pytest.mark.each_value
@pytest.mark.parametrize("row", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_same_bits_as_in_one_process_and_bytes_as_estimated_megatron_1821(
    row: str, kind: str, ranks: int, tmp_path: Path
) -> None:
    """Noise goes by positions in whole parameters, and never by what a rank has of them."""
    if "hybrid" in row:
        ranks = 4
    losses, weights, exact = plain(kind)
    config = settings(row, kind, tmp_path)
    estimate = zerorun.estimate_memory(net(), config, ranks, device="cpu", ranks_per_node=ranks)
    found = run_ranks(ranks, train, config)
    for rank in found:
        assert rank["losses"] == losses
        for name, value in weights.items():
            assert torch.equal(rank["weights"][name], value), name
    for name, value in exact.items():
        assert torch.equal(found[0]["states"][f"master {name}"], value), name
    heaviest = max(found, key=lambda rank: sum(rank["report"].values()))
    assert {key: size for key, size in heaviest["report"].items() if size} == {
        key: size for key, size in estimate.kinds.items() if size
    }
    assert sum(heaviest["report"].values()) <= 1.01 * sum(sum(rank["report"].values()) for rank in found) / ranks


@pytest.mark.parametrize("kind", KINDS)
def test_deepspeed_5784_bytes_of_a_parameter(kind: str) -> None:
    """8 where all is in bf16, and not 18; but for what aligns units."""
    numel = sum(param.numel() for param in net().parameters())
    kinds = zerorun.estimate_memory(net(), config_of(0, kind), 1, device="cpu").kinds
    held = kinds["parameters"] + kinds.get("master", 0), kinds["gradients"], kinds["moments"]
    assert tuple(round(size / numel) for size in held) == KINDS[kind][1]
    assert sum(held) <= 1.02 * numel * sum(KINDS[kind][1])


def learn(config: dict[str, Any], rule: str, params: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = zerorun.initialize(net(), merged(config, {"optimizer": {"type": rule, "params": {**params}}}))
    for step in range(3):
        if rule == "Sophia" and step == 1:
            engine.backward(loss_of(engine, 10), curvature=True)
        for micro in range(2):
            engine.backward(loss_of(engine, 2 * step + micro))
            engine.step()
    weights = engine.state_dict()
    engine.destroy()
    return weights


@pytest.mark.parametrize(
    ("rule", "params"),
    [
        ("Lion", {"lr": 1e-3}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1}),
        ("Adagrad", {"lr": 0.02}),
        ("AdamSAGE", {"lr": 1e-2}),
        ("Sophia", {"lr": 1e-3, "bs": 18}),
        ("AdamW8bit", {"lr": 1e-2, "min_8bit_size": 1000}),
    ],
)
def test_rules_of_one_pass(rule: str, params: dict[str, Any]) -> None:
    """Clipped, and accumulated in fp32: the same at stage 0 on one rank and at stage 3 on two; steps are counted."""
    kind = "12 bytes, masters and gradients" if rule == "AdamW8bit" else "8 bytes"
    changes = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.1, "data_types": {"grad_accum_dtype": "fp32"}}
    configs = [config_of(stage, kind, **changes) for stage in (0, 3)]
    for config in configs:
        del config["optimizer"]["params"]
    (one,) = run_ranks(1, learn, configs[0], rule, params)
    for found in run_ranks(2, learn, configs[1], rule, params):
        for name, value in one.items():
            assert float((found[name] - value).float().norm() / value.float().norm()) < 2e-3, name


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_and_go_on(config: dict[str, Any], folder: str) -> dict[str, Any]:
    engine = zerorun.initialize(net(), config)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder, "here")
    engine.export(f"{folder}/export", dtype="fp32")
    found = {"states": states_of(engine), "weights": engine.state_dict()}
    found["losses"] = steps(engine, 2, 2)
    engine.destroy()
    return found


def load_and_go_on(config: dict[str, Any], folder: str) -> dict[str, Any]:
    engine = zerorun.initialize(net(), config)
    engine.load_checkpoint(folder, "here")
    found = {"states": states_of(engine), "weights": engine.state_dict()}
    found["losses"] = steps(engine, 2, 2)
    engine.destroy()
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    "kind",
    by_day(tuple(KINDS), "10 bytes, Kahan"),
)
def test_checkpoints_go_to_any_number_of_ranks_bit_for_bit(kind: str, tmp_path: Path) -> None:
    saved = run_ranks(2, save_and_go_on, config_of(2, kind), str(tmp_path))[0]
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}}
    for ranks, stage, changes in ((3, 3, {}), (1, 0, {}), (2, 1, disk)):
        loaded = run_ranks(ranks, load_and_go_on, config_of(stage, kind, zero_optimization=changes), str(tmp_path))[0]
        assert_same(loaded["states"], saved["states"])
        assert_same(loaded["weights"], saved["weights"])
        if ranks < 3:  # the mean of three equal gradients may be rounded
            assert loaded["losses"] == saved["losses"]
    exported = {n: v for file in (tmp_path / "export").glob("model*.safetensors") for n, v in load_file(file).items()}
    for name, value in exported.items():
        assert value.dtype == torch.float32 and torch.equal(value, saved["states"][f"master {name}"])
    assert "embed.weight" in exported


@pytest.mark.parametrize("source", by_day(("fp32", *FORMATS), "fp32", "16 bytes, remainders"))
def test_checkpoints_go_from_each_format_to_each_other(source: str, tmp_path: Path) -> None:
    """What the narrower one cannot have is rounded to nearest, once; what both have stays."""
    kinds = {"fp32": "", **{kind: kind for kind in FORMATS}}

    def config(kind: str) -> dict[str, Any]:
        found = config_of(1, kind or "8 bytes")
        return found if kind else {**found, "bf16": {"enabled": True}}

    there = run_ranks(1, save_and_go_on, config(kinds[source]), str(tmp_path))[0]["states"]
    narrow = ("8 bytes", "10 bytes, Kahan")
    for target in kinds:
        found = run_ranks(2, load_and_go_on, config(kinds[target]), str(tmp_path))[0]["states"]
        for name, value in there.items():
            wanted = value
            if (name.startswith("exp_avg") and target in narrow) or (name.startswith("master") and target == "8 bytes"):
                wanted = value.bfloat16().float()
            elif name.startswith("master") and target == "10 bytes, Kahan":
                wanted = join(*MasterFormat.KAHAN.parts(value.reshape(-1))).view(value.shape)
            assert torch.equal(found[name], wanted), (target, name)


def save_in_pieces(config: dict[str, Any], folder: str, tensor_parallel: bool) -> tuple[dict[str, torch.Tensor], int, int]:
    """(values of masters, the most elements that were made fp32 at a time, and their sum) in a save and in an export."""
    torch.manual_seed(6)
    engine = zerorun.initialize(Llama() if tensor_parallel else net(), config)
    take_steps(engine, loss_of, 0, 2)
    made = []

    def counted(weight: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
        made.append(weight.numel())
        return join(weight, rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "_STRETCH", 64)
        patch.setattr(gather, "join", counted)
        patch.setattr(inventory, "join", counted)
        engine.save_checkpoint(folder, "here")
        engine.export(f"{folder}/export", dtype="fp32")
    masters = {n: zerorun.zero.safe_get_full_fp32_param(param) for n, param in engine.module.named_parameters()}
    engine.destroy()
    return masters, max(made, default=0), sum(made)


@pytest.mark.parametrize("kind", ["10 bytes, Kahan", "16 bytes, remainders", "8 bytes"])
@pytest.mark.parametrize(("ranks", "stage", "tensor"), [(1, 0, 1), (2, 3, 1), (2, 1, 2)])
def test_saves_make_fp32_of_masters_a_piece_at_a_time(
    kind: str, ranks: int, stage: int, tensor: int, tmp_path: Path
) -> None:
    """There is no fp32 copy of masters with a rest, also where ranks read each other's; those without are bf16 in files."""
    config = config_of(stage, kind, gradient_clipping=0.0)
    if tensor > 1:
        plan = {"up": "colwise", "down": "rowwise"}
        config = merged(config, {"tensor_parallel": {"size": tensor, "plan": plan}})
    found = run_ranks(ranks, save_in_pieces, config, str(tmp_path), tensor > 1)
    masters, total = found[0][0], 0
    own = "master" if kind != "8 bytes" else "model"
    for file in (f"here/{own}", "export/model"):
        files = [load_file(path) for path in tmp_path.glob(f"{file}-*.safetensors")]
        stored = {name: value for found_there in files for name, value in found_there.items()}
        assert stored.keys() == masters.keys() - {"head.weight"} | ({"head.weight"} if tensor > 1 else set())
        for name, value in stored.items():
            assert torch.equal(value.float(), masters[name].float()), name
            assert value.dtype == (torch.bfloat16 if file == "here/model" else torch.float32)
            total += value.numel()
    most, made = max(most for _, most, _ in found), sum(made for _, _, made in found)
    assert made == (total if own == "master" else 0)
    assert most <= 16 or tensor > 1  # what tensor ranks send each other is made at the beginning


def one_step(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    engine = zerorun.initialize(net(), config)
    steps(engine, 0, 1)
    found = states_of(engine), engine.state_dict()
    engine.destroy()
    return found


def test_an_update_with_remainders_is_that_of_fp32_masters() -> None:
    """To the bit; weights are rounded in the other direction only where masters lie between two of them."""
    config = config_of(1, "16 bytes, remainders")
    ((masters, weights),) = run_ranks(1, one_step, config)
    ((wanted, even),) = run_ranks(1, one_step, {**config, "bf16": {"enabled": True}})
    assert_same(masters, wanted)
    for name, weight in weights.items():
        if f"master {name}" in masters:
            apart = weight != even[name]
            assert bool((masters[f"master {name}"][apart].view(torch.int32) & 0xFFFF == 0x8000).all())


def edit(config: dict[str, Any]) -> None:
    """Masters and weights that are set by name are as they were set, as far as their format goes."""
    engine = zerorun.initialize(net(), config)
    steps(engine, 0, 1)
    param, before = engine.module.blocks[1][0].weight, states_of(engine)
    form = engine.plan.trainable[0].master_format
    value = torch.linspace(-1, 1, 51 * 24).view(51, 24)
    zerorun.zero.safe_set_full_fp32_param(param, value)
    wanted = join(*form.parts(value.reshape(-1))).view(51, 24)
    after = states_of(engine)
    assert [name for name, found in after.items() if not torch.equal(found, before[name])] == ["master blocks.1.0.weight"]
    assert torch.equal(after["master blocks.1.0.weight"], wanted)
    assert torch.equal(engine.state_dict()["blocks.1.0.weight"], form.parts(value.reshape(-1))[0].view(51, 24))
    local = zerorun.zero.safe_get_local_fp32_param(param)
    assert local is not None and local.dtype == torch.float32
    zerorun.zero.safe_set_local_fp32_param(param, local)
    assert torch.equal(states_of(engine)["master blocks.1.0.weight"], wanted)
    with zerorun.zero.GatheredParameters([param], modifier_rank=0):
        param.data.fill_(0.3)
    new = torch.full((51, 24), 0.3).bfloat16()
    kept = torch.where(form.parts(value.reshape(-1))[0].view(51, 24) == new, wanted, new)  # which were there already
    assert torch.equal(states_of(engine)["master blocks.1.0.weight"], kept)
    assert torch.equal(engine.state_dict()["blocks.1.0.weight"], new)
    steps(engine, 1, 1)
    if not engine.plan.shares_params:  # torch's own way has to do without what weights leave out
        masters, weights = states_of(engine), engine.state_dict()
        engine.module.load_state_dict({name: torch.full_like(v, 0.7) for name, v in engine.module.state_dict().items()})
        for name, master in states_of(engine).items():
            if name.startswith("master"):
                there = weights[name.removeprefix("master ")] == 0.69921875
                assert torch.equal(master, torch.where(there, masters[name], 0.69921875))
    engine.destroy()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("stage", by_day((0, 1, 3), 3))
def test_masters_by_name(kind: str, stage: int) -> None:
    run_ranks(2, edit, config_of(stage, kind))


# -- other axes and devices ---------------------------------------------------------------------------------------------


def on_simulated_device(config: dict[str, Any]) -> dict[str, Any]:
    with simulated_device():
        found = train(config)
    with simulated_device(), looking_for_races():
        train(config)
    return found


@pytest.mark.parametrize("kind", by_day(("8 bytes", "16 bytes, remainders"), "16 bytes, remainders"))
@pytest.mark.parametrize(
    "row", by_day(("stage 0", "stage 1, offload", "stage 2, disk", "stage 3, offload all", "stage 3"), "stage 2, disk")
)
def test_devices_with_memory_of_their_own(row: str, kind: str, tmp_path: Path) -> None:
    """Gradients and weights on their way, of 16 bits, through buffers that are as large as estimated."""
    losses, weights, exact = plain(kind)
    for rank in run_ranks(2, on_simulated_device, settings(row, kind, tmp_path)):
        assert rank["losses"] == losses
        assert_same(rank["weights"], weights)
        assert_same({name: rank["states"][f"master {name}"] for name in exact}, exact)


def leave_and_come_back(config: dict[str, Any]) -> list[float]:
    with simulated_device():
        engine = zerorun.initialize(net(), config)
        losses = steps(engine, 0, 2)
        engine.offload_states()
        assert not any(engine.memory_report()[kind] for kind in ("parameters", "gradients", "master", "moments"))
        losses += steps(engine, 2, 2)
        engine.destroy()
    return losses


def test_states_go_away_and_come_back() -> None:
    kind = "12 bytes, remainders and states"
    losses, _, _ = plain(kind)
    assert run_ranks(2, leave_and_come_back, config_of(3, kind, gradient_clipping=0.0))[0] == losses


class Llama(nn.Module):
    """Layers to divide: by rows, by columns, and by parts of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.up, self.down = nn.Linear(24, 48, bias=False), nn.Linear(48, 24, bias=False)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, 37, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


def on_tensor_ranks(config: dict[str, Any], still: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """``still``: all gradients are replaced by those of one process would be, so that only roundings could differ."""
    torch.manual_seed(6)
    engine = zerorun.initialize(Llama(), config)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        for number, param in enumerate(engine.module.parameters() if still else ()):
            found = zerorun.zero.safe_get_full_grad(param)
            assert found is not None
            noise = torch.randn(found.shape, generator=torch.Generator().manual_seed(10 * step + number))
            zerorun.zero.safe_set_full_grad(param, noise)
        engine.step()
    own = engine.module.norm.weight.detach().clone() if not engine.plan.shares_params else torch.zeros(0)
    found = engine.state_dict(), own
    weights = {name: zerorun.zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    engine.destroy()
    return weights, found[1]


def test_tensor_ranks_round_by_places_in_the_whole() -> None:
    """Given the gradients of one process, two tensor ranks come to its bits, and replicas of a norm stay equal."""
    plan = {"up": "colwise", "down": "rowwise"}
    config = config_of(1, "8 bytes", gradient_clipping=0.0)
    divided = merged(config, {"tensor_parallel": {"size": 2, "plan": plan}})
    ((alone, _),) = run_ranks(1, on_tensor_ranks, config, True)
    for weights, _ in run_ranks(4, on_tensor_ranks, divided, True):
        assert_same(weights, alone)
    both = run_ranks(4, on_tensor_ranks, divided, False)
    assert all(torch.equal(norm, both[0][1]) for _, norm in both)


def on_stages(config: dict[str, Any], stages: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A pipeline whose first and last layers are one embedding."""
    torch.manual_seed(7)
    tied = TiedLayerSpec("embed", nn.Embedding, 37, 24)
    back = TiedLayerSpec("embed", nn.Embedding, 37, 24, forward_fn=lambda layer, x: F.linear(x, layer.weight))
    body = [LayerSpec(nn.Sequential, nn.Linear(24, 51), nn.Tanh(), nn.Linear(51, 24)) for _ in range(2)]

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())

    engine = zerorun.initialize(PipelineModule([tied, *body, back], num_stages=stages, loss_fn=loss), config)
    losses = []
    for step in range(3):
        ids = torch.randint(37, (2, 8), generator=torch.Generator().manual_seed(step))
        losses.append(float(engine.train_batch(iter([(ids, ids)]))))
    own = {n: p.detach().clone() for n, p in engine.module.named_parameters() if p.shape == (37, 24)}
    engine.destroy()
    return losses, own


def test_copies_on_pipeline_stages_round_alike() -> None:
    found = run_ranks(2, on_stages, config_of(1, "8 bytes"), 2)
    (first,), (last,) = (list(own.values()) for _, own in found)
    assert torch.equal(first, last)
    alone, _ = run_ranks(1, on_stages, config_of(0, "8 bytes"), 1)[0]
    assert found[0][0] == pytest.approx(alone, rel=2e-3)


# -- refusals, and what is told -----------------------------------------------------------------------------------------


def shown(config: dict[str, Any]) -> str:
    engine = zerorun.initialize(net(), config)
    found = engine.describe()
    engine.destroy()
    return found


def test_the_chain_is_printed() -> None:
    found = {kind: run_ranks(1, shown, config_of(0, kind))[0] for kind in KINDS}
    assert "master bfloat16 rounded stochastic, accumulation bfloat16, sums float32" in found["8 bytes"]
    assert re.search("optimizer states bf16 for [0-9,]+ elements rounded stochastic", found["8 bytes"])
    assert "master bfloat16 rounded nearest, acc" in found["8 bytes, nearest"]
    assert "elements rounded nearest" in found["8 bytes, nearest"]
    assert "master bfloat16 rounded kahan" in found["10 bytes, Kahan"]
    assert "master float32 as bfloat16 and 16-bit remainders, acc" in found["16 bytes, remainders"]
    assert "master, accumulation and sums float32" in found["14 bytes, states"]
    config = zerorun.config.load_config(config_of(0, "8 bytes")).effective()
    assert config["bf16.rounding"].value == "stochastic" and config["bf16.bf16_optimizer_states"].value is True


def test_momentum_of_muon_stays_in_fp32() -> None:
    config = merged(make_config(1), {"bf16": {"enabled": True, **STATES}})
    config["optimizer"] = {"type": "Muon", "params": {"lr": 1e-3}}
    with pytest.raises(ConfigError, match=r"(?s)bf16.bf16_optimizer_states.*Muon cannot.*remove the key"):
        zerorun.estimate_memory(net(), config, 2, device="cpu")


def test_states_in_8_bits_are_not_kept_in_bf16() -> None:
    config = merged(make_config(1), {"bf16": {"enabled": True, **STATES}})
    config["optimizer"] = {"type": "AdamW8bit", "params": {"lr": 1e-3}}
    with pytest.raises(ConfigError, match="keeps states in 8 bits"):
        zerorun.estimate_memory(net(), config, 2, device="cpu")
