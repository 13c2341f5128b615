"""The optimizers and schedules that a configuration can name, and their keywords.

This file has only types and ranges. Defaults are in optim/optimizers.py, optim/lr_schedules.py and torch: a keyword that
was not given is not passed on, so the default of every field here is None. Learning rates are per optimizer step; lengths
count optimizer steps. Torch's classes and keywords are listed here instead of being looked up, so that a file is checked
without importing torch. A test compares the two.
"""

# Without ``from __future__ import annotations``: pydantic would evaluate every annotation from its text, which takes a
# third of the time of importing this file.
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model

from zerorun.config.fields import Flag, Inert, Int, LowerCase, PerGroup, Real, Refused, Section, Text, fail
from zerorun.errors import ConfigProblem, did_you_mean


def _betas(value: object) -> list[float]:
    valid = isinstance(value, (list, tuple)) and len(value) == 2
    if not valid or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in value):  # type: ignore[attr-defined]
        fail("must be two numbers, each at least 0 and less than 1.", "Write for example [0.9, 0.999].")
    return [float(beta) for beta in value]  # type: ignore[attr-defined]


def _two_numbers(value: object) -> list[float]:
    return _numbers(value, "two", [0.5, 1.2])


def _three_numbers(value: object) -> list[float]:
    return _numbers(value, "three", [3.4445, -4.775, 2.0315])


def _numbers(value: object, count: str, example: list[float]) -> list[float]:
    valid = isinstance(value, (list, tuple)) and len(value) == len(example)
    if not valid or not all(type(item) in (int, float) for item in value):  # type: ignore[attr-defined]
        fail(f"must be {count} numbers.", f"Write for example {example}.")
    return list(value)  # type: ignore[call-overload, no-any-return]


def _milestones(value: object) -> list[int]:
    if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
        fail("must be a list of whole numbers of steps.", "Write for example [1000, 2000].")
    return list(value)


def _adafactor_eps(value: object) -> list[float | None]:
    valid = isinstance(value, (list, tuple)) and len(value) == 2 and type(value[1]) in (int, float)
    if not valid or not (value[0] is None or type(value[0]) in (int, float)):  # type: ignore[index]
        fail("must be a number or null, then a number.", "Write for example [null, 1e-3].")
    return list(value)  # type: ignore[call-overload, no-any-return]


def _below_one(value: Any) -> Any:
    if any(number >= 1 for number in (value if isinstance(value, list) else [value])):
        fail("must be less than 1.", "Use a number that is less than 1.")
    return value


NonNegative = Annotated[Real, Field(ge=0)]
Betas = Annotated[list[float], BeforeValidator(_betas)]
TwoNumbers = Annotated[list[float], BeforeValidator(_two_numbers)]
Milestones = Annotated[list[int], BeforeValidator(_milestones)]
ThreeNumbers = Annotated[list[float], BeforeValidator(_three_numbers)]
Steps = Annotated[Int, Field(ge=0)]
SomeSteps = Annotated[Int, Field(ge=1)]
MomentumPerGroup = Annotated[PerGroup, AfterValidator(_below_one)]
WarmupType = Annotated[Literal["log", "linear"], LowerCase]


class RateParams(Section):
    """Keywords of nearly all optimizers."""

    lr: NonNegative | None = None
    max_grad_norm: Annotated[
        Real | None,
        Refused("clipping is not the optimizer's task.", None, "Remove it and set gradient_clipping at the top level."),
    ] = None


class DecayParams(RateParams):
    """The same, with weight decay."""

    weight_decay: NonNegative | None = None


class AdamParams(DecayParams):
    """``Adam`` has decoupled weight decay (AdamW), as in DeepSpeed, unless ``adam_w_mode`` is false.

    ``torch_adam`` gives the same update here. With it AdamW decays by 0.01 by default, as torch's class does.
    """

    betas: Betas | None = None
    eps: NonNegative | None = None
    adam_w_mode: Flag | None = None
    torch_adam: Flag | None = None
    set_grad_none: Annotated[Flag | None, Inert("zero_grad's own argument decides it.")] = None
    # Checked, but not passed on: no optimizer class has such a keyword.
    fp32_optimizer_states: Annotated[Flag | None, Refused("optimizer states are kept in fp32.", True)] = Field(
        None, exclude=True
    )
    bias_correction: Flag | None = None
    amsgrad: Flag | None = None
    fused: Flag | None = None
    capturable: Flag | None = None
    maximize: Flag | None = None
    foreach: Flag | None = None
    differentiable: Flag | None = None


class Adam8bitParams(DecayParams):
    """Adam with states of one byte per element, but for small parameters and embeddings. The decay is as for ``Adam``."""

    betas: Betas | None = None
    eps: NonNegative | None = None
    bias_correction: Flag | None = None
    adam_w_mode: Flag | None = None
    min_8bit_size: Annotated[Int, Field(ge=0)] | None = None
    fp32_embeddings: Flag | None = None


class LambParams(DecayParams):
    """LAMB scales each parameter's step by its norm, within ``min_coeff`` and ``max_coeff``."""

    betas: Betas | None = None
    eps: NonNegative | None = None
    eps_inside_sqrt: Flag | None = None
    bias_correction: Flag | None = None
    max_coeff: NonNegative | None = None
    min_coeff: NonNegative | None = None


_OF_TRANSFORMERS = "it is of transformers' Adafactor, and this name is torch's, with other formulas."
_PASS_THAT = "Pass transformers' Adafactor itself to initialize(optimizer=...); it is given whole parameters."


class AdafactorParams(DecayParams):
    """torch's Adafactor, on flat shards. ``foreach`` asks for torch's own class, which needs whole parameters."""

    maximize: Flag | None = None
    foreach: Flag | None = None
    beta2_decay: Annotated[Real, Field(le=0)] | None = None
    eps: Annotated[list[float | None], BeforeValidator(_adafactor_eps)] | None = None
    d: Annotated[Real, Field(ge=1)] | None = None
    clip_threshold: Annotated[Any, Refused(_OF_TRANSFORMERS, None, "Write it as d.")] = None
    decay_rate: Annotated[Any, Refused(_OF_TRANSFORMERS, None, "Write it as beta2_decay.")] = None
    beta1: Annotated[Any, Refused(_OF_TRANSFORMERS, None, _PASS_THAT)] = None
    relative_step: Annotated[Any, Refused(_OF_TRANSFORMERS, None, _PASS_THAT)] = None
    scale_parameter: Annotated[Any, Refused(_OF_TRANSFORMERS, None, _PASS_THAT)] = None
    warmup_init: Annotated[Any, Refused(_OF_TRANSFORMERS, None, _PASS_THAT)] = None


class LionParams(DecayParams):
    """Lion, which updates by the sign of an interpolated momentum."""

    betas: Betas | None = None


class MuonParams(DecayParams):
    """Muon for matrices of repeated blocks, AdamW for the rest: ``betas`` and ``eps`` are AdamW's.

    ``muon_lr`` and ``adam_lr`` take the place of ``lr``. ``adjust_lr_fn``: how Muon's learning rate follows the shape.
    """

    muon_lr: NonNegative | None = None
    adam_lr: NonNegative | None = None
    momentum: Annotated[Real, Field(ge=0, lt=1)] | None = None
    nesterov: Flag | None = None
    betas: Betas | None = None
    eps: NonNegative | None = None
    adjust_lr_fn: Annotated[Literal["match_rms_adamw", "original"], LowerCase] | None = None
    ns_coefficients: ThreeNumbers | None = None
    ns_steps: Annotated[Int, Field(ge=1)] | None = None
    ns_method: Annotated[Literal["standard", "gram"], LowerCase] | None = None
    ns_dtype: Annotated[Literal["bf16", "fp32"], LowerCase] | None = None


class AdamSAGEParams(Section):
    """AdamW-SAGE: AdamW with a learning rate for each element, by how much its sensitivity varies."""

    lr: NonNegative | None = None
    betas: Betas | None = None
    beta3: Annotated[Real, Field(ge=0, lt=1)] | None = None
    eps: Annotated[Real, Field(gt=0)] | None = None
    weight_decay: NonNegative | None = None


class CheckedParams(Section):
    """Keywords of which those in ``required`` must be given. ``meanings``: what they are, for those that need words."""

    required: ClassVar[tuple[str, ...]] = ()
    meanings: ClassVar[Mapping[str, str]] = {}


class SophiaParams(CheckedParams):
    """Sophia-G: momentum divided by a curvature that ``engine.backward(loss, curvature=True)`` gives, and clipped."""

    required: ClassVar[tuple[str, ...]] = ("bs",)
    meanings: ClassVar[Mapping[str, str]] = {"bs": "the tokens of a step, train_batch_size times the length of a sequence"}
    lr: NonNegative | None = None
    betas: Betas | None = None
    rho: NonNegative | None = None
    bs: Annotated[Real, Field(gt=0)] | None = None
    eps: Annotated[Real, Field(gt=0)] | None = None
    weight_decay: NonNegative | None = None
    update_interval: SomeSteps | None = None


class ScheduleParams(CheckedParams):
    """Keywords of a schedule."""


class FormulaParams(ScheduleParams):
    """``last_batch_iteration`` is the number of completed optimizer steps minus one."""

    last_batch_iteration: Annotated[Int, Field(ge=-1)] | None = None


class WarmupLRParams(FormulaParams):
    """Warm up, then stay."""

    warmup_min_lr: PerGroup = None
    warmup_max_lr: PerGroup = None
    warmup_num_steps: Steps | None = None
    warmup_type: WarmupType | None = None


class WarmupDecayLRParams(WarmupLRParams):
    """Warm up, then fall to zero on a straight line."""

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)
    total_num_steps: SomeSteps | None = None


class WarmupCosineLRParams(FormulaParams):
    """Warm up, then fall along a cosine. Ratios are relative to the optimizer's own lr."""

    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)
    total_num_steps: SomeSteps | None = None
    warmup_min_ratio: NonNegative | None = None
    warmup_num_steps: Steps | None = None
    cos_min_ratio: NonNegative | None = None
    warmup_type: WarmupType | None = None


class OneCycleParams(FormulaParams):
    """The lr rises, falls, and then decays slowly; momentum goes the other way."""

    required: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")
    cycle_min_lr: PerGroup = None
    cycle_max_lr: PerGroup = None
    decay_lr_rate: NonNegative | None = None
    cycle_first_step_size: SomeSteps | None = None
    cycle_second_step_size: Steps | None = None
    cycle_first_stair_count: Steps | None = None
    cycle_second_stair_count: Steps | None = None
    decay_step_size: Steps | None = None
    cycle_momentum: Flag | None = None
    cycle_min_mom: MomentumPerGroup = None
    cycle_max_mom: MomentumPerGroup = None
    decay_mom_rate: NonNegative | None = None


class LRRangeTestParams(FormulaParams):
    """A rising lr, to find where training breaks."""

    lr_range_test_min_lr: PerGroup = None
    lr_range_test_step_size: SomeSteps | None = None
    lr_range_test_step_rate: NonNegative | None = None
    lr_range_test_staircase: Flag | None = None


def _of_torch(numbers: str, flags: str, base: type[Section] = DecayParams, **others: Any) -> type[Section]:
    """Make the keywords of a class of torch.optim: ``numbers`` that are not negative, ``flags``, and ``others``."""
    kinds = dict.fromkeys(numbers.split(), NonNegative)
    kinds |= dict.fromkeys(["maximize", "foreach", "differentiable", *flags.split()], Flag) | others
    keywords: dict[str, Any] = {name: (kind | None, None) for name, kind in kinds.items()}
    return create_model("TorchOptimizerParams", __base__=base, **keywords)


def _kinds_of_schedules(**names: str) -> dict[str, Any]:
    """Keyword -> kind. ``names``: the keywords of each kind."""
    kinds: dict[str, Any] = {"real": Real, "whole": Int, "flag": Flag, "text": Text, "rates": PerGroup, "steps": Milestones}
    return {name: kinds[kind] for kind, listed in names.items() for name in listed.split()}


# Torch takes strings for some of these, and stumbles over them in a later step, or never comes to the steps that they name.
_SCHEDULE_KINDS = _kinds_of_schedules(
    real="gamma factor start_factor end_factor power eta_min pct_start div_factor final_div_factor T_max total_iters "
    "step_size_up step_size_down",
    whole="step_size T_0 T_mult total_steps epochs steps_per_epoch last_epoch",
    flag="cycle_momentum three_phase",
    text="mode scale_mode anneal_strategy",
    rates="base_lr max_lr base_momentum max_momentum",
    steps="milestones",
)


def _torch_schedule(required: str, others: str) -> type[ScheduleParams]:
    """Make the keywords of a class of torch.optim.lr_scheduler, which checks itself what only it can know of them."""
    names = [*required.split(), *others.split(), "last_epoch"]
    keywords: dict[str, Any] = {name: (_SCHEDULE_KINDS.get(name, Any) | None, None) for name in names}
    made = create_model("TorchScheduleParams", __base__=ScheduleParams, **keywords)
    made.required = tuple(required.split())
    return made


# Canonical spelling -> keywords. Names are looked up without regard to case.
OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adam8bit": Adam8bitParams,
    "AdamW8bit": Adam8bitParams,
    # The same by the names of bitsandbytes' users' other options.
    "adam_8bit": Adam8bitParams,
    "adamw_8bit": Adam8bitParams,
    "adamw_bnb_8bit": Adam8bitParams,
    "SGD": _of_torch("momentum dampening", "nesterov fused"),
    "Adagrad": _of_torch("lr_decay initial_accumulator_value eps", "fused"),
    "RAdam": _of_torch("eps", "decoupled_weight_decay capturable", betas=Betas),
    "NAdam": _of_torch("eps momentum_decay", "decoupled_weight_decay capturable", betas=Betas),
    "Adamax": _of_torch("eps", "capturable", betas=Betas),
    "Adadelta": _of_torch("eps", "capturable", rho=Annotated[Real, Field(ge=0, le=1)]),
    "RMSprop": _of_torch("alpha eps momentum", "centered capturable"),
    "Rprop": _of_torch("", "capturable", RateParams, etas=TwoNumbers, step_sizes=TwoNumbers),
    "ASGD": _of_torch("", "capturable", lambd=Real, alpha=Real, t0=Real),
    "Adafactor": AdafactorParams,
    "Lion": LionParams,
    "AdamSAGE": AdamSAGEParams,
    "Sophia": SophiaParams,
    "SophiaG": SophiaParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
}
SCHEDULERS: dict[str, type[ScheduleParams]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}
_MOMENTUM = "cycle_momentum base_momentum max_momentum"
TORCH_SCHEDULERS: dict[str, type[ScheduleParams]] = {
    "StepLR": _torch_schedule("step_size", "gamma"),
    "MultiStepLR": _torch_schedule("milestones", "gamma"),
    "ConstantLR": _torch_schedule("", "factor total_iters"),
    "LinearLR": _torch_schedule("", "start_factor end_factor total_iters"),
    "ExponentialLR": _torch_schedule("gamma", ""),
    "PolynomialLR": _torch_schedule("", "total_iters power"),
    "CosineAnnealingLR": _torch_schedule("T_max", "eta_min"),
    "CosineAnnealingWarmRestarts": _torch_schedule("T_0", "T_mult eta_min"),
    "CyclicLR": _torch_schedule(
        "base_lr max_lr", f"step_size_up step_size_down mode gamma scale_fn scale_mode {_MOMENTUM}"
    ),
    "OneCycleLR": _torch_schedule(
        "max_lr",
        f"total_steps epochs steps_per_epoch pct_start anneal_strategy {_MOMENTUM} div_factor final_div_factor three_phase",
    ),
}
# Lower-case name -> (what to use instead, why).
_REFUSED_OPTIMIZERS = {
    "onebitadam": ("Adam", "compressed 1-bit communication is not built"),
    "zerooneadam": ("Adam", "compressed 0/1 communication is not built"),
    "onebitlamb": ("Lamb", "compressed 1-bit communication is not built"),
    "muadam": ("Adam", "the mup package's optimizers are not supported"),
    "muadamw": ("AdamW", "the mup package's optimizers are not supported"),
    "musgd": ("SGD", "the mup package's optimizers are not supported"),
    "pagedadam8bit": ("Adam8bit", "states are not paged; offload_optimizer keeps them in host memory"),
    "pagedadamw8bit": ("AdamW8bit", "states are not paged; offload_optimizer keeps them in host memory"),
    "paged_adamw_8bit": ("AdamW8bit", "states are not paged; offload_optimizer keeps them in host memory"),
    "lbfgs": ("AdamW", "LBFGS evaluates the model several times in one step and takes dot products over all parameters"),
    "sparseadam": ("Adam", "SparseAdam needs sparse gradients, and gradients are reduced as parts of flat buffers"),
}
# Of these, the names that become what to use instead where the file allows it: they are that, and compress what they send.
_FALLBACKS = ("onebitadam", "zerooneadam", "onebitlamb")
# Lower-case name -> why a configuration cannot describe it.
_CALLABLES = "its parameters are functions, which a configuration cannot hold."
_SCHEDULES = "its parameters are other schedules, which a configuration cannot hold."
_REFUSED_SCHEDULERS = {
    "lambdalr": _CALLABLES,
    "multiplicativelr": _CALLABLES,
    "sequentiallr": _SCHEDULES,
    "chainedscheduler": _SCHEDULES,
    "reducelronplateau": "it needs a metric in every step(), which a schedule driven by optimizer steps does not have.",
}


@dataclass(frozen=True)
class KnownType:
    """What is known about the ``type`` of an optimizer or schedule section."""

    name: str  # canonical spelling
    params: type[Section]


def find_kind(section: str, name: object) -> KnownType | None:
    """Look up a ``type``. ``section`` is "optimizer" or "scheduler". None if it has no such name."""
    for known, params in _kinds(section).items():
        if isinstance(name, str) and name.lower() == known.lower():
            return KnownType(known, params)
    return None


def _kinds(section: str) -> Mapping[str, type[Section]]:
    return OPTIMIZERS if section == "optimizer" else {**SCHEDULERS, **TORCH_SCHEDULERS}


def wrong_name(section: str, name: str, params: dict[str, Any]) -> ConfigProblem | None:
    """Return the problem with a ``type``, or None. A class of the user's, ``package.Class``, is tried at initialize()."""
    if find_kind(section, name) is not None or (section == "optimizer" and "." in name):
        return None
    refused = refused_optimizer(name, params) if section == "optimizer" else _refused_scheduler(name)
    return refused or _unknown_name(section, name)


def _unknown_name(section: str, name: str) -> ConfigProblem:
    known = list(_kinds(section))
    own = ", or a class of your own by package.Class" if section == "optimizer" else ""
    remedy = did_you_mean(name, known) or f"Use one of {', '.join(known)}{own}."
    return ConfigProblem(f"{section}.type", name, f"no {section} has this name.", remedy)


def _refused_scheduler(name: str) -> ConfigProblem | None:
    reason = _REFUSED_SCHEDULERS.get(name.lower())
    remedy = "Build it in the program: pass lr_scheduler= to initialize(), or step it in the training loop."
    return ConfigProblem("scheduler.type", name, reason, remedy) if reason else None


def refused_optimizer(name: str, params: dict[str, Any]) -> ConfigProblem | None:
    """Return the problem with an optimizer that zerorun cannot offer. Its remedy is one edit that gives a valid section."""
    if name.lower() not in _REFUSED_OPTIMIZERS:
        return None
    instead, reason = _REFUSED_OPTIMIZERS[name.lower()]
    extra = [key for key, value in params.items() if not _stays(instead, key, value)]
    remedy = f'Use "{instead}"'
    if extra:
        remedy += f", and remove {', '.join(extra)} from optimizer.params"
    if name.lower() in _FALLBACKS:
        remedy += f'; or add "allow_fallback": true, and {instead} is used'
    return ConfigProblem("optimizer.type", name, f"{reason}.", remedy + ".")


def fallback_of(name: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the plain optimizer for one that compresses, with the keywords that it knows; None for others."""
    if name.lower() not in _FALLBACKS:
        return None
    plain, _ = _REFUSED_OPTIMIZERS[name.lower()]
    return plain, {key: value for key, value in params.items() if _stays(plain, key, value)}


def _stays(optimizer: str, key: str, value: object) -> bool:
    field = OPTIMIZERS[optimizer].spellings().get(key)
    if field is None:
        return False
    marks = OPTIMIZERS[optimizer].model_fields[field].metadata
    return all(not isinstance(mark, Refused) or value == mark.allowed for mark in marks)
