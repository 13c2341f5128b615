"""The whole configuration: the top-level keys, the features that zerorun does not implement, and how it is printed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from zerorun.config.fields import (
    ConfigNote,
    Dtype,
    EffectiveValue,
    Feature,
    Flag,
    Inert,
    Int,
    LowerCase,
    Real,
    Section,
    StepsPerPrint,
    Text,
)
from zerorun.config.sections import (
    ActivationCheckpointing,
    Aio,
    Bf16,
    Checkpoint,
    Comet,
    CommsLogger,
    Compile,
    ContextParallel,
    Count,
    CsvMonitor,
    Dataloader,
    DataTypes,
    ExpertParallel,
    FlopsProfiler,
    Fp8,
    Fp16,
    Optimizer,
    Pipeline,
    Scheduler,
    TensorBoard,
    TensorParallel,
    Timers,
    TorchAutocast,
    Wandb,
    ZeroOptimization,
)
from zerorun.errors import ConfigProblem


def _keys(names: str, reason: str, remedy: str = "", on_when_present: bool = False) -> Feature:
    return Feature(reason, ("enabled", *names.split()), on_when_present, remedy)


@dataclass(frozen=True)
class Provenance:
    """Where the values of a configuration come from, and the notes on them. Keys are dotted.

    ``sources``: the source of every key. ``auto``: the keys that say "auto". ``notes``: all notes. ``off``: the notes on
    features that the file describes but does not switch on. ``file``: the name of the file, for messages.
    """

    file: str = "config"
    sources: Mapping[str, str] = field(default_factory=dict)
    auto: tuple[str, ...] = ()
    notes: tuple[ConfigNote, ...] = ()
    off: tuple[ConfigNote, ...] = ()


class Config(Section):
    """The whole configuration. Where the source says "auto", attributes hold defaults until ``resolve`` fills them in.

    The three batch keys are 0 until resolved. Build it with ``load_config`` and ``resolve``, not directly.
    """

    train_batch_size: Count = 0
    """Samples per optimizer step, over all ranks: train_micro_batch_size_per_gpu x gradient_accumulation_steps x
    data-parallel ranks. Sizes that are not given follow from the others."""
    train_micro_batch_size_per_gpu: Count = 0
    """Samples per forward on one rank."""
    gradient_accumulation_steps: Count = 0
    """Micro-batches per optimizer step."""
    managed_gradient_accumulation: Flag = True
    """true: `engine.step()` counts micro-batches and updates the weights after the last one. false: every call updates the
    weights, and the training loop accumulates."""
    steps_per_print: StepsPerPrint | None = None
    """Optimizer steps between two progress lines on rank 0: loss, gradient norm, learning rate, skipped steps, throughput,
    memory, and the time left where the schedule tells the number of steps. Not given: none are printed."""
    dataloader_drop_last: Flag = False
    """Leave out the last, smaller batch of an epoch."""
    dataloader: Dataloader = Dataloader()
    seed: Annotated[Int, Field(ge=0)] | None = None
    """The seed of the data loader's random numbers, and of rounding by chance."""

    gradient_clipping: Annotated[Real, Field(ge=0)] = 1.0
    """Gradients are clipped to this global 2-norm; 0: no clipping."""
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], LowerCase] = "mean"
    """How the gradients of data-parallel ranks are combined: "mean" or "sum"."""
    communication_data_type: Dtype | None = None
    """The dtype of gradients on the wire; not given: that in which they are accumulated, which is fp32 unless
    `bf16_master_weights_and_grads` says otherwise."""
    communication_timeout_s: Annotated[Real, Field(ge=1, le=1e8)] | None = None
    """Seconds that ranks wait for one another in a collective before that is an error, from `initialize()` on and in all
    the program; not given: as long as the process group allows, which is 1,800 s if zerorun makes it."""
    hang_timeout_s: Annotated[Real, Field(ge=0, le=1e8)] | None = None
    """Seconds that ranks wait for one another until the launcher says for whom, or five times as long as such a wait has
    taken before, if that is more; 0: it never does. If it is given, a rank that does not come in twice that time ends
    the job; not given: the launcher speaks after 30 s and ends the job after 600 s, a certain hang at once."""
    prescale_gradients: Annotated[
        Flag, Inert("gradients are averaged in a way that cannot overflow; the result is the same.", unless=False)
    ] = False
    gradient_predivide_factor: Annotated[
        Real, Field(gt=0), Inert("it cancels out; gradients are averaged over all ranks.", unless=1.0)
    ] = 1.0
    sparse_gradients: Annotated[
        Flag, Inert("embedding gradients are exchanged dense; the result is the same.", unless=False)
    ] = False

    fp16: Fp16 = Fp16()
    bf16: Bf16 = Bf16()
    fp8: Fp8 = Fp8()
    torch_autocast: TorchAutocast = TorchAutocast()
    data_types: DataTypes = DataTypes()
    zero_optimization: ZeroOptimization = ZeroOptimization()
    optimizer: Optimizer | None = None
    scheduler: Scheduler | None = None
    compile: Compile = Compile()
    zero_allow_untested_optimizer: Annotated[
        Flag, Inert("every optimizer that updates elements one by one can be used.", unless=True)
    ] = False
    zero_force_ds_cpu_optimizer: Annotated[Flag, Inert("any optimizer can be used with offload.", unless=False)] = True

    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    pipeline: Pipeline = Pipeline()
    tensor_parallel: TensorParallel = TensorParallel()
    expert_parallel: ExpertParallel = ExpertParallel()
    sequence_parallel_size: Annotated[Int, Field(ge=0)] = 1
    """The number of neighbouring ranks that get the same batch, and divide each sequence between them."""
    context_parallel: ContextParallel = ContextParallel()
    data_parallel_size: Count | None = None
    """If given, it must equal the actual number of data-parallel ranks."""
    seq_parallel_communication_data_type: Annotated[
        Dtype, Inert("what ranks send of a sequence has the dtype of its activations.")
    ] = "fp32"
    use_data_before_expert_parallelism: Annotated[
        Flag, Inert("ranks with different experts are neighbours.", unless=False)
    ] = False
    checkpoint: Checkpoint = Checkpoint()
    aio: Aio = Aio()

    tensorboard: TensorBoard = TensorBoard()
    csv_monitor: CsvMonitor = CsvMonitor()
    wandb: Wandb = Wandb()
    comet: Comet = Comet()
    wall_clock_breakdown: Flag = False
    """Print on rank 0, every steps_per_print steps or else every ten, what forward, backward and step took, and how much of
    the communication was hidden behind them. No step waits for the device for it."""
    memory_breakdown: Annotated[Flag, Inert("use engine.memory_report(), which needs no switch.", False)] = False
    flops_profiler: FlopsProfiler = FlopsProfiler()
    comms_logger: CommsLogger = CommsLogger()
    timers: Timers = Timers()
    dump_state: Annotated[Flag, Inert("python -m zerorun.config prints the resolved configuration.", False)] = False
    log_level: Annotated[Text, Inert('set logging.getLogger("zerorun").setLevel(...) in the program.')] = ""
    disable_python_gc: Annotated[
        Flag, Inert("Python collects garbage as the program has it: gc.disable() and gc.collect() are its own.", False)
    ] = False
    vocabulary_size: Annotated[Int, Inert("the vocabulary is read from the model.")] = 0
    disable_allgather: Annotated[Flag, Inert("no version of DeepSpeed in use reads it either.")] = False

    other_names: ClassVar[dict[str, str]] = {"bfloat16": "bf16"}
    features: ClassVar[dict[str, Feature]] = {
        "amp": _keys(
            "opt_level loss_scale cast_model_outputs keep_batchnorm_fp32 master_weights num_losses verbosity "
            "min_loss_scale max_loss_scale patch_torch_functions cast_model_type",
            "NVIDIA apex is not used.",
            'Remove "amp" and use "torch_autocast": {"enabled": true, "dtype": "bf16"}.',
        ),
        "elasticity": _keys(
            "max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time prefer_larger_batch version "
            "ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
            "elastic batch sizes are not built.",
            "Remove the section and give train_batch_size; checkpoints load at any world size.",
        ),
        "autotuning": _keys(
            "fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path tuner_type "
            "tuner_early_stopping tuner_num_trials max_train_batch_size min_train_batch_size arg_mappings model_info "
            "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes "
            "mp_size model_info_path",
            "autotuning is not built.",
        ),
        "compression_training": Feature(
            "compression is not built.",
            (
                "layer_reduction",
                "weight_quantization",
                "activation_quantization",
                "sparse_pruning",
                "row_pruning",
                "head_pruning",
                "channel_pruning",
            ),
        ),
        "sparse_attention": Feature("sparse attention is not built.", on_when_present=True),
        "progressive_layer_drop": _keys("theta gamma", "progressive layer drop is not built."),
        "curriculum_learning": _keys(
            "curriculum_type min_difficulty max_difficulty schedule_type schedule_config", "curricula are not built."
        ),
        "data_efficiency": _keys("seed data_sampling data_routing", "data efficiency is not built."),
        "eigenvalue": _keys(
            "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
            "eigenvalue estimation is not built.",
        ),
        "hybrid_engine": _keys(
            "max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
            "enable_cuda_graph",
            "the hybrid engine is not built.",
        ),
        "nebula": _keys(
            "persistent_storage_path persistent_time_interval num_of_version_in_retention enable_nebula_load load_path",
            "Nebula is not supported.",
        ),
        "datastates_ckpt": Feature("DataStates is not supported.", on_when_present=True),
        "quantize_training": Feature("quantised training is not built."),
        "weight_quantization": Feature("weight quantisation is not built.", on_when_present=True),
        "graph_harvesting": Feature("graph harvesting is not built."),
    }

    _provenance: Provenance = PrivateAttr(default_factory=Provenance)

    def stating(self, provenance: Provenance) -> Config:
        """Return a copy with another ``provenance``."""
        copy = self.model_copy()
        copy._provenance = provenance
        return copy

    def noting(self, *notes: ConfigNote | None) -> Config:
        """Return a copy with further ``notes``, of those that there are."""
        more = tuple(note for note in notes if note is not None)
        return self.stating(replace(self._provenance, notes=(*self.notes, *more)))

    @property
    def monitor_config(self) -> Config:
        """What has the sections of monitors, by DeepSpeed's name: ``MonitorMaster(config.monitor_config)``."""
        return self

    @property
    def provenance(self) -> Provenance:
        """Where the values come from."""
        return self._provenance

    @property
    def gradient_dtype(self) -> str:
        """The dtype in which gradients are kept and accumulated."""
        narrow = self.bf16.enabled and self.bf16.bf16_master_weights_and_grads
        return "bf16" if narrow and self.data_types.grad_accum_dtype != "fp32" else "fp32"

    @property
    def scales_loss(self) -> bool:
        """True if gradients are computed in fp16, and losses are multiplied by a scale."""
        return self.fp16.enabled or (self.torch_autocast.enabled and self.torch_autocast.dtype == "fp16")

    @property
    def observes_loss(self) -> bool:
        """True if some section writes or prints the loss of steps."""
        return math.isfinite(self.steps_per_print or math.inf) or self.has_monitor

    @property
    def has_monitor(self) -> bool:
        """True if some monitor is written to."""
        return any(section.enabled for section in (self.tensorboard, self.csv_monitor, self.wandb, self.comet))

    @property
    def auto(self) -> tuple[str, ...]:
        """Dotted keys that say "auto" and are not resolved yet; empty after ``resolve``."""
        return self._provenance.auto

    @property
    def sources(self) -> dict[str, str]:
        """Dotted key -> "file", "auto", "derived" or "default", for every key of the configuration."""
        return dict(self._provenance.sources)

    @property
    def notes(self) -> tuple[ConfigNote, ...]:
        """Remarks on keys: mostly keys that were given and have no effect in this run, each with the reason."""
        return self._provenance.notes

    @classmethod
    def rewrite(cls, raw: dict[str, Any], path: str, problems: list[ConfigProblem]) -> dict[str, Any]:
        """Translate the oldest form: ``zero_optimization: true`` is stage 1, with ``allgather_size`` beside it."""
        zero = raw.get("zero_optimization")
        if not isinstance(zero, bool):
            return raw
        raw = dict(raw, zero_optimization={"stage": int(zero)})
        size = raw.pop("allgather_size", None)
        if size is not None:
            raw["zero_optimization"]["allgather_bucket_size"] = size
        return raw

    def as_dict(self) -> dict[str, Any]:
        """Return everything, including defaults, with DeepSpeed's spellings. ``load_config`` accepts the result."""
        content: dict[str, Any] = self.model_dump(by_alias=True, exclude_none=True)
        return content

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key at the top level as plain data, a section as a dict. Trainers made for DeepSpeed ask so."""
        return self.as_dict().get(key, default)

    def __getitem__(self, key: str) -> Any:
        """As ``get``. Raises KeyError for an unknown key."""
        return self.as_dict()[key]

    def __contains__(self, key: object) -> bool:
        """True for a key at the top level that has a value."""
        return self.get(str(key)) is not None

    def effective(self) -> dict[str, EffectiveValue]:
        """Return dotted key -> value in force, for every key with a value. If a key has no effect, its note says why."""
        reasons = {note.key: note.reason for note in self.notes}

        def note(key: str) -> str | None:
            words = key.split(".")
            above = (".".join(words[:depth]) for depth in range(len(words), 0, -1))
            return next((reasons[path] for path in above if path in reasons), None)

        content = flatten(self.as_dict())
        found = {
            key: EffectiveValue(value, self._provenance.sources.get(key, "default"), note(key))
            for key, value in content.items()
        }
        return found | {entry.key: EffectiveValue(False, "file", entry.reason) for entry in self._provenance.off}

    def fingerprint(self) -> str:
        """Return 16 hex digits that are equal exactly if the contents are equal, on any host."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Return the values that are not defaults, one per line with its source, and then the notes."""
        content = flatten(self.as_dict())
        ordinary = _ordinary()
        lines = []
        for key, source in sorted(self.sources.items()):
            if key in self.auto:
                lines.append(f"  {key} = auto")
            elif key in content and content[key] != ordinary.get(key):
                lines.append(f"  {key} = {_short(content[key])}  ({source})")
        if self.notes:
            lines += ["notes:", *(f"  {note}" for note in self.notes)]
        return "\n".join([f"configuration {self.fingerprint()}, without the defaults:", *lines])


@cache
def _ordinary() -> dict[str, Any]:
    """The defaults by dotted key, including those of sections that are absent by default."""
    return flatten(Config(optimizer=Optimizer(type=""), scheduler=Scheduler(type="")).as_dict())


def flatten(content: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects into one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _short(value: Any) -> str:
    """Format a value. Numbers above 10,000 are written like 5e+08 if that is exact."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and abs(value) > 1e4 and float(f"{value:.3g}") == value:
        return f"{value:.3g}"
    return json.dumps(value)
