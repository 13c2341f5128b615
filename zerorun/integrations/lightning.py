"""Lightning: ``Trainer(strategy=ZerorunStrategy("ds.json"))`` trains an unmodified LightningModule, on CPUs and GPUs.

[Note: who does what]
Lightning owns the loop: it counts micro-batches, divides the loss by them, steps schedulers of ``configure_optimizers``,
and decides when to save, and when to drop gradients that no step has used. The engine owns gradients: it reduces, unscales
and clips them, and updates. So the configuration takes ``gradient_accumulation_steps`` and, unless it has them,
``gradient_clipping`` and the precision from the Trainer.
What the two say differently is an error, where the Trainer's is what Lightning does, and not what the file asks for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import BaseFinetuning, ModelPruning
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from ..checkpoint.automatic import resuming_problems
from ..config.parse import Config, data_parallel_degree, load_config
from ..config.reader import AUTO
from ..config.source import read_source
from ..engine.accumulation import has_failed
from ..engine.engine import Engine
from ..engine.initialize import initialize
from ..errors import CheckpointError, ConfigError, ConfigProblem, StepError
from ..log import warn_once
from ..zero.gathered_parameters import GatheredParameters
from ..zero.value_access import full_state_dict

_CLIPPING = 'say the norm to Trainer(gradient_clip_val=...), or as "gradient_clipping" in the file, and leave out the call.'
_BY_HAND = 'say the norm as "gradient_clipping" in the file, and leave out the call.'  # the Trainer refuses it then
_GOES_ON = 'Leave it out: fit(..., ckpt_path="last") goes on from what ModelCheckpoint(save_last=True) has saved.'
_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Callbacks that average weights. The second is in newer versions of Lightning; EMAWeightAveraging is one of its kind.
_AVERAGING = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)
_OF_TRAINING = ("optimizer", "scheduler", "checkpoint")  # sections that an engine for evaluation does not have
TAG = "checkpoint"  # of a checkpoint of zerorun in the directory that Lightning names
_PRECISIONS: dict[str, dict[str, Any]] = {
    "32-true": {},
    "bf16-mixed": {"bf16": {"enabled": True}},
    "bf16-true": {"bf16": {"enabled": True}},
    "16-mixed": {"fp16": {"enabled": True}},
    "16-true": {"fp16": {"enabled": True}},
}


def _value(name: Any) -> str:
    """The word of one of Lightning's enumerations, or the word itself."""
    return str(getattr(name, "value", name))


class EnginePrecision(Precision):
    """Backward, clipping and update by the engine, which casts inputs and scales losses itself."""

    def __init__(self, precision: str, strategy: ZerorunStrategy) -> None:
        self.precision = precision  # type: ignore[assignment]
        self._strategy = strategy

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a loss that Lightning has divided by the micro-batches of a step."""
        self._strategy.backward_of(tensor, retain_graph=bool(kwargs.get("retain_graph", False)))

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, which calls ``backward``, and update the weights. Raises StepError if there was no loss."""
        result = closure()
        if result is None and model.automatic_optimization:
            raise StepError(
                "training_step() returned None for the last micro-batch of a step, so there is no backward with which the "
                "step could end. Lightning refuses None with several ranks, and with DeepSpeed. Remedy: return a loss that "
                "counts nothing, such as loss * 0.0, or leave such a batch out of the data."
            )
        self._after_closure(model, optimizer)
        self._strategy.engine.set_gradient_accumulation_boundary(True)  # the last micro-batch may have given no loss
        self._strategy.engine.step()
        return result

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Do nothing: the engine clips, in ``step()``. Raises StepError for what the engine does not do there."""
        clips, algorithm = self._strategy.engine.gradient_clipping(), _value(gradient_clip_algorithm)
        if clip_val > 0 and (algorithm != "norm" or float(clip_val) != clips):
            does = f"clips to the norm {clips}" if clips else "does not clip"
            module = self._strategy.lightning_module
            remedy = _CLIPPING if module is None or module.automatic_optimization else _BY_HAND
            raise StepError(
                f"clip_gradients(gradient_clip_val={clip_val}, gradient_clip_algorithm={algorithm!r}) was called, but the "
                f"engine has to clip, in its step: this one {does}. Remedy: {remedy}"
            )


def _spelled_alike(source: Any) -> tuple[dict[str, Any], str]:
    """The configuration with each key at the top level in one spelling and without nulls, which say nothing; and its name.

    Two spellings that say different things both stay, for the reader to refuse. Raises ConfigError if it cannot be read.
    """
    given, name = read_source(source)
    spellings, found = Config.spellings(), dict[str, Any]()
    for key, value in given.items():
        usual = spellings.get(key, key)
        if (value is not None or key not in spellings) and (key == usual or value != given.get(usual)):
            found[usual if given.get(usual) is None else key] = value
    return found, name


def _clipping_problems(trainer: Trainer) -> list[ConfigProblem]:
    algorithm = trainer.gradient_clip_algorithm
    if algorithm is None or _value(algorithm) == "norm" or not trainer.gradient_clip_val:
        return []
    reason = "the engine clips by the global norm, over all ranks' gradients."
    remedy = 'Leave it out, or write "norm"; gradient_clip_val is then that norm.'
    return [ConfigProblem("gradient_clip_algorithm", _value(algorithm), reason, remedy)]


def _callback_problems(trainer: Trainer, stage: int) -> list[ConfigProblem]:
    """The callbacks that handle what an engine has otherwise, and would end in an error that does not say so."""
    found = list[ConfigProblem]()
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if isinstance(callback, BaseFinetuning):
            reason = "it looks for the optimizer's tensors in the module, where an engine has parts of buffers of its own."
            remedy = "Leave it out: freeze layers before fit(), and for each further phase call fit() with a new Trainer."
            found.append(ConfigProblem("callbacks", name, reason, remedy))
        elif isinstance(callback, ModelPruning):
            reason = "it gives the module other tensors while it trains, which the engine's optimizer does not know."
            remedy = "Leave it out: prune the module by torch.nn.utils.prune after fit()."
            found.append(ConfigProblem("callbacks", name, reason, remedy))
        elif stage == 3 and isinstance(callback, _AVERAGING):
            reason = "it averages whole weights, and at stage 3 ranks have parts of them."
            remedy = "Use stage 2 or lower, or leave it out."
            found.append(ConfigProblem("callbacks", name, reason, remedy))
    return found


def _batch_problems(given: dict[str, Any], config: Config, trainer: Trainer) -> list[ConfigProblem]:
    """What the batch sizes that were ``given`` say otherwise than the Trainer, from whom ``config`` has them."""
    steps, problems = trainer.accumulate_grad_batches, list[ConfigProblem]()
    wanted = f"the Trainer has accumulate_grad_batches={steps}, which counts."
    if given.get(_STEPS, AUTO) not in (AUTO, None, steps):
        remedy = f"Leave the key out, or pass accumulate_grad_batches={given[_STEPS]} to the Trainer."
        problems.append(ConfigProblem(_STEPS, given[_STEPS], wanted, remedy))
    elif isinstance(given.get(_BATCH), int):
        ranks = data_parallel_degree(config, trainer.world_size)
        micro = given.get(_MICRO) if isinstance(given.get(_MICRO), int) else None
        if given[_BATCH] % (steps * ranks * (micro or 1)) or (micro and given[_BATCH] != steps * ranks * micro):
            sizes = f"{ranks} data-parallel ranks" + (f" of {micro} samples" if micro else "")
            remedy = "Leave the key out: it follows from the data loader's batch size and accumulate_grad_batches."
            problems.append(ConfigProblem(_BATCH, given[_BATCH], f"{wanted[:-1]} for {sizes}.", remedy))
    return problems


def _drop_unused(engine: weakref.ref[Engine], set_to_none: bool = True) -> None:
    """What ``optimizer.zero_grad`` does: drop the gradients that no step has used, as the loop of Lightning has it."""
    found = engine()
    if found is not None and (found.accumulation.of_any_kind or has_failed(found.accumulation)):
        found.zero_grad(counted=True)


def _tensors(module: LightningModule) -> Iterator[tuple[str, Tensor]]:
    """The parameters and the buffers of ``module``, by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _for_evaluation(config: dict[str, Any], *, autocast: bool) -> dict[str, Any]:
    """``config`` for an engine without an optimizer. ``autocast``: weights that train in 16 bits stay fp32, as in DDP.

    There are no fp32 masters, so what an engine in 16 bits rounds would be lost to the module. Nor does it save or resume
    by itself: the weights are those of the module, or of the checkpoint that the Trainer is given.
    """
    config = {key: value for key, value in config.items() if key not in _OF_TRAINING}
    read = load_config(config, optimizer_given=True, scheduler_given=True)
    rounds = "bf16" if read.bf16.enabled else "fp16" if read.fp16.enabled else None
    if rounds is None or not autocast:
        return config
    dtypes = {key: value for key, value in config.get("data_types", {}).items() if key == "buffer_dtype"}
    config = {key: value for key, value in config.items() if key not in ("bf16", "fp16")}
    return {**config, "data_types": dtypes, "torch_autocast": {"enabled": True, "dtype": rounds}}


class _WrappedOptimizer(LightningOptimizer):
    """What ``LightningModule.optimizers()`` gives. Lightning's own has ``zero_grad`` of torch's class, not the engine's."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class ZerorunStrategy(DDPStrategy):
    """Trains with a zerorun engine. ``config``: path of a JSON file, or a dict, as for ``zerorun.initialize``.

    With an ``optimizer`` in the configuration, ``configure_optimizers`` is not called, and the engine steps the file's
    ``scheduler``. Checkpoints are directories, which load on any number of ranks; with ``save_weights_only`` they are
    Lightning's single files of full weights. Raises ConfigError for a precision that is none of 32, bf16 and 16, for
    clipping by value, for more than one optimizer, for callbacks of finetuning, for ``ModelPruning`` and, at stage 3, for
    callbacks that average weights, for batch sizes in the configuration that contradict ``accumulate_grad_batches``, and
    for ``auto_resume`` and ``in_memory``, of which the Trainer would not know.
    """

    strategy_name = "zerorun"

    def __init__(self, config: str | Path | dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._given = config
        self._engine: Engine | None = None
        self._has_trained = False  # an engine that is gone had an optimizer
        self._failed = False  # the engine's fit or evaluation ended with an exception
        self._dtypes: dict[str, torch.dtype] = {}  # of the module's parameters and buffers before there was an engine
        self._forward_redirection = _ForwardRedirection()

    @property
    def engine(self) -> Engine:
        """The engine while a Trainer fits or evaluates. With several ranks it stays after an exception, until the next one.

        Raises RuntimeError at other times.
        """
        if self._engine is None:
            raise RuntimeError("there is no engine yet. Remedy: ask for it from on_fit_start() on.")
        return self._engine

    @property
    def _live(self) -> Engine | None:
        """The engine, unless it was destroyed after an exception."""
        return self._engine if self._engine is not None and self._engine.units else None

    # -- precision -------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        """That of the engine."""
        given = self._precision_plugin
        return given if given is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None and not isinstance(precision_plugin, EnginePrecision):
            name = str(precision_plugin.precision)
            if name not in _PRECISIONS:
                reason = "the engine trains in fp32, bf16 or fp16."
                raise ConfigError(
                    [ConfigProblem("precision", name, reason, f"Use one of {', '.join(_PRECISIONS)}.")], "Trainer"
                )
            precision_plugin = EnginePrecision(name, self)
        self._precision_plugin = precision_plugin

    @property
    def _is_in_16_bits(self) -> bool:
        """Whether the Trainer asks for a module in 16 bits, and not for one in fp32 that computes in 16 bits."""
        return str(self.precision_plugin.precision) in ("bf16-true", "16-true")

    # -- set-up ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Make the engine, for training or for evaluation, where it has no optimizer."""
        assert self.accelerator is not None and self.lightning_module is not None
        self._failed = False
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        config = self._configuration(trainer, fits=fits)
        optimizer, schedules = self._optimizer(config) if fits else (None, [])
        if not fits:
            config = _for_evaluation(config, autocast=not self._is_in_16_bits)
        self._dtypes = {} if self._is_in_16_bits else {name: value.dtype for name, value in _tensors(self.lightning_module)}
        self._engine = initialize(self.lightning_module, config, optimizer=optimizer)
        if self._engine.sharded is not None:
            self._engine.sharded.give_methods(zero_grad=partial(_drop_unused, weakref.ref(self._engine)))
        self.model = self._engine  # type: ignore[assignment]
        self.optimizers = [self._engine.optimizer] if self._engine.optimizer is not None else []
        self._lightning_optimizers = [
            LightningOptimizer._to_lightning_optimizer(_WrappedOptimizer(optimizer), self) for optimizer in self.optimizers
        ]
        self.lr_scheduler_configs = schedules

    def _configuration(self, trainer: Trainer, *, fits: bool) -> dict[str, Any]:
        """The given one, with what the Trainer knows. If it fits, raises ConfigError where they disagree."""
        given, name = _spelled_alike(self._given)
        config = {key: value for key, value in given.items() if key not in (_BATCH, _STEPS)}
        config[_STEPS] = trainer.accumulate_grad_batches
        if config.get(_MICRO) in (None, AUTO):
            config[_MICRO] = 1
        if config.get("gradient_clipping", AUTO) == AUTO or trainer.gradient_clip_val is not None:
            config["gradient_clipping"] = float(trainer.gradient_clip_val or 0.0)
        for key in ("fp16", "bf16"):
            if config.get(key) == AUTO:
                config[key] = {"enabled": False}
            elif isinstance(config.get(key), dict) and config[key].get("enabled") == AUTO:
                config[key] = {**config[key], "enabled": False}
        for key, section in _PRECISIONS[str(self.precision_plugin.precision)].items():
            if isinstance(config.get(key, {}), dict):  # anything else the reader refuses by name
                config[key] = {**config.get(key, {}), **section}
        problems = list[ConfigProblem]()
        if fits:
            read = load_config(config, optimizer_given=True, scheduler_given=True)
            problems += _clipping_problems(trainer) + _callback_problems(trainer, read.zero_optimization.stage)
            problems += _batch_problems(given, read, trainer) + resuming_problems(read.checkpoint, "the Trainer", _GOES_ON)
        if problems:
            raise ConfigError(problems, name)
        return config

    def _optimizer(self, config: dict[str, Any]) -> tuple[torch.optim.Optimizer | None, list[Any]]:
        """The optimizer and the schedules of ``configure_optimizers``; nothing if the configuration has an optimizer."""
        if "optimizer" in config:
            return None, []
        assert self.lightning_module is not None
        optimizers, schedules = _init_optimizers_and_lr_schedulers(self.lightning_module)
        given: Any = len(optimizers)
        reason, remedy = "an engine has one optimizer, which may have several parameter groups.", "Return one."
        if given == 1 and not optimizers[0].param_groups:  # what Lightning puts in the place of None
            given, reason = None, "fit() needs an optimizer, and the file has none."
            remedy = 'Return one, or give the file an "optimizer".'
        if given != 1:
            raise ConfigError([ConfigProblem("configure_optimizers", given, reason, remedy)], "LightningModule")
        return optimizers[0], schedules

    def teardown(self) -> None:
        """Give the module its full weights back, in the precision of the Trainer. All ranks must call it.

        After an exception they may not come. With several ranks the engine then stays as it is, and so it does with weights
        that are loaded by half: ``engine.destroy()`` on all ranks gives the module back.
        """
        engine, exact = self._engine, not self._is_in_16_bits
        if engine is not None and self._failed and (self.world_size > 1 or engine.sharded_model.half_loaded.has("weights")):
            assert self.accelerator is not None
            self.accelerator.teardown()
            self.checkpoint_io.teardown()
            return  # without what moves the module and the optimizer to the CPU
        self._engine = None
        if engine is not None:
            self._has_trained = self._has_trained or engine.optimizer is not None
            assert self.lightning_module is not None
            if self._failed:
                engine.give_back(exact=exact)  # whatever became of the last step: the exception is what counts
            else:
                engine.destroy(exact=exact)
            for name, value in _tensors(self.lightning_module):
                value.data = self._as_before(name, value)
            self.model = self.lightning_module
            self.optimizers = []
        super().teardown()

    def _as_before(self, name: str, value: Any) -> Any:
        """``value``, of the module's state by this name, in the dtype that it had before there was an engine."""
        dtype = self._dtypes.get(name)
        return value if dtype is None or value.dtype == dtype else value.detach().to(dtype)

    def on_exception(self, exception: BaseException) -> None:
        """Note it for ``teardown``, which follows."""
        self._failed = True
        super().on_exception(exception)

    # -- training --------------------------------------------------------------------------------------------------

    def backward_of(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Add the gradients of ``loss``, a scalar; reduce them at the last micro-batch of a step."""
        assert self.lightning_module is not None
        module = self.lightning_module
        is_last = not module.automatic_optimization or not module.trainer.fit_loop._should_accumulate()
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss, scale_wrt_gas=False, retain_graph=retain_graph)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: the engine loads, so it has to be there."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: the engine restores its optimizer."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing while there is an engine: ``save_checkpoint`` takes the weights from it, by parts."""
        return {} if self._live is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing, as above."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the engine with Lightning's states into the directory ``filepath``, or weights alone into a file.

        Where there is no engine any more, it is a file, without states of the optimizer: a warning says so.
        """
        filepath, engine = self.broadcast(filepath), self._live
        if engine is None:
            if self._has_trained and "optimizer_states" in checkpoint:
                warn_once(
                    f"{filepath} has weights, and no states of the optimizer: the engine that had them ended with fit(). "
                    "Training cannot go on from it. Remedy: save while it trains, by ModelCheckpoint(save_last=True) or in "
                    "on_train_end(); weights_only=True says that weights are meant."
                )
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif "optimizer_states" in checkpoint:
            # A callback may have put averages there, where there was nothing.
            left_out = ("optimizer_states",) if checkpoint["state_dict"] else ("optimizer_states", "state_dict")
            kept = {key: value for key, value in checkpoint.items() if key not in left_out}
            # Lightning also saves between micro-batches, after a resume or by time, and leaves their gradients out.
            engine.save_checkpoint(filepath, tag=TAG, client_state=kept, unfinished_step=True)
        else:
            found = engine.consolidated_state_dict(exact=not self._is_in_16_bits) or {}  # rank 0 alone writes
            weights = {name: self._as_before(name, value) for name, value in found.items()}
            super().save_checkpoint({**checkpoint, "state_dict": weights}, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint of ``save_checkpoint`` and return Lightning's states.

        Raises CheckpointError for a file where the engine needs a directory.
        """
        if self._engine is None or Path(checkpoint_path).is_file():
            if self._engine is not None and self.engine.optimizer is not None:
                raise CheckpointError(
                    f"{checkpoint_path} is a file of weights, which has no state to go on from. Remedy: give the directory "
                    "of a checkpoint, or load the weights into the module before fit()."
                )
            return super().load_checkpoint(checkpoint_path, weights_only)
        only_weights = self.engine.optimizer is None
        _, state = self.engine.load_checkpoint(  # also in the DeepSpeed mode the engine's random numbers go on
            checkpoint_path, tag=TAG, load_module_only=only_weights, load_random_numbers=True
        )
        state = dict(state or {})
        if "current_model_state" in state and not only_weights:  # a callback that keeps averages loads these once more
            state["current_model_state"] = full_state_dict(self.engine.sharded_model, exact=not self._is_in_16_bits)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a file, or the averages of a directory where there is no training to go on with.

        The weights of a directory the engine has loaded.
        """
        assert self.lightning_module is not None
        if "state_dict" in checkpoint and self.engine.optimizer is None:
            with GatheredParameters(list(self.lightning_module.parameters()), modifier_rank=0):
                super().load_model_state_dict(checkpoint, strict)
