"""Adam in 8 bits: the same bits at every stage, on any number of ranks and wherever states are, in memory as estimated."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import run_ranks
from safetensors.torch import load_file
from torch import nn
from training import PLACES, make_config, merged, placed, shared_topology, take_steps

import zerorun
from zerorun import LayerSpec, PipelineModule, TiedLayerSpec
from zerorun.checkpoint.cli import main as command
from zerorun.ops.single_pass import Adam8bit
from zerorun.ops.state_format import BLOCK, StateFormat, keep_state, wide_state

STEPS = 4
CONVERTED = 2e-4  # nats by which a loss may differ after the first update from converted states: 0 and 4.4e-5 were seen
PARAMS = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}


class Body(nn.Module):
    """67 * 65 elements end within a block of 256; 96 * 64 at the end of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.odd, self.down = nn.Linear(64, 67), nn.Linear(67, 96), nn.Linear(96, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.odd(torch.tanh(self.up(x)))))


class Net(nn.Module):
    """An embedding that is large enough for 8 bits but for its role, blocks, and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, 64)
        self.blocks = nn.ModuleList(Body() for _ in range(2))
        self.head = nn.Linear(64, 80, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(tied: bool = False) -> nn.Module:
    torch.manual_seed(5)
    return Net(tied)


def loss_of(model: Any, step: int) -> torch.Tensor:
    """The same on every rank, so that the mean over ranks has the bits of one."""
    ids = torch.randint(80, (2, 9), generator=torch.Generator().manual_seed(step))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def config_of(stage: int, **changes: Any) -> dict[str, Any]:
    return merged(make_config(stage), merged({"optimizer": {"type": "AdamW8bit", "params": PARAMS}}, changes))


def steps(engine: zerorun.Engine, first: int = 0, count: int = STEPS) -> list[float]:
    return take_steps(engine, loss_of, first, count)


def plain(tied: bool = False) -> tuple[list[float], dict[str, torch.Tensor], Adam8bit, nn.Module]:
    """Training in one process, parameter by parameter."""
    model = net(tied)
    optimizer = Adam8bit(model.parameters(), **PARAMS)
    optimizer.formats[model.embed.weight] = StateFormat.FP32
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, optimizer, model


def states_of(engine: zerorun.Engine) -> dict[str, torch.Tensor]:
    found = {}
    for key in ("exp_avg", "exp_avg_sq"):
        for name, param in engine.module.named_parameters():
            value = zerorun.zero.safe_get_full_optimizer_state(param, key)
            assert value is not None
            found[f"{key} {name}"] = value
    return found


def train(config: dict[str, Any], tied: bool) -> dict[str, Any]:
    engine = zerorun.initialize(
        net(tied), config, topology=shared_topology(config["zero_optimization"].get("shard_degree"))
    )
    losses = steps(engine)
    found = {
        "losses": losses,
        "states": states_of(engine),
        "report": engine.memory_report(),
        "weights": engine.state_dict(),
    }
    kept = [engine.sharded.optimizer.state[piece.tensor] for piece in engine.sharded.pieces]
    found["bytes"] = sum(v.nbytes for state in kept for v in state.values() if v.dim())
    engine.destroy()
    return found


def settings(row: str, folder: Path) -> dict[str, Any]:
    stage, changes = placed(row, folder)
    return config_of(stage, zero_optimization=changes)


@pytest.mark.each_value
@pytest.mark.parametrize("row", PLACES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_same_bits_as_in_one_process_ao_4912(row: str, ranks: int, tmp_path: Path) -> None:
    """Which states have 8 bits, and their blocks, go by whole parameters, and never by what a rank has of them."""
    if "hybrid" in row and ranks < 4:
        ranks = 4
    losses, weights, optimizer, model = plain()
    config = settings(row, tmp_path)
    estimate = zerorun.estimate_memory(net(), config, ranks, device="cpu", ranks_per_node=ranks)
    found = run_ranks(ranks, train, config, False)
    for rank in found:
        assert rank["losses"] == losses
        for name, value in weights.items():
            assert torch.equal(rank["weights"][name], value), name
    names = {id(param): name for name, param in model.named_parameters()}
    for param, states in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            wanted = wide_state(states, key)
            assert torch.equal(found[0]["states"][f"{key} {names[id(param)]}"], wanted)
    moments = {kind: size for kind, size in estimate.kinds.items() if kind.endswith("moments")}
    shown = {kind: max(rank["report"].get(kind, 0) for rank in found) for kind in moments}
    assert shown == moments and sum(moments.values()) == max(rank["bytes"] for rank in found)
    heaviest = max(found, key=lambda rank: rank["bytes"])
    assert {kind: heaviest["report"].get(kind, 0) for kind in estimate.kinds} == dict(estimate.kinds)


def test_embeddings_and_tied_heads_have_fp32_states() -> None:
    losses, weights, _, _ = plain(tied=True)
    found = run_ranks(2, train, config_of(3), True)[0]
    assert found["losses"] == losses
    assert all(torch.equal(found["weights"][name], value) for name, value in weights.items())


def test_bytes_of_states() -> None:
    """2 * 65/64 bytes for a parameter in blocks, 8 for others; 8 bits for embeddings, too, if that is asked for."""
    counts = {name: param.numel() for name, param in net().named_parameters()}
    for embeddings, least in ((True, 4096), (False, 4096), (False, 0)):
        config = config_of(0, optimizer={"params": {"fp32_embeddings": embeddings, "min_8bit_size": least}})
        kinds = zerorun.estimate_memory(net(), config, 1, device="cpu").kinds
        wanted = 0
        for name, numel in counts.items():
            small = numel < least or (embeddings and "embed" in name)
            blocks = -(-numel // BLOCK)
            wanted += 8 * numel if small else 2 * (BLOCK * blocks if numel % BLOCK else numel) + 8 * blocks
        assert abs(kinds["moments"] - wanted) <= 16 * 8 * len(counts)  # parameters in fp32 begin at multiples of 16


# -- checkpoints -------------------------------------------------------------------------------------------------------


def with_kind(config: dict[str, Any], kind: str) -> dict[str, Any]:
    return merged(config, {"optimizer": {"type": kind}})


def save_and_go_on(config: dict[str, Any], folder: str) -> dict[str, Any]:
    engine = zerorun.initialize(net(), config)
    steps(engine, 0, 2)
    engine.save_checkpoint(folder, "here")
    states = states_of(engine)
    losses = steps(engine, 2, 2)
    engine.destroy()
    return {"losses": losses, "states": states}


def load_and_go_on(config: dict[str, Any], folder: str) -> dict[str, Any]:
    engine = zerorun.initialize(net(), config)
    engine.load_checkpoint(folder, "here")
    states = states_of(engine)
    kept = {v.dtype for piece in engine.sharded.pieces for v in engine.sharded.optimizer.state[piece.tensor].values()}
    losses = steps(engine, 2, 2)
    engine.destroy()
    return {"losses": losses, "states": states, "dtypes": kept}


def stored(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """All tensors of a set."""
    files = (folder / "here").glob(f"{kind}-*-of-*.safetensors")
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_checkpoints_go_to_any_number_of_ranks_ao_1185_axolotl_2744_bnb_89(tmp_path: Path) -> None:
    """Saved by two, loaded by three, by one and from a disk, bit for bit."""
    saved = run_ranks(2, save_and_go_on, config_of(2), str(tmp_path))[0]
    codes, scales = stored(tmp_path, "optimizer.exp_avg"), stored(tmp_path, "optimizer.exp_avg.scale")
    assert codes["blocks.0.odd.weight"].dtype == torch.uint8 and codes["blocks.0.odd.weight"].shape == (96, 67)
    assert scales["blocks.0.odd.weight"].shape == (26,) and "embed.weight" not in scales
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}}
    for ranks, stage, changes in ((3, 3, {}), (1, 0, {}), (2, 1, disk)):
        loaded = run_ranks(ranks, load_and_go_on, config_of(stage, zero_optimization=changes), str(tmp_path))
        for rank in loaded:
            assert_same(rank["states"], saved["states"])
        if ranks < 3:  # the mean of three equal gradients may be rounded
            assert loaded[0]["losses"] == saved["losses"]
    assert torch.uint8 in loaded[0]["dtypes"]


def test_back_to_fp32_and_to_8_bits_accelerate_1902(tmp_path: Path) -> None:
    """From 8 bits to fp32 nothing is lost. The other way, each value is rounded once."""
    saved = run_ranks(2, save_and_go_on, config_of(1), str(tmp_path / "8"))[0]
    wide = run_ranks(3, load_and_go_on, with_kind(config_of(3), "AdamW"), str(tmp_path / "8"))[0]
    assert wide["dtypes"] == {torch.float32}
    assert_same(wide["states"], saved["states"])
    assert wide["losses"] == pytest.approx(saved["losses"], rel=0, abs=CONVERTED)
    saved = run_ranks(2, save_and_go_on, with_kind(config_of(1), "AdamW"), str(tmp_path / "32"))[0]
    narrow = run_ranks(3, load_and_go_on, config_of(3), str(tmp_path / "32"))[0]
    assert narrow["losses"] == pytest.approx(saved["losses"], rel=0, abs=CONVERTED)
    for name, value in narrow["states"].items():
        wanted = saved["states"][name]
        if "embed" in name or wanted.numel() < 4096:
            assert torch.equal(value, wanted)
        else:
            states = {"exp_avg_sq" if "_sq" in name else "exp_avg": torch.zeros(wanted.numel(), dtype=torch.uint8)}
            (key,) = states
            states[f"{key}.scale"] = torch.zeros(-(-wanted.numel() // BLOCK))
            keep_state(states, key, wanted)
            assert torch.equal(value.view(-1), wide_state(states, key))
            assert float((value - wanted).norm() / wanted.norm()) < 0.02


def edit(config: dict[str, Any]) -> None:
    """A state that is set by name is rounded; those of other parameters stay as they are."""
    engine = zerorun.initialize(net(), config)
    steps(engine, 0, 2)
    param, before = engine.module.blocks[1].odd.weight, states_of(engine)
    value = torch.full(param.shape if param.numel() else (96, 67), 0.5)
    zerorun.zero.safe_set_full_optimizer_state(param, value, "exp_avg")
    after = states_of(engine)
    changed = [name for name, found in after.items() if not torch.equal(found, before[name])]
    assert changed == ["exp_avg blocks.1.odd.weight"]
    assert torch.equal(after[changed[0]], value)
    local = zerorun.zero.safe_get_local_optimizer_state(param, "exp_avg_sq")
    zerorun.zero.safe_set_local_optimizer_state(param, local, "exp_avg_sq")
    assert torch.equal(zerorun.zero.safe_get_local_optimizer_state(param, "exp_avg_sq"), local)
    engine.destroy()


def test_states_by_name() -> None:
    run_ranks(2, edit, config_of(3))


def test_commands_understand_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Codes are compared as the values that they stand for; scales that do not fit are found."""
    for name, changes in (("one", {}), ("two", {"optimizer": {"params": {"lr": 2e-2}}})):
        run_ranks(1, save_and_go_on, config_of(0, **changes), str(tmp_path / name))
    one, two = (str(tmp_path / name / "here") for name in ("one", "two"))
    assert command(["verify", one]) == 0
    assert command(["inspect", one]) == 0
    shown = capsys.readouterr().out
    assert "exp_avg U8" in shown and "exp_avg.scale [26] F32" in shown
    assert command(["diff", one, one]) == 0
    assert command(["diff", one, two]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"optimizer\.exp_avg: .* differing by up to 0\.\d+", shown)


# -- other axes --------------------------------------------------------------------------------------------------------


class Llama(nn.Module):
    """Layers to divide: rows of whole blocks, of which tensor ranks get whole blocks, but of ``odd``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(80, 256)
        self.up, self.down = nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)
        self.wide, self.odd = nn.Linear(256, 96, bias=False), nn.Linear(96, 256, bias=False)
        self.head = nn.Linear(256, 80, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x + self.odd(torch.relu(self.wide(x))))


PLAN = {"up": "colwise", "down": "rowwise", "wide": "colwise", "odd": "rowwise"}


def llama() -> nn.Module:
    torch.manual_seed(6)
    return Llama()


def of_llama(tensor: int, stage: int) -> dict[str, Any]:
    return config_of(stage, tensor_parallel={"size": tensor, "plan": PLAN} if tensor > 1 else {})


def on_llama(config: dict[str, Any], folder: str, load: bool) -> dict[str, Any]:
    engine = zerorun.initialize(llama(), config)
    if load:
        engine.load_checkpoint(folder, "here")
    losses = [] if load else steps(engine, 0, 2)
    found: dict[str, Any] = {"states": states_of(engine), "report": engine.memory_report()}
    if not load:
        engine.save_checkpoint(folder, "here")
    found["losses"] = losses + steps(engine, 2, 2)
    engine.destroy()
    return found


def test_tensor_ranks(tmp_path: Path) -> None:
    """Training is the same to rounding. Blocks are stored as such where they are blocks of the whole."""
    alone = run_ranks(1, on_llama, of_llama(1, 0), str(tmp_path / "1"), False)[0]
    both = run_ranks(4, on_llama, of_llama(2, 2), str(tmp_path / "2"), False)
    assert both[0]["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    for name, value in alone["states"].items():
        assert float((both[0]["states"][name] - value).norm() / value.norm()) < 0.03, name
    codes = stored(tmp_path / "2", "optimizer.exp_avg")
    assert {name for name, value in codes.items() if value.dtype == torch.float32} == {"embed.weight", "odd.weight"}
    for ranks, tensor, stage in ((1, 1, 0), (3, 1, 3), (2, 2, 1)):
        loaded = run_ranks(ranks, on_llama, of_llama(tensor, stage), str(tmp_path / "2"), True)[0]
        for name, value in both[0]["states"].items():
            if "odd" in name:
                assert float((loaded["states"][name] - value).norm() / value.norm()) < 0.02
            else:
                assert torch.equal(loaded["states"][name], value), name
        assert loaded["losses"] == pytest.approx(both[0]["losses"][2:], rel=1e-4)
    back = run_ranks(2, on_llama, of_llama(2, 3), str(tmp_path / "1"), True)[0]
    for name, value in alone["states"].items():
        if "odd" not in name:
            assert torch.equal(back["states"][name], value), name
    estimate = zerorun.estimate_memory(llama(), of_llama(2, 2), 4, device="cpu", ranks_per_node=4)
    assert max(rank["report"]["moments"] for rank in both) == estimate.kinds["moments"]


def on_stages(config: dict[str, Any], stages: int) -> tuple[list[float], list[str]]:
    """A pipeline whose first and last layers are one embedding, seen as such by the first stage only."""

    def made() -> list[Any]:
        torch.manual_seed(7)
        tied = TiedLayerSpec("embed", nn.Embedding, 80, 64)
        back = TiedLayerSpec("embed", nn.Embedding, 80, 64, forward_fn=lambda layer, x: F.linear(x, layer.weight))
        return [tied, LayerSpec(Body), LayerSpec(Body), back]

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())

    engine = zerorun.initialize(PipelineModule(made(), num_stages=stages, loss_fn=loss), config)
    losses = []
    for step in range(3):
        ids = torch.randint(80, (2, 8), generator=torch.Generator().manual_seed(step))
        losses.append(float(engine.train_batch(iter([(ids, ids)]))))
    formats = [
        f"{entry.numel} {format.value}"
        for group in engine.plan.trainable
        for entry, format in zip(group.layout.entries, group.state_formats, strict=True)
    ]
    engine.destroy()
    return losses, formats


def test_pipeline_stages_agree_on_formats() -> None:
    alone, _ = run_ranks(1, on_stages, config_of(0), 1)[0]
    found = run_ranks(4, on_stages, config_of(1), 2)
    for losses, formats in found:
        assert losses == pytest.approx(alone, rel=1e-4)
        assert "5120 fp32" in formats and "6144 block8" in formats
