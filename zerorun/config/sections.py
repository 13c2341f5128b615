"""The sections of the configuration: DeepSpeed's names, their types, ranges and defaults, and what zerorun does with each.

Lengths called ``*_size``, ``*_parameters`` or ``*_threshold`` in ``zero_optimization`` count elements, not bytes.
``null`` means absent everywhere. A field without a mark takes effect; the marks ``Inert``, ``Refused`` and ``OnlyStages``
(fields.py) say what happens to the others.
"""

# Without ``from __future__ import annotations``: pydantic would evaluate every annotation from its text, which takes a
# third of the time of importing this file.
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from zerorun.config.fields import (
    Dtype,
    Feature,
    Flag,
    Inert,
    Int,
    LowerCase,
    OnlyStages,
    Real,
    Refused,
    Section,
    Stage,
    Text,
    UnitPolicy,
)
from zerorun.config.params import fallback_of
from zerorun.errors import ConfigProblem
from zerorun.log import warn_once

MAX_ELEMENTS = 2**63 - 1
_AT_LEAST_0 = Field(ge=0)
_AT_LEAST_1 = Field(ge=1)
Elements = Annotated[Int, _AT_LEAST_0]
Count = Annotated[Int, _AT_LEAST_1]
_BUFFERS = Inert("three buffers of the size of a unit's states are used: one is read, one updated, one written.")
_ALWAYS_BESIDE = Inert("reads and writes always go on beside the updates.", unless=True)
_CUT = Inert("files are read and written in pieces of 1 MiB, 32 at a time.")
_MAPPED = Inert("parameter shards on a disk are a mapped file; the kernel keeps in memory what there is room for.")
_SCALELESS = Inert("bf16 has the range of fp32 and uses no loss scale.")
_WHOLE_ACTIVATIONS = Inert("every tensor rank sends whole activations, or its part of the sequence, to the next stage.")
_DEEPCOMPILE = Inert("only DeepCompile would read it, and it is off.", unless=False)
_CAST = Inert("floating inputs are always cast to the compute dtype.", unless=True)
_FORMAT = "zerorun's own checkpoint format makes it unnecessary: "


class Optimizer(Section):
    """The optimizer to build when ``initialize`` is given none. ``params`` are its keywords."""

    type: Text
    """Adam, AdamW, AdamSAGE, Adagrad, Lion, SGD, Sophia, RAdam, NAdam, Adamax, Adadelta, RMSprop, Rprop, ASGD or Adafactor;
    case does not matter. `Adam` has decoupled weight decay, as in DeepSpeed."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the optimizer, checked by name and type. `lr` and `weight_decay` may be "auto" if a Trainer sets them."""
    allow_fallback: Flag = False
    """true: a type that compresses what it sends becomes the plain one, with a warning, instead of being refused:
    OneBitAdam and ZeroOneAdam become Adam, OneBitLamb becomes Lamb."""
    legacy_fusion: Annotated[Flag, Inert("the update always runs over the flat shard.", unless=False)] = False

    @classmethod
    def rewrite(cls, raw: dict[str, Any], path: str, problems: list[ConfigProblem]) -> dict[str, Any]:
        """Put the plain optimizer for one that compresses, if the file allows it, without the keywords of compression."""
        name, params = raw.get("type"), raw.get("params", {})
        if raw.get("allow_fallback") is not True or not isinstance(name, str) or not isinstance(params, dict):
            return raw
        found = fallback_of(name, params)
        if found is None:
            return raw
        warn_once(f"optimizer.type {name} became {found[0]}, as allow_fallback allows: nothing is compressed here.")
        return {**raw, "type": found[0], "params": found[1]}


class Scheduler(Section):
    """The learning-rate schedule to build when ``initialize`` is given none. Steps are optimizer steps."""

    type: Text
    """One of DeepSpeed's (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest) or of
    `torch.optim.lr_scheduler`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keywords of the schedule. All step counts are optimizer steps."""


class Fp16(Section):
    """Half precision with a loss scale. Scales are plain factors; windows count optimizer steps."""

    enabled: Flag = False
    """Train with parameters and activations in fp16, and with a loss scale."""
    auto_cast: Annotated[Flag, _CAST] = False
    loss_scale: Annotated[Real, Field(ge=0)] = 0.0
    """A fixed loss scale, as a factor; 0: the scale is dynamic, and found during training."""
    initial_scale_power: Annotated[Int, Field(ge=0, le=64)] = 16
    """The dynamic scale starts at 2 to this power."""
    loss_scale_window: Count = 1000
    """The scale is doubled after this many optimizer steps without overflow."""
    hysteresis: Count = 2
    """The scale is halved from the n-th overflow on: with 2, the first one does not change it. Doubling the scale resets
    the count."""
    consecutive_hysteresis: Flag = False
    """true: every step without overflow resets the count of overflows."""
    min_loss_scale: Annotated[Real, Field(gt=0)] = 1.0
    """The scale never goes lower. An overflow at this scale is an error that names the parameter and the rank."""
    fp16_master_weights_and_grads: Annotated[Flag, Refused("master weights are kept in fp32.")] = False
    opt_level: Annotated[Text, Inert("it belongs to NVIDIA apex, which zerorun does not use.")] = ""
    fp16_scale_tolerance: Annotated[Real, Inert("the loss scale is lowered by hysteresis alone.")] = 0.0


class Bf16(Section):
    """bfloat16 parameters and activations, over fp32 masters or alone."""

    enabled: Flag = False
    """Train with parameters and activations in bf16. Masters, gradients and optimizer states are in fp32, unless other keys
    of this section say otherwise."""
    check_grad_overflow: Flag = True
    """A step with NaN or infinite gradients is skipped with a warning; three in a row are an error."""
    immediate_grad_update: Annotated[Flag, Inert("gradients are always taken over while backward runs.", unless=True)] = (
        False
    )
    bf16_master_weights_and_grads: Flag = False
    """true: the bf16 weights are the masters, and gradients are kept in bf16. `rounding` says how updates are rounded."""
    bf16_optimizer_states: Flag = False
    """true: optimizer states are kept in bf16. Unlike in DeepSpeed that works over fp32 masters, too."""
    store_param_remainders: Flag = False
    """true: fp32 masters are kept as the bf16 weights and the 16 bits that these leave out: the same values in less."""
    rounding: Annotated[Literal["stochastic", "nearest", "kahan"], LowerCase] = "stochastic"
    """How updates are rounded to bf16: by chance with the right mean, to nearest as in DeepSpeed, or with a second bf16
    number beside each weight that keeps what the weight leaves out."""
    auto_cast: Annotated[Flag, _CAST] = False
    loss_scale: Annotated[Real, _SCALELESS] = 0.0
    initial_scale_power: Annotated[Int, _SCALELESS] = 0
    loss_scale_window: Annotated[Int, _SCALELESS] = 0
    hysteresis: Annotated[Int, _SCALELESS] = 0
    consecutive_hysteresis: Annotated[Flag, _SCALELESS] = False
    min_loss_scale: Annotated[Real, _SCALELESS] = 0.0


class Fp8(Section):
    """Linear layers that multiply in fp8, by torchao's ``Float8Linear``. Weights keep the dtype that fp16 or bf16 imply."""

    enabled: Flag = False
    """Let the linear layers of repeated blocks multiply in fp8 (needs torchao). A model that has layers of torchao's
    `Float8Linear` already keeps these, and no others become such layers. On CPUs fp8 is emulated."""
    recipe: Annotated[Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"], LowerCase] = "rowwise"
    """torchao's recipe: a scale for each row, the same with gradients of weights in 16 bits, or one scale for each tensor,
    which is the fastest and the least precise."""
    filter_fqns: tuple[Text, ...] = ()
    """Parts of the names of layers that are left as they are."""
    enable_fsdp_float8_all_gather: Annotated[Flag, OnlyStages((3,))] = False
    """Send a byte for each weight of these layers where parameters are gathered: the fp8 value that the layer casts it to.
    Nothing else changes. For "tensorwise", as in torchao: with scales of rows, forward and backward cast differently."""
    emulate: Flag = False
    """Compute in fp32 with values rounded to fp8, on devices without it, too. It is slow, and for trials."""

    other_names: ClassVar[dict[str, str]] = {"recipe_name": "recipe"}


class TorchAutocast(Section):
    """Run forward under ``torch.autocast``; parameters keep their dtype."""

    enabled: Flag = False
    """Run the forward under `torch.autocast`; parameters keep their dtype."""
    dtype: Dtype = "bf16"
    """The dtype to which autocast casts: bf16, or fp16 with the dynamic loss scale of torch.amp.GradScaler."""
    lower_precision_safe_modules: Annotated[
        tuple[Text, ...], Inert("communication_data_type sets the dtype on the wire, for all modules alike.")
    ] = ()


class DataTypes(Section):
    """Further dtypes."""

    grad_accum_dtype: Dtype | None = None
    """fp32: gradients are kept in fp32 even with `bf16.bf16_master_weights_and_grads`. Without that, they always are."""
    param_dtype: Dtype | None = None
    """If given, it must be the dtype that fp16 and bf16 imply."""
    buffer_dtype: Dtype | None = None
    """That of floating-point buffers, which is rarely wise: rotary tables are rounded. By default they keep their own."""
    keep_in_fp32_modules: Annotated[
        tuple[Text, ...], Inert("buffers keep their own dtype, whatever that of parameters is.", unless=())
    ] = ()


class OffloadOptimizer(Section):
    """Where the fp32 masters and the optimizer states are kept."""

    device: Annotated[Literal["none", "cpu", "nvme"], LowerCase] = "none"
    """Where fp32 masters and optimizer states are kept: "cpu" is host memory, "nvme" a file."""
    pin_memory: Flag = True
    """Pin host memory, so that copies overlap the computation. Without a GPU nothing is pinned."""
    ratio: Annotated[Real, Field(ge=0, le=1)] = 1.0
    """The share of the elements whose masters and optimizer states are offloaded, in whole units; the rest stays on the
    device."""
    nvme_path: Text | None = None
    """A folder on a local disk. The last component of the path is created if it is missing."""
    buffer_count: Annotated[Int, _BUFFERS] = 4
    pipeline_read: Annotated[Flag, _ALWAYS_BESIDE] = False
    pipeline_write: Annotated[Flag, _ALWAYS_BESIDE] = False
    pipeline: Annotated[Flag, _ALWAYS_BESIDE] = False
    fast_init: Annotated[Flag, Inert("room on the disk is allocated and not written.", unless=True)] = False
    super_offload: Annotated[Flag, Inert("there is one way to offload.", unless=False)] = False
    cpuadam_cores_perc: Annotated[Real, Inert("the update uses the threads of OMP_NUM_THREADS.")] = 0.8

    def is_off(self) -> bool:
        return self.device == "none"


class OffloadParam(Section):
    """Where the parameter shards of stage 3 are kept."""

    device: Annotated[Literal["none", "cpu", "nvme"], LowerCase] = "none"
    """Where parameter shards are kept between their uses: "cpu" is host memory, "nvme" a file."""
    pin_memory: Flag = True
    """As for the optimizer. Host memory is pinned only if both keys are true."""
    nvme_path: Text | None = None
    """A folder on a local disk."""
    buffer_count: Annotated[Int, _MAPPED] = 5
    buffer_size: Annotated[Int, _MAPPED] = 100_000_000
    max_in_cpu: Annotated[Int, _MAPPED] = 1_000_000_000

    def is_off(self) -> bool:
        return self.device == "none"


class LeafModule(Section):
    """Modules that are one unit, or within one, with all their submodules: layers of experts, for example."""

    classes: tuple[Text, ...] = ()
    """Names of classes, with their module or without."""
    names: tuple[Text, ...] = ()
    """Names of modules, as ``named_modules()`` gives them."""
    name_suffixes: tuple[Text, ...] = ()
    """Ends of names of modules."""


_STAGE_3 = OnlyStages((3,))
_BUCKET = 500_000_000
_ONE_BUCKET = Inert("a unit is one bucket; unit_policy decides how large it is.", unless=_BUCKET)
_PERSIST = "small parameters are gathered with their unit."
_ALLGATHER = Inert("parameters are gathered in place, one unit at a time.")


class LoCo(Section):
    """Error feedback for quantised gradients (LoCo): what rounding leaves out between hosts is kept, and sent later."""

    err_beta: Annotated[Real, Field(ge=0, lt=1)] = 0.8
    """The residual that is sent with the next gradients is a moving average with this factor; 0: all that was left out."""
    reset_T: Count = 1024
    """After so many optimizer steps residuals begin anew."""


class ZeroOptimization(Section):
    """The ZeRO stage, and how the model is cut and communicated."""

    stage: Stage = 0
    """0: nothing is sharded. 1: optimizer states are sharded. 2: gradients as well. 3: parameters as well. FSDP's names
    (NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD) are understood."""
    unit_policy: UnitPolicy = "by_block"
    """How the model is cut into units, which are gathered and reduced as a whole: "by_block", "by_block_group",
    "size_based", "by_block_and_size", or a list of class names of modules."""
    unit_block_count: Count = 2
    """Blocks per unit, for by_block_group."""
    unit_numel: Count = 50_000_000
    """The least number of elements of a unit for size_based, and of a module beside the blocks for by_block_and_size."""
    shard_degree: Annotated[Count | None, OnlyStages((1, 2, 3))] = None
    """The number of ranks in a group that shards; the groups are replicas of each other. Not given: all data-parallel ranks
    form one group."""
    hybrid_shard: Annotated[Flag, OnlyStages((1, 2, 3))] = False
    """Shard within groups of ranks and replicate between the groups; without shard_degree, a group is a node."""
    overlap_comm: Flag | None = None
    """Gather units before they are needed, and reduce them while backward goes on. Not given: true, except at stage 3 if
    ranks of one host read each other's memory."""
    overlap_param_gather: Annotated[Flag, OnlyStages((1, 2))] = False
    """Gather updated parameters while the next forward goes on, unit by unit. Until a unit has run, its parameters can be
    read only as at stage 3: in zerorun.zero.GatheredParameters, by state_dict() and the like."""
    reduce_scatter: Annotated[
        Flag, Inert("the stage decides how gradients are reduced; the result is the same.", unless=True)
    ] = True
    reduce_bucket_size: Annotated[Elements, _ONE_BUCKET] = _BUCKET
    allgather_bucket_size: Annotated[Elements, _ONE_BUCKET] = _BUCKET
    prefetch_bucket_size: Annotated[Elements, _STAGE_3] = Field(default=50_000_000, alias="stage3_prefetch_bucket_size")
    """The number of elements that are gathered ahead of the computation, in whole units; not given: one unit."""
    max_live_parameters: Annotated[Elements, _STAGE_3] = Field(default=1_000_000_000, alias="stage3_max_live_parameters")
    """The largest number of elements that are gathered at a time, in whole units."""
    param_persistence_threshold: Annotated[Elements, Inert(_PERSIST, unless=100_000)] = Field(
        default=100_000, alias="stage3_param_persistence_threshold"
    )
    model_persistence_threshold: Annotated[Elements, Inert(_PERSIST, unless=MAX_ELEMENTS)] = Field(
        default=MAX_ELEMENTS, alias="stage3_model_persistence_threshold"
    )
    ignore_unused_parameters: Flag = True
    """false: a step in which a trainable parameter gets a gradient on no rank is an error."""
    leaf_module: LeafModule = LeafModule()
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()
    gather_16bit_weights_on_model_save: Flag = Field(default=False, alias="stage3_gather_16bit_weights_on_model_save")
    """Whether `engine.save_16bit_model()` and trainers that save a model gather it on rank 0 at stage 3. `engine.export()`
    and `engine.state_dict()` work either way."""
    zero_hpz_partition_size: Annotated[Count, _STAGE_3] = 1
    """ZeRO++'s secondary partition (hpZ): so many neighbouring data-parallel ranks, those of a node, keep a second copy of
    the weights between them, so that units are gathered within a node. States are divided as without it."""
    mics_shard_size: Annotated[Int, _STAGE_3] = -1
    """MiCS; here another name for shard_degree."""
    mics_hierarchical_params_gather: Annotated[Flag, Inert("the backend chooses how to gather.", unless=False)] = False

    contiguous_gradients: Annotated[Flag, Inert("gradients always lie in one flat buffer.", unless=True)] = True
    compute_grad_norm: Annotated[Flag, Inert("the norm is always computed, and the update is the same.", unless=True)] = (
        True
    )
    parameter_alignment: Annotated[Flag, Inert("where parameters lie in flat buffers changes no result.", False)] = False
    use_multi_rank_bucket_allreduce: Annotated[Flag, Inert("gradients are truly reduce-scattered.")] = True
    allgather_partitions: Annotated[Flag, Inert(_ALLGATHER.reason, unless=True)] = True
    sub_group_size: Annotated[Elements, Inert("the update runs over the shard in one pass.")] = 1_000_000_000
    max_reuse_distance: Annotated[
        Elements, Inert("what is kept gathered follows the recorded order and stage3_max_live_parameters.")
    ] = Field(default=1_000_000_000, alias="stage3_max_reuse_distance")
    module_granularity_threshold: Annotated[Elements, Inert("unit_policy decides what is gathered together.")] = Field(
        default=0, alias="stage3_module_granularity_threshold"
    )
    use_all_reduce_for_fetch_params: Annotated[Flag, Inert(_ALLGATHER.reason, unless=False)] = Field(
        default=False, alias="stage3_use_all_reduce_for_fetch_params"
    )
    allgather_sequential: Annotated[Flag, Inert(_ALLGATHER.reason, unless=False)] = Field(
        default=False, alias="stage3_allgather_sequential"
    )
    round_robin_gradients: Annotated[Flag, Inert("shards are of equal size on every rank.", unless=False)] = False
    load_from_fp32_weights: Annotated[Flag, Inert("masters are loaded from the checkpoint's tensors.", True)] = True
    elastic_checkpoint: Annotated[Flag, Inert("every checkpoint loads at any world size.", unless=True)] = False
    legacy_stage1: Annotated[Flag, Refused("there is one stage 1.")] = False
    pipeline_loading_checkpoint: Annotated[Flag, Inert("a rank reads only its own slices.", unless=False)] = False
    memory_efficient_linear: Annotated[Flag, Inert("torch's linear is not patched, and needs no patch.")] = True
    override_module_apply: Annotated[Flag, Inert("module.apply is left as torch has it.", unless=False)] = True
    log_trace_cache_warnings: Annotated[Flag, Inert("there is no trace cache to be invalidated.", False)] = False
    enable_sanity_checks: Annotated[Flag, Inert("the checks are always on.", unless=True)] = False
    save_muon_momentum_buffer_in_memory: Annotated[Flag, Inert("momentum is where offload_optimizer puts states.")] = False
    zero_quantized_weights: Annotated[Flag, _STAGE_3] = False
    """Send int8 codes, with a scale for each 256 elements, where parameters are gathered for forward and backward (ZeRO++).
    Masters stay exact, and so do gains, biases, what is smaller than 256 elements, and what is in no block."""
    zero_quantized_nontrainable_weights: Annotated[Flag, _STAGE_3] = False
    """As zero_quantized_weights, for frozen parameters only."""
    zero_quantized_gradients: Annotated[Flag, OnlyStages((1, 2, 3))] = False
    """Send codes where gradients are reduced, rounded by chance so that the mean error is 0: 8 bits within a host, then
    zero_quantized_gradients_bits between hosts (ZeRO++)."""
    zero_quantized_gradients_bits: Annotated[Literal[4, 8], OnlyStages((1, 2, 3))] = 4
    """Bits of the codes that gradients are sent in between hosts."""

    zeropp_loco_param: LoCo | None = None
    """Error feedback for quantised gradients (LoCo); not given: they are rounded by chance instead."""

    other_names: ClassVar[dict[str, str]] = {
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "cpu_offload": "offload_optimizer",  # rewritten below; listed here so that they are suggested for a misspelling
        "cpu_offload_params": "offload_param",
        "cpu_offload_param": "offload_param",
        "cpu_offload_use_pin_memory": "offload_optimizer",
    }
    features: ClassVar[dict[str, Feature]] = {
        "zenflow": Feature("split updates (ZenFlow) are not built.", on_when_present=True),
    }

    @classmethod
    def rewrite(cls, raw: dict[str, Any], path: str, problems: list[ConfigProblem]) -> dict[str, Any]:
        """Turn ``cpu_offload: true`` and similar old keys into today's sections, with device "cpu"."""
        raw = dict(raw)
        pin = raw.pop("cpu_offload_use_pin_memory", None)
        for old, new in (
            ("cpu_offload", "offload_optimizer"),
            ("cpu_offload_param", "offload_param"),
            ("cpu_offload_params", "offload_param"),
        ):
            wanted = raw.pop(old, None)
            if wanted is None or wanted == "auto":
                continue
            if not isinstance(wanted, bool):
                problems.append(ConfigProblem(path + old, wanted, "must be true or false.", f'Use "{new}" instead.'))
            elif wanted and new in raw:
                reason = f"says the same as {path}{new}, which is given as well."
                problems.append(ConfigProblem(path + old, wanted, reason, f"Remove {old}."))
            elif wanted:
                raw[new] = {"device": "cpu"} if pin is None else {"device": "cpu", "pin_memory": pin}
        return raw


class ActivationCheckpointing(Section):
    """Recomputation of activations in backward. Without a policy the section alone switches nothing on, as in DeepSpeed.

    It then applies only to calls of ``zerorun.checkpointing.checkpoint`` in the model.
    """

    policy: Annotated[Literal["none", "full", "every_n", "selective"], LowerCase] = "none"
    """Which activations of repeated blocks are recomputed in backward instead of being kept. DeepSpeed has no such key: its
    section alone switches nothing on, and without a policy neither does it here."""
    every_n: Count = 2
    """For the policy every_n: every n-th block is recomputed."""
    cpu_checkpointing: Flag = False
    """Keep in host memory the activations that these blocks keep for backward."""
    partition_activations: Annotated[
        Flag, Inert("tensor_parallel.sequence_parallel divides between tensor ranks what is kept.", unless=False)
    ] = False
    contiguous_memory_optimization: Annotated[
        Flag, Inert("what is kept is not copied on the device, and buffers in host memory are reused.", unless=False)
    ] = False
    number_checkpoints: Annotated[Int, Inert("checkpoints need not be counted beforehand.")] = 0
    synchronize_checkpoint_boundary: Annotated[Flag, Inert("no step waits for the device to be timed.", unless=False)] = (
        False
    )
    profile: Annotated[
        Flag, Inert("use zerorun.checkpointing.kept_bytes(), or torch.profiler for times.", unless=False)
    ] = False


class Dataloader(Section):
    """The data loader that ``initialize(training_data=...)`` makes."""

    shuffle: Flag = True
    """Shuffle the data anew in every epoch. With pipeline stages, the default is false, as in DeepSpeed."""
    num_workers: Annotated[Int, _AT_LEAST_0] = 0
    """Processes on each rank that read and collate batches ahead; 0: the training loop waits for each batch."""
    divide_stream: Flag | None = None
    """Of an iterable dataset, which all ranks read, each of n ranks takes every n-th sample. false: it gives ranks other
    samples by itself. Not given: true, unless it is known to do so (Hugging Face's after `split_dataset_by_node`)."""


class Pipeline(Section):
    """Pipeline stages, and the order in which each works on the micro-batches of a step."""

    stages: Count = 1
    """The number of stages that the model is cut into."""
    schedule: Annotated[Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble"], LowerCase] = "1f1b"
    """The order in which a stage works on the micro-batches of a step."""
    chunks: Count = 1
    """Parts of the model on each stage, for the interleaved schedule."""
    partition: Text | tuple[Count, ...] = "best"
    """How the model is cut: a method ("uniform", "parameters", "type:REGEX", "best"), or the number of layers of each
    part."""
    activation_checkpoint_interval: Annotated[Int, _AT_LEAST_0] = 0
    """Layers are recomputed in backward in groups of this many; 0: none are recomputed."""
    seed_layers: Annotated[Flag, Inert("a layer's initial values never depend on the number of stages.", unless=False)] = (
        False
    )
    pipe_partitioned: Annotated[Flag, _WHOLE_ACTIVATIONS] = True
    grad_partitioned: Annotated[Flag, _WHOLE_ACTIVATIONS] = True
    use_reentrant: Annotated[Flag, Inert("layers are recomputed without re-entrance.", unless=False)] = True


_GROUPS = Refused("a configuration cannot hold process groups.", None, "Remove it; initialize() takes topology=.")


class TensorParallelGroup(Section):
    """``tensor_parallel.tp``."""

    tp_size: Count | None = None
    """Another name for tensor_parallel.size."""
    mpu: Annotated[Any, _GROUPS] = None
    tp_group: Annotated[Any, _GROUPS] = None
    tp_grain_size: Annotated[Int, Inert("parts are as equal as can be, by heads and by columns.")] = 1


_BY_PLAN = Inert("layers are divided by tensor_parallel.plan, by the model's own plan, or by one that is inferred.")


class TensorParallel(Section):
    """Tensor parallelism: layers that are divided over neighbouring ranks."""

    size: Count = 1
    """The number of ranks that divide each layer between them."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """Maps name patterns to styles. Empty: use the plan that the model ships, or infer one and try it out."""
    sequence_parallel: Flag = False
    """Divide activations between divided layers along the sequence as well."""
    vocab_parallel_loss: Flag = False
    """Compute the loss of a Hugging Face model from logits that stay divided."""
    autotp_size: Annotated[Int, _AT_LEAST_0] = 0
    """Another name for size."""
    tp_size: Count | None = None
    """Another name for size."""
    tp: TensorParallelGroup = TensorParallelGroup()
    dtype: Annotated[Text, Inert("fp16.enabled and bf16.enabled set the dtype.")] = "fp16"
    tp_overlap_comm: Annotated[Flag, Inert("sums over tensor ranks are waited for.", unless=False)] = False
    preset_model: Annotated[Text, _BY_PLAN] = ""
    partition_config: Annotated[dict[str, Any], _BY_PLAN] = Field(default_factory=dict)
    injection_policy_tuple: Annotated[list[Any], _BY_PLAN] = Field(default_factory=list)
    vocab_parallel_ce_backend: Annotated[Text, Inert("the loss of divided logits is zerorun's own.", unless="torch")] = (
        "torch"
    )
    keep_module_on_host: Annotated[Flag, Inert("offload_param keeps parameters on the host.", unless=False)] = False
    replace_with_kernel_inject: Annotated[Flag, Inert("no layer is replaced by an inference kernel.", unless=False)] = False

    other_names: ClassVar[dict[str, str]] = {
        "kernel_inject": "replace_with_kernel_inject",
        "vocab_parallel_lm_head": "vocab_parallel_loss",
    }


class ContextParallel(Section):
    """Context parallelism: neighbouring ranks that get the same batch, and divide each sequence between them."""

    size: Count | None = None
    """Another name for sequence_parallel_size."""
    method: Annotated[Literal["auto", "ulysses", "gather"] | None, LowerCase] = None
    """How attention sees the whole sequence: "ulysses", by whole sequences of some heads on each rank, or "gather", by the
    keys and values of all rows. Not given, or "auto": whichever sends fewer bytes."""
    in_evaluation: Flag = True
    """Whether sequences are divided in evaluation, too. If not, each rank has data of its own there: so does Trainer."""


_ROUTED = Refused("the model's own router and experts run, and nothing about them is changed.", None, "Remove the key.")
_FOUND = Inert("experts are known by their parameters and by how they are called.")
_OWN_FORWARD = Inert("the model's own forward runs on a rank's experts.")
_OWN_EXCHANGE = Inert("rows go by the collectives that everything else goes by.")
_BY_MODEL = Inert("it is read from the model.")


class ExpertParallel(Section):
    """Expert parallelism: the experts of each layer are spread over neighbouring ranks, which send one another rows."""

    enabled: Flag = False
    """Spread the experts of a Hugging Face model over ranks."""
    autoep_size: Count = 1
    """The number of neighbouring ranks that have the experts of each layer between them. With tensor ranks, they are among
    these, and their number must divide it."""
    expert_tensor_parallel_size: Annotated[Int, Refused("a rank has whole experts.", allowed=1)] = 1
    preset_model: Annotated[Text, _FOUND] = ""
    moe_layer_pattern: Annotated[Text, _FOUND] = ""
    expert_pattern: Annotated[Text, _FOUND] = ""
    router_pattern: Annotated[Text, _FOUND] = ""
    expert_w1: Annotated[Text, _FOUND] = ""
    expert_w2: Annotated[Text, _FOUND] = ""
    expert_w3: Annotated[Text, _FOUND] = ""
    has_shared_experts: Annotated[Flag, _FOUND] = False
    shared_experts_pattern: Annotated[Text, _FOUND] = ""
    shared_experts_gate_pattern: Annotated[Text, _FOUND] = ""
    num_experts_attr: Annotated[Text, _BY_MODEL] = ""
    top_k_attr: Annotated[Text, _BY_MODEL] = ""
    use_grouped_mm: Annotated[Flag, _OWN_FORWARD] = True
    disable_triton_grouped_mm: Annotated[Flag, _OWN_FORWARD] = False
    gate_up_impl: Annotated[Text, _OWN_FORWARD] = "separate"
    combine_impl: Annotated[Text, _OWN_FORWARD] = "weighted_sum"
    row_weighting_impl: Annotated[Text, _OWN_FORWARD] = "eager"
    comm_backend: Annotated[Text, _OWN_EXCHANGE] = "comm"
    comm_num_sm: Annotated[Int, _OWN_EXCHANGE] = 12
    comm_qp_margin: Annotated[Int, _OWN_EXCHANGE] = 4
    comm_max_tokens_per_rank: Annotated[Int, _OWN_EXCHANGE] = 0
    async_split_plan: Annotated[Flag, _OWN_EXCHANGE] = False
    validate_folding_routing: Annotated[Flag, Inert("each row's experts are counted on one tensor rank.", unless=False)] = (
        False
    )
    score_apply: Annotated[
        Text, Refused("weights multiply what experts give, as the model has it.", "post", "Remove the key.")
    ] = "post"
    top_k: Annotated[Any, _ROUTED] = None
    score_func: Annotated[Any, _ROUTED] = None
    route_norm: Annotated[Any, _ROUTED] = None
    route_scale: Annotated[Any, Refused(_ROUTED.reason, (None, 1), "Remove the key.")] = None
    routed_scaling_factor: Annotated[Any, _ROUTED] = None
    num_expert_groups: Annotated[Any, _ROUTED] = None
    num_limited_groups: Annotated[Any, _ROUTED] = None
    load_balance_coeff: Annotated[Any, _ROUTED] = None
    expert_activation: Annotated[Any, _ROUTED] = None

    other_names: ClassVar[dict[str, str]] = {"ep_size": "autoep_size", "expert_parallel_size": "autoep_size"}

    @property
    def size(self) -> int:
        """The number of ranks with different experts; 1 if the section is off."""
        return self.autoep_size if self.enabled else 1


class ParallelWrite(Section):
    """``checkpoint.parallel_write``."""

    pipeline_stage: Annotated[Flag, Inert(_FORMAT + "all ranks write in parallel.", unless=False)] = False


class CheckpointWriter(Section):
    """``checkpoint.writer``: buffers of DeepSpeed's fast writers."""

    type: Annotated[Text, Inert(_FORMAT + "there is one writer.")] = ""
    decoupled: Annotated[Flag, Inert("checkpoint.asynchronous asks for saving in the background.", unless=False)] = False
    io_buffer_size: Annotated[Int, Inert(_FORMAT + "there is one writer.")] = 0
    io_buffer_double: Annotated[Flag, Inert(_FORMAT + "there is one writer.")] = True
    io_multiplier: Annotated[Int, Inert(_FORMAT + "there is one writer.")] = 1
    data_parallel: Annotated[Text, Inert(_FORMAT + "all ranks write in parallel.")] = ""
    show_statistics: Annotated[Flag, Inert("sizes and times are logged when saving.", unless=False)] = False


class InMemory(Section):
    """``checkpoint.in_memory``: copies of the newest step in the memory of two hosts, for `zerorun --max-restarts`."""

    every_steps: Elements = 0
    """Make a copy every time this many optimizer steps are done, behind the next step; 0: never. A restart loads the newest
    one that is whole, unless there is a newer checkpoint in dir and auto_resume is set."""


class Checkpoint(Section):
    """When to save automatically, and DeepSpeed's keys about how to save."""

    dir: Text | None = None
    """The directory that the keys below save to and load from."""
    auto_resume: Flag = False
    """`initialize()` loads the newest checkpoint in dir, if there is one."""
    keep_last: Count | None = None
    """The number of checkpoints that are kept in a directory; not given: all."""
    every_steps: Elements = 0
    """Save every time this many optimizer steps are done; 0: never."""
    every_minutes: Annotated[Real, _AT_LEAST_0] = 0.0
    """Save when this many minutes have passed since the last save; 0: never."""
    on_signal: Flag = True
    """If dir is given: after SIGTERM or SIGUSR1 on any rank, all ranks save at the end of the step and exit with code
    75."""
    asynchronous: Flag = False
    """The saves that every_steps and every_minutes ask for run in the background."""
    in_memory: InMemory = InMemory()
    tag_validation: Annotated[Literal["warn", "ignore", "fail"], LowerCase, Inert("rank 0 chooses the tag.")] = "warn"
    load_universal: Annotated[Flag, Inert(_FORMAT + "every checkpoint loads at any world size.")] = False
    use_node_local_storage: Annotated[
        Flag, Inert(_FORMAT + "each file has one writer, so any disk will do.", unless=False)
    ] = False
    parallel_write: ParallelWrite = ParallelWrite()
    checkpoint_serialization: Annotated[Flag, Inert(_FORMAT + "there is no pickle.")] = True
    writer: CheckpointWriter = CheckpointWriter()


class Aio(Section):
    """Asynchronous disk access, for NVMe offload."""

    block_size: Annotated[Int, _CUT] = 1_048_576
    queue_depth: Annotated[Int, _CUT] = 8
    intra_op_parallelism: Annotated[Int, _CUT] = 1
    single_submit: Annotated[Flag, _CUT] = False
    overlap_events: Annotated[Flag, _CUT] = True
    use_gds: Annotated[Flag, Inert("what is on the disk is updated in host memory, not on a GPU.", unless=False)] = False
    other_names: ClassVar[dict[str, str]] = {"thread_count": "intra_op_parallelism"}


class TensorBoard(Section):
    """Event files for TensorBoard, written by rank 0 through `torch.utils.tensorboard`."""

    enabled: Flag = False
    """Write the values of every optimizer step."""
    output_path: Text = ""
    """The folder that has job_name in it; not given: the one that the program was started in."""
    job_name: Text = "DeepSpeedJobName"
    """The folder for this run."""


class CsvMonitor(Section):
    """Files of comma-separated values, one for each name, written by rank 0."""

    enabled: Flag = False
    """Write the values of every optimizer step."""
    output_path: Text = ""
    """The folder that has job_name in it; not given: the one that the program was started in."""
    job_name: Text = "DeepSpeedJobName"
    """The folder for this run. A file that is there is continued."""


class Wandb(Section):
    """Weights & Biases, to which rank 0 sends values through the package `wandb`."""

    enabled: Flag = False
    """Send the values of every optimizer step."""
    group: Text | None = None
    """The group of runs that this one belongs to."""
    team: Text | None = None
    """The team (wandb calls it entity) that the run belongs to."""
    project: Text = "deepspeed"
    """The project that the run belongs to."""


class Comet(Section):
    """Comet, to which rank 0 sends values through the package `comet_ml`. What is not given, Comet's own settings say."""

    enabled: Flag = False
    """Send the values of optimizer steps."""
    samples_log_interval: Elements = 100
    """Samples between two values of one name: those in between are not sent."""
    project: Text | None = None
    """The project that the experiment belongs to."""
    workspace: Text | None = None
    """The workspace of the project."""
    api_key: Text | None = None
    """The key of the account. The environment variable COMET_API_KEY keeps it out of the file."""
    experiment_name: Text | None = None
    """What Comet shows the experiment as."""
    experiment_key: Text | None = None
    """The key of the experiment, of 32 to 50 letters and digits: an experiment can be continued by it."""
    online: Flag | None = None
    """false: write an archive that can be uploaded later, and send nothing."""
    mode: Annotated[Literal["get", "create", "get_or_create"], LowerCase] | None = None
    """"get" continues the experiment of experiment_key, "create" begins a new one, "get_or_create" does what it can."""


class FlopsProfiler(Section):
    """A table, printed once on rank 0, of what each module takes: operations, parameters, latency."""

    enabled: Flag = False
    """Count the operations of one step with `torch.utils.flop_counter`, and time the step after it."""
    profile_step: Annotated[Int, _AT_LEAST_0] = 1
    """The step that is counted, from 0 on: 1 is the second."""
    module_depth: Int = -1
    """How deep in the model the modules of the first table are; -1: at every depth."""
    top_modules: Count = 1
    """Classes of modules that the first table has at each depth, the largest first."""
    detailed: Flag = True
    """Print a line for every module as well."""
    output_file: Text = ""
    """Write the tables to this file; not given: to the log."""
    recompute_fwd_factor: Annotated[Real, _AT_LEAST_0] = 0.0
    """Forwards that a backward repeats, as with activation checkpointing: a backward counts as 2 + this many forwards."""


class CommsLogger(Section):
    """A table of rank 0's collectives by label: calls, bytes, times, bandwidth."""

    enabled: Flag = False
    """Print the table every steps_per_print steps or else every ten, and when the engine is destroyed."""
    verbose: Flag = False
    """Print a line for each collective as well."""
    prof_all: Flag = True
    """Count all collectives; false: only those that prof_ops names."""
    prof_ops: tuple[Text, ...] = ()
    """Collectives to count, by torch's names, such as "all_gather" and "reduce_scatter"."""
    debug: Annotated[Flag, Inert("labels always say what a collective is for.", unless=False)] = False


def part_of_label(collective: str) -> str:
    """Return what the labels of a collective have in them. ``collective``: torch's name of it."""
    return collective.removesuffix("_into_tensor").removesuffix("_tensor").replace("_", "-")


class Throughput(Section):
    """``timers.throughput``."""

    enabled: Annotated[Flag, Inert("steps_per_print and monitors tell the throughput.", unless=False)] = True
    synchronized: Annotated[Flag, Inert("no step waits for the device to be timed.", unless=False)] = True


class Timers(Section):
    """DeepSpeed's timers."""

    throughput: Throughput = Throughput()


class Compile(Section):
    """``torch.compile`` for the repeated blocks, as ``engine.compile`` does it."""

    enabled: Flag = False
    """Apply `torch.compile` to the repeated blocks, as `engine.compile()` does."""
    disable: Annotated[Flag, Inert('"enabled" decides.', unless=True)] = False
    autoep_non_moe: Annotated[Flag, Inert("repeated blocks are compiled, whatever is in them.", unless=False)] = False
    backend: Text = "inductor"
    """The backend, as torch.compile names it."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keywords of torch.compile."""
    deepcompile: Annotated[Flag, Refused("DeepCompile is not built.")] = False
    passes: Annotated[list[Any], Inert(_DEEPCOMPILE.reason)] = Field(default_factory=list)
    free_activation: Annotated[Flag, _DEEPCOMPILE] = False
    free_activation_threshold: Annotated[Int, Inert(_DEEPCOMPILE.reason)] = 0
    offload_activation: Annotated[Flag, _DEEPCOMPILE] = False
    offload_activation_pin_memory: Annotated[Flag, Inert(_DEEPCOMPILE.reason)] = True
    offload_opt_states: Annotated[Flag, _DEEPCOMPILE] = False
    offload_parameters: Annotated[Flag, _DEEPCOMPILE] = False
    double_buffer: Annotated[Flag, Inert(_DEEPCOMPILE.reason)] = True
    symmetric_memory: Annotated[Flag, _DEEPCOMPILE] = False
    sync_before_reduce: Annotated[Flag, _DEEPCOMPILE] = False
    sync_after_reduce: Annotated[Flag, _DEEPCOMPILE] = False
    sync_before_allgather: Annotated[Flag, _DEEPCOMPILE] = False
    sync_after_allgather: Annotated[Flag, _DEEPCOMPILE] = False
    keep_int_input_tensors: Annotated[Flag, Inert(_DEEPCOMPILE.reason)] = True
    keep_all_input_tensors: Annotated[Flag, _DEEPCOMPILE] = False
    debug_log: Annotated[Flag, _DEEPCOMPILE] = False
