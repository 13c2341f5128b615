"""What a script does to parameters behind the engine's back: it counts, or is refused by name, and is never lost."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_bad_input import attempt
from test_parallel_matrix import batch_of
from test_parallel_matrix import build as divided_model
from torch import nn
from training import make_config

import zerorun
from zerorun.deepspeed.entry import initialize as initialize_as_deepspeed
from zerorun.model_setup.parallelized_model import ParallelizedModel
from zerorun.zero.runtime import refuse_managed


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).mean()


def data(rank: int | None = None) -> torch.Tensor:
    """That of a rank; None: this one."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank() if rank is None else rank))


def build() -> Layers:
    torch.manual_seed(0)
    return Layers()


def step(engine: zerorun.Engine) -> float:
    loss = engine.backward(engine(data()))
    engine.step()
    return float(loss)


def second_engine(stage: int, how: str) -> tuple[Any, ...]:
    model = build()
    initialize = zerorun.initialize if how != "mode" else deepspeed_engine
    first: zerorun.Engine | None = initialize(model, make_config(stage))
    assert first is not None
    step(first)
    if how == "one rank" and dist.get_rank() == 0:
        first = None
    again = model.blocks[0] if how == "part" else model
    answer = attempt(lambda: initialize(again, make_config(stage)))
    if first is not None and how != "one rank":
        first.destroy()
    first = None
    second = initialize(model, make_config(stage))
    assert step(second) > step(second)
    second.destroy()
    return answer


@pytest.mark.each_value
@pytest.mark.parametrize("how", ("kept", "one rank", "part", "mode"))
@pytest.mark.parametrize("stage", (0, 1, 3))
def test_a_module_has_one_engine_at_a_time(stage: int, how: str) -> None:
    """``how``: whether all ranks have the first one yet."""
    for kind, text in run_ranks(2, second_engine, stage, how):
        assert kind == "ModelError"
        for word in ("belongs to an engine already", "destroy()", "trainer.accelerator.free_memory()", "anew"):
            assert word in text


def second_engine_of_stages() -> tuple[str, str]:
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model = zerorun.PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    zerorun.initialize(model, make_config(1, pipeline={"stages": 2}))  # and is dropped
    return attempt(lambda: zerorun.initialize(model, make_config(1, pipeline={"stages": 2})))


def test_a_pipeline_whose_engine_nobody_has_is_refused() -> None:
    """Other stages may still wait for what it has begun. Nobody can destroy it any more, so it is not asked for."""
    for kind, text in run_ranks(2, second_engine_of_stages):
        assert kind == "ModelError" and "has dropped" in text and "Remedy: build the model anew; or keep the engine" in text


RATES = (0.01, 0.03)


def plain_runs(model: Layers, runs: int) -> dict[str, torch.Tensor]:
    """The weights after ``runs`` of three steps each, each with an optimizer of its own, in one process."""
    for _ in range(runs):
        optimizer = own_optimizer(model, RATES)
        for _ in range(3):
            optimizer.zero_grad()
            (sum(model(data(rank)) for rank in range(dist.get_world_size())) / dist.get_world_size()).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def moved(model: Layers) -> Layers:
    """Another module with the parameters themselves of ``model``, as where adapters are taken off a model."""
    other = Layers()
    for layer, of in ((other.head, model.head), *zip(other.blocks, model.blocks, strict=True)):
        layer.weight, layer.bias = of.weight, of.bias
    return other


def run_again(stage: int, precision: str, own: bool, folder: str, moves: bool = False) -> list[dict[str, torch.Tensor]]:
    """The weights after two runs of one model: in one process, with destroy() between them, and where only a cycle has
    the first engine, in which rank 0 alone has looked for garbage. ``moves``: another module has the parameters then."""
    config = make_config(stage, precision=precision, checkpoint={"dir": folder, "every_steps": 100})
    if own:
        del config["optimizer"]
    found = [plain_runs(build(), 2)]
    for destroys in (True, False):
        model = build()
        for run in range(2):
            engine = zerorun.initialize(model, config, optimizer=own_optimizer(model, RATES) if own else None)
            for _ in range(3):
                step(engine)
            if run:
                found.append(engine.state_dict(exact=True))
            if run or destroys:
                engine.destroy(exact=True)
                continue
            trainer = [engine]
            trainer.append(trainer)  # type: ignore[arg-type]
            gc.disable()
            del engine, trainer
            model = moved(model) if moves else model
            if dist.get_rank() == 0 and not moves:
                gc.collect()
        gc.enable()
        assert all(param.dtype == torch.float32 for param in model.parameters())
    return found


@pytest.mark.each_value
@pytest.mark.parametrize("own", (False, True))
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (0, "bf16"), (3, "bf16")])
def test_a_module_whose_engine_nobody_has_trains_on(stage: int, precision: str, own: bool, tmp_path: Path) -> None:
    """As where a second trainer is made, and the first one dropped: its engine kept the module for good."""
    for plain, destroyed, dropped in run_ranks(2, run_again, stage, precision, own, str(tmp_path)):
        for name, value in dropped.items():
            assert torch.equal(value, destroyed[name])
            if own and precision == "fp32":
                assert torch.allclose(value, plain[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "fp32"), (3, "bf16")])
def test_parameters_whose_engine_nobody_has_train_on_in_another_module(stage: int, precision: str, tmp_path: Path) -> None:
    """No hook is in it, so that the engine that is gone was taken for one that somebody has."""
    for plain, destroyed, dropped in run_ranks(2, run_again, stage, precision, True, str(tmp_path), True):
        for name, value in dropped.items():
            assert torch.equal(value, destroyed[name])
            if precision == "fp32":
                assert torch.allclose(value, plain[name], rtol=1e-5, atol=1e-6)


def parameter_of_an_engine_of_one_rank(stage: int) -> tuple[str, str]:
    model = build()
    first: zerorun.Engine | None = zerorun.initialize(model, make_config(stage))
    if dist.get_rank() == 0:
        first = None
    found = attempt(lambda: zerorun.initialize(moved(model), make_config(stage)))
    del first
    zerorun.initialize(model, make_config(stage)).destroy()
    return found


@pytest.mark.parametrize("stage", (1, 3))
def test_an_engine_that_a_rank_has_keeps_its_parameters(stage: int) -> None:
    for kind, text in run_ranks(2, parameter_of_an_engine_of_one_rank, stage):
        assert kind == "ModelError"
        assert "of another engine's model, too" in text and "drop it on all ranks" in text


def deepspeed_engine(model: nn.Module, config: dict[str, Any], **options: Any) -> zerorun.Engine:
    return initialize_as_deepspeed(model=model, config=config, **options)[0]


def train_what_is_looked_at(stage: int, precision: str) -> list[dict[str, torch.Tensor]]:
    """The weights of a model: trained in one process, by an engine alone, and where one without an optimizer has it, too.

    That one is asked before, between and after, and says what the model does.
    """
    config = make_config(stage, precision=precision)
    without = {key: value for key, value in config.items() if key != "optimizer"}
    del config["optimizer"]
    model, plain, alone = build(), build(), build()
    if precision == "bf16":  # an engine without an optimizer keeps no other digits, as in DeepSpeed
        alone.bfloat16().float()
    for trained in (model, plain, alone):
        trained.blocks[1].bias.requires_grad_(False)
    looks = deepspeed_engine(model, without)
    with torch.no_grad():
        before = looks(data())
        assert torch.allclose(before.float(), plain(data()), rtol=1e-2 if precision == "bf16" else 1e-6)
    assert attempt(lambda: zerorun.initialize(model, config))[0] == "ModelError", (
        "outside of the mode it is destroyed first"
    )
    engine = deepspeed_engine(model, config, optimizer=own_optimizer(model, RATES))
    with torch.no_grad():
        assert torch.equal(looks(data()), before)
    for _ in range(3):
        step(engine)
    with torch.no_grad():
        assert not torch.equal(looks(data()), before) and torch.equal(looks(data()), engine(data()))
    assert attempt(lambda: deepspeed_engine(model, config))[0] == "ModelError", "this one trains"
    looks.destroy()
    with torch.no_grad():
        assert not torch.equal(engine(data()), before), "that was of another engine"
    found = [plain_runs(plain, 1), engine.state_dict(exact=True)]
    engine.destroy()
    engine = deepspeed_engine(alone, config, optimizer=own_optimizer(alone, RATES))
    for _ in range(3):
        step(engine)
    found.append(engine.state_dict(exact=True))
    engine.destroy()
    return found


def look_at_divided_layers() -> None:
    """An engine that has given its module back goes on, without groups of ranks of its own."""
    model, config = divided_model("llama"), make_config(3, tensor_parallel={"size": 2})
    looks = deepspeed_engine(model, {key: value for key, value in config.items() if key != "optimizer"})
    ids = batch_of(0, 0, 0)["input_ids"]
    with torch.no_grad():
        before = looks(ids)
        engine = deepspeed_engine(model, config)
        again = engine(ids)
        with patch.object(ParallelizedModel, "of_same_batch", side_effect=AssertionError("its groups are closed")):
            after = looks(ids)
    for other in (after, again):
        assert torch.allclose(before.logits, other.logits, atol=1e-6)
    engine.destroy()


def test_an_engine_over_divided_layers_gives_them_back_and_goes_on() -> None:
    run_ranks(2, look_at_divided_layers)


def asked_after_it_has_given_back(stage: int, precision: str, how: str, folder: str) -> tuple[list[Any], list[str], int]:
    """What an engine says that has given its module back; what it has written; the bytes that it keeps.

    ``how``: by destroy(), or to the engine that trains the module in the mode.
    """
    config = make_config(stage, precision=precision)
    model, saved = build(), Path(folder, "before")
    others = bytes_of_tensors()
    if how == "destroy":
        engine = zerorun.initialize(model, config)
        step(engine)
        engine.save_checkpoint(saved)
        engine.destroy()
        kept = bytes_of_tensors() - others - engine.comm.buffer_bytes  # into which ranks read from each other
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7)
        assert all(bool((value == 7).all()) for value in engine.state_dict().values()), "it says what the module has"
    else:
        engine = deepspeed_engine(model, {key: value for key, value in config.items() if key != "optimizer"})
        engine.save_checkpoint(saved)
        other, kept = deepspeed_engine(model, config), 0
        step(other)
    before = sorted(str(path) for path in Path(folder).rglob("*"))
    asked: list[Callable[[], Any]] = [
        lambda: engine.save_checkpoint(Path(folder, "after")),
        lambda: engine.export(Path(folder, "export")),
        lambda: engine.load_checkpoint(saved, load_optimizer=False),
        lambda: engine.resume(saved),
        lambda: engine.backward(engine(data())),
    ]
    answers = [attempt(ask) for ask in asked]
    engine.destroy()
    if how != "destroy":
        assert not any(bool(value.isnan().any()) for value in other.state_dict().values())
        other.destroy()
    after = sorted(str(path) for path in Path(folder).rglob("*"))
    return answers, [path for path in after if path not in before], kept


def bytes_of_tensors() -> int:
    """Those that tensors of this process keep, without those of numbers."""
    gc.collect()
    storages = (value.untyped_storage() for value in gc.get_objects() if type(value) in (torch.Tensor, nn.Parameter))
    return sum(size for size in {found._cdata: found.nbytes() for found in storages}.values() if size > 16)


@pytest.mark.each_value
@pytest.mark.parametrize("how", ("destroy", "mode"))
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 1, 2, 3))
def test_an_engine_without_its_module_saves_and_loads_nothing(stage: int, precision: str, how: str, tmp_path: Path) -> None:
    """It wrote the weights of before without a word, and a load changed nothing."""
    for answers, written, kept in run_ranks(2, asked_after_it_has_given_back, stage, precision, how, str(tmp_path)):
        asked = ("save_checkpoint", "export", "load_checkpoint", "load_checkpoint")
        for function, (kind, text) in zip(asked, answers[:-1], strict=True):
            assert kind == "CheckpointError", text
            for word in (f"{function}() of an engine that has given its module back", "Remedy", "module.state_dict()"):
                assert word in text
        kind, text = answers[-1]
        assert kind == "StepError" and "backward() of an engine that has given its module back" in text
        assert not written
        assert kept <= 0


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_the_mode_trains_a_model_that_an_engine_without_an_optimizer_has(stage: int, precision: str) -> None:
    """As TRL does with precompute_ref_log_probs."""
    for plain, found, alone in run_ranks(2, train_what_is_looked_at, stage, precision):
        for name, value in found.items():
            assert torch.equal(value, alone[name])
            if precision == "fp32":
                assert torch.allclose(value, plain[name], rtol=1e-5, atol=1e-6)


def tried_again(stage: int, offload: bool, precision: str, own: bool) -> list[Any]:
    """The losses of a model, those of one whose first initialize() failed in the schedule, and what that said.

    ``own``: the optimizer is the script's own, and the same for both calls.
    """
    config = make_config(stage, precision=precision, comms_logger={"enabled": True})
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if own:
        del config["optimizer"]

    def failing(optimizer: torch.optim.Optimizer) -> Any:
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)
        return torch.optim.lr_scheduler.StepLR(optimizer, {0: 1}[dist.get_rank()])

    model, answers, losses = build(), [], []
    model.blocks[1].bias.requires_grad_(False).fill_(0.5)  # frozen ones are rounded
    plain = copy.deepcopy(model)
    weights, rates = [param.detach().clone() for param in model.parameters()], (0.01, 0.03)
    optimizer, other = (own_optimizer(trained, rates) if own else None for trained in (model, plain))
    answers.append(attempt(lambda: zerorun.initialize(model, config, optimizer=optimizer, lr_scheduler=failing)))
    for param, before in zip(model.parameters(), weights, strict=True):
        assert param.dtype == torch.float32 and torch.equal(param, before), "they are the module's again"
    for trained, given in ((plain, other), (model, optimizer)):
        engine = zerorun.initialize(trained, config, optimizer=given)
        losses.append([step(engine) for _ in range(3)])
        assert not own or [group["lr"] for group in engine.optimizer.param_groups] == [*rates]
        losses[-1] += [float(value.double().sum()) for value in engine.state_dict(exact=True).values()]
        engine.destroy()
    return [*losses, answers]


def own_optimizer(model: Layers, rates: tuple[float, float]) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW([{"params": params[half::2], "lr": rate} for half, rate in enumerate(rates)])


@pytest.mark.each_value
@pytest.mark.parametrize("own", (False, True))
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, True), (3, False), (3, True)])
def test_a_model_can_be_given_again_after_its_schedule_failed(stage: int, offload: bool, precision: str, own: bool) -> None:
    for untroubled, again, [(kind, text)] in run_ranks(2, tried_again, stage, offload, precision, own):
        assert again == untroubled
        assert kind == "ModelError" and "lr_scheduler=failing" in text


def no_such_checkpoint(folder: Path) -> dict[str, Any]:
    """What asks to go on from something that is no checkpoint."""
    if dist.get_rank() == 0:
        (folder / "global_step3").mkdir(parents=True, exist_ok=True)
        (folder / "latest").write_text("global_step3")
    dist.barrier()
    return {"checkpoint": {"dir": str(folder), "auto_resume": True, "every_steps": 9}}


def no_such_disk(folder: Path) -> dict[str, Any]:
    """What asks for a file where none can be, when ranks have divided the layers."""
    device = {"device": "nvme", "nvme_path": "/proc/nowhere"}
    divided = {"size": dist.get_world_size(), "plan": {"blocks.*": "colwise_gather_output"}}
    return {"zero_optimization": {"stage": 3, "offload_param": device}, "tensor_parallel": divided}


def no_such_compiler(folder: Path) -> dict[str, Any]:
    return {"compile": {"enabled": True, "backend": "nonsense"}}


def start_again(asked: Callable[[Path], dict[str, Any]], stage: int, folder: str) -> list[Any]:
    """The losses of a model, those of one whose first initialize() failed for what was ``asked``, and what that said."""
    config = make_config(stage, precision="bf16")
    del config["optimizer"]
    model, losses = build(), []
    plain, weights = copy.deepcopy(model), [param.detach().clone() for param in model.parameters()]
    optimizer, other = (own_optimizer(trained, (0.01, 0.03)) for trained in (model, plain))
    try:
        zerorun.initialize(model, {**config, **asked(Path(folder))}, optimizer=optimizer)
        said = "nothing"
    except Exception as error:
        said = type(error).__name__
    for param, before in zip(model.parameters(), weights, strict=True):
        assert param.dtype == torch.float32 and torch.equal(param, before), "they are the module's again"
    for trained, given in ((plain, other), (model, optimizer)):
        engine = zerorun.initialize(trained, config, optimizer=given)
        losses.append([step(engine) for _ in range(3)])
        engine.destroy()
    return [*losses, said]


@pytest.mark.parametrize(
    ("ranks", "asked", "stage", "error"),
    [
        (2, no_such_checkpoint, 1, "DamagedError"),
        (2, no_such_checkpoint, 3, "DamagedError"),
        (2, no_such_disk, 3, "SwapError"),
        (1, no_such_compiler, 3, "InvalidBackend"),  # an error that is none of zerorun's
    ],
)
def test_a_model_can_be_given_again_after_another_failure(
    ranks: int, asked: Callable[[Path], dict[str, Any]], stage: int, error: str, tmp_path: Path
) -> None:
    for untroubled, again, said in run_ranks(ranks, start_again, asked, stage, str(tmp_path)):
        assert again == untroubled and said == error


def fail_alone() -> tuple[str, str] | None:
    """What a second initialize() says on the rank on which alone the first has failed, which waits for nobody."""
    model = build()
    if dist.get_rank() == 0:
        with patch.object(zerorun.Engine, "announce", side_effect=KeyError), pytest.raises(KeyError):
            zerorun.initialize(model, make_config(3))
        return attempt(lambda: refuse_managed(model))
    zerorun.initialize(model, make_config(3))
    return None


def test_a_rank_that_fails_alone_waits_for_nobody() -> None:
    [(kind, text), _] = run_ranks(2, fail_alone)
    assert kind == "ModelError" and "belongs to an engine already" in text


def second_engine_with_a_shared_parameter(stage: int, frozen: bool) -> tuple[Any, ...]:
    """What is said of it. Both engines train if each has its own."""
    model, other = build(), build()
    shared = model.blocks[1]
    shared.weight.requires_grad_(not frozen)
    other.blocks[0].weight = shared.weight
    first = zerorun.initialize(model, make_config(stage))
    step(first)
    answer = attempt(lambda: zerorun.initialize(other, make_config(stage)))
    assert step(first) > step(first), "the first engine goes on"
    other.blocks[0] = copy.deepcopy(other.blocks[1])
    second = zerorun.initialize(other, make_config(stage))
    for engine in (first, second):
        assert step(engine) > step(engine)
        engine.destroy()
    third = zerorun.initialize(model, make_config(stage))  # whose parameters are free again
    third.destroy()
    return answer


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("stage", (0, 3))
def test_a_parameter_has_one_engine_at_a_time(stage: int, frozen: bool) -> None:
    for kind, text in run_ranks(2, second_engine_with_a_shared_parameter, stage, frozen):
        assert kind == "ModelError"
        name = "'blocks.0.weight', frozen," if frozen else "'blocks.0.weight'"
        for word in (f"parameter {name} is 'blocks.1.weight' of another engine's model", "deepcopy", "destroy()"):
            assert word in text


def another_tensor(model: Layers) -> None:
    model.blocks[1].weight.data = torch.ones(8, 8)


def half(model: Layers) -> None:
    model.half()


def fill(model: Layers) -> None:
    nn.init.constant_(model.blocks[1].weight, 0.5)


def scale(model: Layers) -> None:
    with torch.no_grad():
        model.blocks[1].weight.mul_(2.0)


def behind_its_back(action: Callable[[Layers], None], stage: int) -> tuple[str, str]:
    engine = zerorun.initialize(build(), make_config(stage))
    step(engine)
    result = attempt(lambda: (action(engine.module), step(engine)))
    engine.destroy()
    return result


@pytest.mark.parametrize("action", (another_tensor, half))
@pytest.mark.parametrize("stage", (0, 2, 3))
def test_another_tensor_is_refused(action: Callable[[Layers], None], stage: int) -> None:
    first = "head.weight" if stage < 3 or action is half else "blocks.1.weight"  # the root unit comes first
    for kind, text in run_ranks(2, behind_its_back, action, stage):
        assert kind == "ModelError"
        assert ("blocks.1.weight" if action is another_tensor else first) in text
        assert "GatheredParameters" in text


def test_writing_to_a_placeholder_is_refused() -> None:
    for kind, text in run_ranks(2, behind_its_back, fill, 3):
        assert kind == "ReleasedParameterError"
        assert "blocks.1.weight" in text
        assert "GatheredParameters" in text


def written_in_place(action: Callable[[Layers], None], stage: int) -> bool:
    """Where a rank has the whole parameter, writing to it counts, as it does without an engine."""
    engine, plain = zerorun.initialize(build(), make_config(stage, optimizer="SGD")), build()
    action(engine.module)
    action(plain)
    with torch.no_grad():
        same = torch.equal(engine(data()), plain(data()))
    step(engine)
    found = engine.state_dict()["blocks.1.weight"]
    engine.destroy()
    return same and bool((found - plain.blocks[1].weight).norm() < 0.5 * plain.blocks[1].weight.norm())


@pytest.mark.parametrize("action", (fill, scale))
@pytest.mark.parametrize("stage", (0, 1, 2))
def test_writing_in_place_counts_where_parameters_are_whole(action: Callable[[Layers], None], stage: int) -> None:
    assert all(run_ranks(2, written_in_place, action, stage))


def in_a_block(stage: int, shape: tuple[int, ...]) -> Any:
    engine = zerorun.initialize(build(), make_config(stage))
    weight = engine.module.blocks[1].weight

    def action() -> None:
        with zerorun.zero.GatheredParameters(weight, modifier_rank=0):
            weight.data = torch.full(shape, 3.0 + dist.get_rank())

    answer = attempt(action) if shape != (8, 8) else action()
    found = engine.state_dict()["blocks.1.weight"]
    step(engine)
    engine.destroy()
    return answer, found


@pytest.mark.parametrize("stage", (0, 1, 3))
def test_another_tensor_in_a_block_gives_its_values(stage: int) -> None:
    for _, found in run_ranks(2, in_a_block, stage, (8, 8)):
        assert torch.equal(found, torch.full((8, 8), 3.0))
    for (kind, text), found in run_ranks(2, in_a_block, stage, (4, 8)):
        assert kind == "ModelError"
        assert "'blocks.1.weight' from (8, 8) to (4, 8)" in text
        assert torch.equal(found, build().blocks[1].weight)
