"""Rank program: Lightning's Trainer, with its own DDPStrategy, and with ZerorunStrategy at each stage.

zerorun --nproc-per-node 2 tests/clients/lightning_job.py OUT.json
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cells import run_cells
from client_models import Sentences, llama
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from zerorun import log
from zerorun.integrations.lightning import ZerorunStrategy

CELLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 3},  # the last step of an epoch has fewer micro-batches
    "clipping": {"gradient_clip_val": 0.3},
    "validation": {},
    "checkpoint": {},
    "weights only": {},
    "bf16": {"precision": "bf16-mixed"},
    "offload": {},
    "manual": {},
    "dropped": {},  # gradients, by optimizer.zero_grad() and by the module's before a validation
    "checkpointing": {},  # of activations
    "lora": {},
    "refused": {},
    "evaluation": {},  # of checkpoints and of files of weights, and in 16 bits
    "interrupted": {},  # by exceptions
}


class Model(LightningModule):
    def __init__(self, cell: str) -> None:
        super().__init__()
        self.model, self.log_of_losses, self.written = llama(), [], []
        self.fails_at: tuple[str, int] | None = None  # stage of the Trainer and batch in which there is an exception
        self.cell, self.automatic_optimization = cell, cell not in ("manual", "dropped")
        if cell == "checkpointing":
            self.model.gradient_checkpointing_enable()
        if cell == "lora":
            from peft import LoraConfig, get_peft_model  # which takes its time

            torch.manual_seed(11)
            self.model = get_peft_model(self.model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))

    def forward(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def _fail_at(self, stage: str, number: int) -> None:
        if self.fails_at == (stage, number):
            raise InterruptedError(stage)

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self(batch)
        self._fail_at("training", number)
        self.log_of_losses.append(float(loss.detach()))
        if self.cell == "dropped":
            self.manual_backward(loss)
            if number == 1:
                self.optimizers().zero_grad()
            elif number == 2:
                if isinstance(self.trainer.strategy, ZerorunStrategy):  # as behind a last micro-batch without a loss
                    self.trainer.strategy.engine.set_gradient_accumulation_boundary(False)
                self.optimizers().step()
            return None
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self._fail_at("evaluation", number)
        self.log("validation", self(batch), sync_dist=True)
        ids = batch["input_ids"][:, :3]
        self.written.append(
            self.model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, synced_gpus=True).tolist()
        )

    test_step = validation_step

    def predict_step(self, batch: Any, number: int) -> Any:
        return self.model(**batch).logits

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([param for param in self.parameters() if param.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Clipping(Model):
    """Clips in a hook of its own, to ``norm``."""

    norm, algorithm = 0.2, "norm"

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, self.norm, self.algorithm)


class ClippingByValue(Clipping):
    algorithm = "value"


class ClippingByHand(Model):
    """Steps and clips in its training_step."""

    def __init__(self, cell: str) -> None:
        super().__init__(cell)
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> Any:
        self.manual_backward(self(batch))
        self.clip_gradients(self.optimizers(), 0.2, "norm")


class WithoutOptimizer(Model):
    def configure_optimizers(self) -> Any:
        return None


class SavesAfterEachBatch(Callback):
    """As ModelCheckpoint does by time, or after a resume: also where the engine has not stepped yet."""

    def on_train_batch_end(self, trainer: Any, *unused: Any) -> None:
        with tempfile.TemporaryDirectory() as own:
            trainer.save_checkpoint(Path(trainer.strategy.broadcast(own)) / "saved")
            trainer.strategy.barrier()


class WithBackbone(Model):
    """Has what BackboneFinetuning asks for."""

    @property
    def backbone(self) -> Any:
        return self.model.model


def fitted(config: dict[str, Any], model: Model | None = None, **given: Any) -> str:
    """What becomes of fit(): its error, or the dtype in which the engine computes, and the norm to which it clips."""
    used = Trainer(
        accelerator="cpu", devices=2, strategy=ZerorunStrategy(config), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0, **given,
    )  # fmt: skip
    model = model or Model("plain")
    seen: list[Any] = []
    model.on_train_start = lambda: seen.append(used.strategy.engine)  # type: ignore[method-assign]
    try:
        used.fit(model, DataLoader(Sentences(), batch_size=2))
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return f"{seen[0].compute_dtype or torch.float32} clips to {seen[0].gradient_clipping()}"


def refused_callbacks() -> dict[str, str]:
    """What is said of callbacks, by their classes and the stage."""
    found: dict[str, str] = {}
    for stage in (1, 3):
        averages = (StochasticWeightAveraging(1e-3, swa_epoch_start=1), EMAWeightAveraging())
        for callback in (BackboneFinetuning(), ModelPruning("l1_unstructured", amount=0.3), *averages):
            config = {"zero_optimization": {"stage": stage}}
            found[f"{type(callback).__name__}, {stage}"] = fitted(config, WithBackbone("plain"), callbacks=[callback])
    average: dict[str, Any] = {"callbacks": [EMAWeightAveraging()]}
    found["by another name"] = fitted({"zero_optimization": {"stage": "FULL_SHARD"}}, WithBackbone("plain"), **average)
    found["nulls"] = fitted({"zero_optimization": None, "bf16": None}, precision="bf16-mixed")
    return found


def refused(stage: int) -> dict[str, Any]:
    """What is said of clipping and of batch sizes that the engine would not do; and what engines take from the Trainer."""

    def fit(config: dict[str, Any], model: Model | None = None, **given: Any) -> str:
        return fitted({"zero_optimization": {"stage": stage}, **config}, model, **given)

    switches = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}
    return {
        "by value": fit({}, gradient_clip_val=0.1, gradient_clip_algorithm="value"),
        "by hand": fit({}, ClippingByHand("plain")),
        "no optimizer": fit({}, WithoutOptimizer("plain")),
        "own hook": fit({}, Clipping("plain")),
        "own hook, by value": fit({"gradient_clipping": 0.2}, ClippingByValue("plain")),
        "own hook, as in the file": fit({"gradient_clipping": 0.2}, Clipping("plain")),
        "accumulation": fit({"gradient_accumulation_steps": 4}),
        "saves between": fit({}, accumulate_grad_batches=2, callbacks=[SavesAfterEachBatch()]),
        "batch": fit({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, accumulate_grad_batches=3),
        "no such batch": fit({"train_batch_size": 9}),
        "resuming": fit({"checkpoint": {"dir": "saved", "auto_resume": True, "in_memory": {"every_steps": 2}}}),
        "same": fit({"gradient_accumulation_steps": 3, "train_batch_size": 12}, accumulate_grad_batches=3),
        "auto": fit(switches),
        "auto, bf16": fit(
            {**switches, "gradient_accumulation_steps": "auto"}, precision="bf16-mixed", gradient_clip_val=0.5
        ),
    }


def evaluated(trainer: Callable[..., Trainer], model: Model, data: Any, folder: str) -> dict[str, Any]:
    """What a module and those that load what was saved of it give outside of fit(), and what fit() does after that."""
    held_back = DataLoader(Sentences(8), batch_size=2)
    found: dict[str, Any] = {"validation": trainer(1).validate(model, held_back, verbose=False)[0]["validation"]}
    saving = {"dir": f"{folder}/saved", "every_steps": 3}
    used = Model("evaluation")
    trainer(1, also={"checkpoint": saving}).fit(used, data)  # four steps, and the checkpoint is that of the third
    resuming = {"checkpoint": {**saving, "auto_resume": True}}
    found["with auto_resume"] = trainer(1, also=resuming).validate(used, held_back, verbose=False)[0]["validation"]
    for name in ("last", "weights"):
        used = Model("evaluation")
        tested = trainer(1).test(used, held_back, f"{folder}/{name}.ckpt", verbose=False)
        found[f"test of {name}"] = tested[0]["validation"]
    for precision, also in (("bf16-mixed", {"bfloat16": {"enabled": True}}), ("bf16-true", {"bf16": None})):
        used = Model("evaluation")
        logits = trainer(1, also=also, precision=precision).predict(used, held_back)
        assert logits is not None
        found[precision] = [str(logits[0].dtype), str(next(used.parameters()).dtype)]
    for precision in ("bf16-mixed", "bf16-true"):
        used = Model("evaluation")
        used.model.lm_head.weight.requires_grad_(False)
        saves = ModelCheckpoint(folder, filename=precision, save_weights_only=True)
        trainer(1, precision=precision, callbacks=[saves]).fit(used, data)
        file = torch.load(f"{folder}/{precision}.ckpt", weights_only=False)["state_dict"]
        fitted = used.state_dict()
        found[f"after {precision}"] = [
            sorted({str(value.dtype) for value in file.values()}),
            any((value != value.bfloat16()).any() for value in fitted.values()),  # digits that bf16 has not
            all(torch.equal(value, file[name]) and value.dtype == file[name].dtype for name, value in fitted.items()),
        ]
        trainer(1, precision=precision).predict(used, held_back)
    trainer(1).fit(model, data)
    return {**found, "log after it": model.log_of_losses}


def averaged(trainer: Callable[..., Trainer], data: Any, folder: str) -> dict[str, Any]:
    """The weights of a run with averages that goes on from its directory, and how the averages of that are tested."""

    def given() -> list[Callback]:
        return [EMAWeightAveraging(decay=0.5), ModelCheckpoint(f"{folder}/ema", save_last=True)]

    last, used = f"{folder}/ema/last.ckpt", Model("evaluation")
    trainer(1, callbacks=given()).fit(used, data)
    dist.barrier()
    tested = trainer(1).test(used, DataLoader(Sentences(8), batch_size=2), last, verbose=False)
    trainer(2, callbacks=given()).fit(used, data, ckpt_path=last)
    weights = [float(value.double().sum()) for value in used.state_dict().values()]
    return {"averages": weights, "test of averages": tested[0]["validation"]}


def interrupted(trainer: Callable[..., Trainer], model: Model, data: Any) -> dict[str, Any]:
    """What a module is after exceptions in its training and in its evaluation, and what fit() does with it after these."""
    held_back, found = DataLoader(Sentences(8), batch_size=2), dict[str, Any]()
    for stage, run in (
        ("training", lambda used: used.fit(model, data)),
        ("evaluation", lambda used: used.test(model, held_back)),
    ):
        model.fails_at, used = (stage, 1), trainer(1)
        try:
            run(used)
        except InterruptedError as error:
            found[f"exception in {stage}"] = str(error)
        if dist.get_world_size() > 1 and isinstance(used.strategy, ZerorunStrategy):
            used.strategy.engine.destroy(exact=True)
        found[f"weights after {stage}"] = [float(value.double().sum()) for value in model.state_dict().values()]
        found[f"dtypes after {stage}"] = sorted({str(value.dtype) for value in model.state_dict().values()})
    model.fails_at = None
    trainer(1).fit(model, data)
    found["validation"] = trainer(1).validate(model, held_back, verbose=False)[0]["validation"]
    return {**found, "log after it": model.log_of_losses}


def train(cell: str, stage: int | None, folder: str) -> dict[str, Any]:
    if cell == "refused":
        return refused(stage or 0)
    seed_everything(5, verbose=False)
    zero: dict[str, Any] = {"stage": stage}
    if cell == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    found: dict[str, Any] = {}

    def trainer(epochs: int, *, also: Any = None, **given: Any) -> Trainer:
        strategy = DDPStrategy() if stage is None else ZerorunStrategy({"zero_optimization": zero, **(also or {})})
        saves = ModelCheckpoint(folder, save_last=True, save_weights_only=cell == "weights only")
        evaluates = cell in ("evaluation", "interrupted")
        keeps = cell in ("checkpoint", "evaluation", "weights only")
        return Trainer(
            accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_epochs=epochs, limit_train_batches=4,
            logger=False, barebones=False, enable_checkpointing=keeps, enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=2 if evaluates or cell in ("validation", "dropped") else 0,
            **{"callbacks": [saves] if keeps else None, **CELLS[cell], **given},
        )  # fmt: skip

    data = DataLoader(Sentences(), batch_size=2)
    model = Model(cell)
    used = trainer(2)
    used.fit(model, data, DataLoader(Sentences(8), batch_size=2))
    found["log"] = model.log_of_losses
    found["weights"] = [float(value.double().sum()) for value in model.state_dict().values()]
    if cell == "validation":
        found["validation"] = float(used.callback_metrics["validation"])
        found["tokens"] = model.written
        found["test"] = used.test(model, DataLoader(Sentences(8), batch_size=2), verbose=False)[0]["validation"]
    if cell == "checkpoint":
        dist.barrier()
        model = Model(cell)
        trainer(3).fit(model, data, ckpt_path=f"{folder}/last.ckpt")
        found["resumed"] = model.log_of_losses
    if cell == "evaluation":
        used.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
        known = set(log._warned)
        used.save_checkpoint(f"{folder}/late.ckpt")  # when the engine, and the optimizer's states, are gone
        told = [text for text in log._warned - known if "late.ckpt has weights, and no states of the optimizer" in text]
        found["told of a late checkpoint"] = bool(told) == isinstance(used.strategy, ZerorunStrategy)
        dist.barrier()
        found |= evaluated(trainer, model, data, folder)
        if stage != 3:  # where it is refused
            found |= averaged(trainer, data, folder)
    if cell == "interrupted":
        found |= interrupted(trainer, model, data)
    if cell == "weights only":
        state = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]
        found["saved"] = [float(value.double().sum()) for value in state.values()]
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run_cells(
        CELLS, train, skip=lambda cell, stage: (cell == "offload" and stage == 0) or (cell == "refused" and stage != 1)
    )
