"""Rules over several keys: contradictions, features that are not built, and notes on keys that have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from zerorun.config.fields import NOT_ENABLED, ConfigNote, Inert, OnlyStages, Refused, Section
from zerorun.config.params import Adam8bitParams, find_kind, wrong_name
from zerorun.config.schema import Config
from zerorun.config.sections import part_of_label
from zerorun.errors import ConfigProblem, did_you_mean

_COUNTED = ("all-gather", "all-reduce", "broadcast", "reduce-scatter")  # what labels of collectives say


def find_contradictions(config: Config, params: list[tuple[str, Section]]) -> list[ConfigProblem]:
    """Return every setting that cannot be honoured, whatever the device and the number of ranks."""
    problems = [problem for path, section in _sections(config, "") for problem in _refused_values(section, path)]
    problems += [problem for path, section in params for problem in _refused_values(section, path)]
    rules = (_precision, _masters, _loss_scale, _offload, _shard_degree, _zeropp, _compile, _names, _checkpoint, _parallel)
    for rule in (*rules, _buffers):
        problems += rule(config)
    return problems


def _sections(section: Section, path: str) -> Iterator[tuple[str, Section]]:
    """Yield the section and all sections in it, each with its path, which ends with a dot or is empty."""
    yield path, section
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _sections(value, f"{path}{field.alias or name}.")


def _in_order(section: Section) -> list[str]:
    """Return the names that the file gives values to. Most files give few."""
    given = section.model_fields_set
    return [name for name in type(section).model_fields if name in given] if given else []


def _refused_values(section: Section, path: str) -> Iterator[ConfigProblem]:
    for name in _in_order(section):
        field, value = type(section).model_fields[name], getattr(section, name)
        for mark in field.metadata:
            if not isinstance(mark, Refused):
                continue
            allowed = mark.allowed if isinstance(mark.allowed, tuple) else (mark.allowed,)
            if value in allowed:
                continue
            shown = str(mark.allowed).lower()
            yield ConfigProblem(path + (field.alias or name), value, mark.reason, mark.remedy or f"Set it to {shown}.")


def _precision(config: Config) -> Iterator[ConfigProblem]:
    if config.fp16.enabled and config.bf16.enabled:
        reason = "fp16.enabled and bf16.enabled are both true."
        yield ConfigProblem("bf16.enabled", True, reason, "Set one of the two to false.")
    for name in ("fp16", "bf16"):
        if config.torch_autocast.enabled and getattr(config, name).enabled:
            reason = f"autocast works on fp32 parameters, and {name}.enabled casts them."
            remedy = f"Set torch_autocast.enabled or {name}.enabled to false."
            yield ConfigProblem("torch_autocast.enabled", True, reason, remedy)


def _masters(config: Config) -> Iterator[ConfigProblem]:
    section = config.bf16
    if not section.enabled:
        return
    if section.bf16_master_weights_and_grads and section.store_param_remainders:
        reason = "it keeps fp32 masters, and bf16_master_weights_and_grads keeps none."
        remedy = 'Remove one of the two; "rounding": "kahan" is near the first in the same memory.'
        yield ConfigProblem("bf16.store_param_remainders", True, reason, remedy)
    if section.rounding == "kahan" and not section.bf16_master_weights_and_grads:
        reason = "masters are in fp32, which leave nothing out that a second number could keep."
        remedy = "Set bf16.bf16_master_weights_and_grads to true, or remove the key."
        yield ConfigProblem("bf16.rounding", "kahan", reason, remedy)
    kind = find_kind("optimizer", config.optimizer.type) if config.optimizer is not None else None
    if section.bf16_optimizer_states and kind is not None and kind.params is Adam8bitParams:
        remedy = 'Remove the key, or set optimizer.type to "AdamW".'
        yield ConfigProblem("bf16.bf16_optimizer_states", True, f"{kind.name} keeps states in 8 bits.", remedy)
    if config.gradient_dtype == "bf16" and config.zero_optimization.zero_quantized_gradients:
        reason = "gradients are coded from fp32, and bf16_master_weights_and_grads keeps them in bf16."
        remedy = 'Set data_types.grad_accum_dtype to "fp32", or remove the key.'
        yield ConfigProblem("zero_optimization.zero_quantized_gradients", True, reason, remedy)


def _loss_scale(config: Config) -> Iterator[ConfigProblem]:
    fp16 = config.fp16
    highest = fp16.loss_scale or 2.0**fp16.initial_scale_power
    if fp16.enabled and fp16.min_loss_scale > highest:
        reason = f"the lowest loss scale is above the first one, {highest:g}."
        yield ConfigProblem("fp16.min_loss_scale", fp16.min_loss_scale, reason, f"Use at most {highest:g}.")


def _offload(config: Config) -> Iterator[ConfigProblem]:
    zero = config.zero_optimization
    for name, section, stages in (
        ("offload_optimizer", zero.offload_optimizer, (1, 2, 3)),
        ("offload_param", zero.offload_param, (3,)),
    ):
        key = f"zero_optimization.{name}.device"
        if section.device == "nvme" and not (section.nvme_path or "").strip():
            reason = "needs a folder on a local disk."
            yield ConfigProblem(key, "nvme", reason, f'Set zero_optimization.{name}.nvme_path, or device to "cpu".')
        if section.device != "none" and zero.stage not in stages:
            reason = f"needs stage {' or '.join(map(str, stages))}; at stage {zero.stage} there is no shard to move."
            remedy = f'Remove {name}, or set its device to "none", or set zero_optimization.stage to 3.'
            yield ConfigProblem(key, section.device, reason, remedy)


def _shard_degree(config: Config) -> Iterator[ConfigProblem]:
    """Two keys set the shard degree: shard_degree, and MiCS's shard size."""
    zero = config.zero_optimization
    wanted = zero.mics_shard_size
    if wanted > 1 and zero.shard_degree not in (None, wanted):
        reason, remedy = f"sets the shard degree, which another key sets to {zero.shard_degree}.", "Keep shard_degree."
        yield ConfigProblem("zero_optimization.mics_shard_size", wanted, reason, f"{remedy} Remove mics_shard_size.")


def _zeropp(config: Config) -> Iterator[ConfigProblem]:
    zero, key = config.zero_optimization, "zero_optimization.zeropp_loco_param"
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        reason, remedy = "is about quantised gradients, and they are off.", "Set zero_quantized_gradients, or remove it."
        yield ConfigProblem(key, zero.zeropp_loco_param.model_dump(), reason, remedy)
    if zero.zeropp_loco_param is not None and config.optimizer is not None and config.optimizer.type.lower() == "sophia":
        reason = "adds what was left out of gradients to the next ones, and Sophia reduces curvatures between them."
        yield ConfigProblem(key, zero.zeropp_loco_param.model_dump(), reason, "Remove it, or choose another optimizer.")


def _compile(config: Config) -> Iterator[ConfigProblem]:
    if config.compile.enabled and config.compile.disable:
        reason = "compile.enabled and compile.disable are both true."
        yield ConfigProblem("compile.disable", True, reason, "Remove one of the two.")
    if config.compile.enabled and config.activation_checkpointing.policy == "selective":
        reason = "selective checkpointing keeps results of single operations, which a compiled block does not show."
        remedy = 'Use "full" or "every_n", or set compile.enabled to false.'
        yield ConfigProblem("activation_checkpointing.policy", "selective", reason, remedy)
    if "backend" in config.compile.kwargs:
        value, reason = config.compile.kwargs["backend"], "compile.backend names the backend."
        yield ConfigProblem("compile.kwargs.backend", value, reason, "Write it as compile.backend.")


def _names(config: Config) -> Iterator[ConfigProblem]:
    for name, section in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        problem = wrong_name(name, section.type, section.params) if section is not None else None
        if problem is not None:
            yield problem


def _checkpoint(config: Config) -> Iterator[ConfigProblem]:
    section = config.checkpoint
    if section.dir is not None and not section.dir.strip():
        remedy = 'Write a path, such as "checkpoints", or leave the key out.'
        yield ConfigProblem("checkpoint.dir", section.dir, "it names no directory.", remedy)
    for name in ("auto_resume", "every_steps", "every_minutes"):
        value = getattr(section, name)
        if value and section.dir is None:
            reason, remedy = "there is no directory to do it in.", "Set checkpoint.dir."
            yield ConfigProblem(f"checkpoint.{name}", value, reason, remedy)
    if section.asynchronous and not (section.every_steps or section.every_minutes):
        reason = "it is about saves by checkpoint.every_steps or every_minutes, and neither is set."
        remedy = "Set one of them; in a script, call save_checkpoint(..., asynchronous=True)."
        yield ConfigProblem("checkpoint.asynchronous", True, reason, remedy)


def _buffers(config: Config) -> Iterator[ConfigProblem]:
    section = config.data_types
    if section.keep_in_fp32_modules and section.buffer_dtype not in (None, "fp32"):
        reason = f"buffer_dtype casts all floating-point buffers to {section.buffer_dtype}."
        remedy = "Remove data_types.buffer_dtype: then all keep their own dtype."
        yield ConfigProblem("data_types.keep_in_fp32_modules", list(section.keep_in_fp32_modules), reason, remedy)


def tensor_sizes(config: Config) -> dict[str, int]:
    """Return every key for the tensor-parallel degree, with its value."""
    section = config.tensor_parallel
    return {
        "tensor_parallel.size": section.size,
        "tensor_parallel.autotp_size": section.autotp_size or 1,
        "tensor_parallel.tp_size": section.tp_size or 1,
        "tensor_parallel.tp.tp_size": section.tp.tp_size or 1,
    }


def context_sizes(config: Config) -> dict[str, int]:
    """Return every key for the number of ranks that divide a sequence, with its value."""
    return {
        "sequence_parallel_size": config.sequence_parallel_size or 1,
        "context_parallel.size": config.context_parallel.size or 1,
    }


def _parallel(config: Config) -> Iterator[ConfigProblem]:
    contexts = {key: size for key, size in context_sizes(config).items() if size > 1}
    if len(set(contexts.values())) > 1:
        key, size = "context_parallel.size", config.context_parallel.size
        reason = (
            f"sequence_parallel_size is {config.sequence_parallel_size}, and both are the ranks that divide a sequence."
        )
        yield ConfigProblem(key, size, reason, "Keep sequence_parallel_size.")
    if contexts and config.tensor_parallel.sequence_parallel:
        reason, remedy = "sequences are divided over context ranks already.", "Remove the key, or sequence_parallel_size."
        yield ConfigProblem("tensor_parallel.sequence_parallel", True, reason, remedy)
    sizes = {key: size for key, size in tensor_sizes(config).items() if size > 1}
    for key, size in sizes.items():
        first = next(iter(sizes))
        if size != sizes[first]:
            yield ConfigProblem(key, size, f"{first} is {sizes[first]}, and both are the tensor degree.", f"Keep {first}.")
    pipeline = config.pipeline
    if pipeline.schedule == "interleaved" and pipeline.chunks < 2:
        reason, remedy = "each stage needs at least 2 parts of the model.", 'Set pipeline.chunks to 2, or use "1f1b".'
        yield ConfigProblem("pipeline.chunks", pipeline.chunks, reason, remedy)
    if pipeline.schedule != "interleaved" and pipeline.chunks > 1:
        reason, remedy = f"the schedule {pipeline.schedule!r} has one part on each stage.", 'Use "interleaved".'
        yield ConfigProblem("pipeline.chunks", pipeline.chunks, reason, remedy)


def collect_notes(config: Config) -> tuple[ConfigNote, ...]:
    """Return a note with the reason for each key of the file that has no effect in this run, and some other remarks."""
    written = _written(config)
    found = [(path, section) for path, section in _sections(config, "") if not path or path[:-1] in written]
    notes = [note for path, section in found for note in _section_notes(config, section, path, written)]
    rules = (_clipping_note, _unit_notes, _static_scale_notes, _adam_note, _params_notes, _recompute_notes)
    for rule in (*rules, _offload_notes, _tensor_notes, _autocast_note, _rounding_notes, _counted_notes):
        notes += rule(config)
    return tuple(notes)


def _written(config: Config) -> frozenset[str]:
    """Return the keys to which the file gives a value other than "auto", and the objects that contain them."""
    keys = {key for key, source in config.sources.items() if source == "file"}.difference(config.auto)
    parts = [key.split(".") for key in keys]
    return frozenset(".".join(words[:depth]) for words in parts for depth in range(1, len(words) + 1))


def written_in_vain(config: Config, path: str, names: tuple[str, ...]) -> list[str]:
    """Return those of ``names`` to which the file gives a value other than the default, so that one expects an effect."""
    section: Section = config
    for step in path.split("."):
        section = getattr(section, step)
    fields, written = type(section).model_fields, _written(config)
    found = [name for name in names if getattr(section, name) != fields[name].get_default(call_default_factory=True)]
    return [key for name in found if (key := f"{path}.{fields[name].alias or name}") in written]


def _section_notes(config: Config, section: Section, path: str, written: frozenset[str]) -> Iterator[ConfigNote]:
    if section.is_off():
        if _waits_for_switch(config, section, path, written):
            yield ConfigNote(path.rstrip("."), NOT_ENABLED)
        return
    for name, field in type(section).model_fields.items():
        key = path + (field.alias or name)
        if key not in written:
            continue
        value = getattr(section, name)
        for mark in field.metadata:
            if isinstance(mark, Inert) and value != mark.unless:
                yield ConfigNote(key, mark.reason)
            if isinstance(mark, OnlyStages) and _elsewhere(config, mark) and value != field.default:
                stages = " or ".join(map(str, mark.stages))
                yield ConfigNote(key, f"only stage {stages} reads it; the stage is {config.zero_optimization.stage}.")


def _waits_for_switch(config: Config, section: Section, path: str, written: frozenset[str]) -> bool:
    """True if the file fills in a section without mentioning its switch, so that the section is off."""
    if config.sources.get(path + "enabled") != "default":
        return False
    for name, field in type(section).model_fields.items():
        happens_anyway = any(
            isinstance(mark, Refused) or (isinstance(mark, Inert) and getattr(section, name) == mark.unless)
            for mark in field.metadata
        )
        if path + (field.alias or name) in written and not happens_anyway:
            return True
    return False


def _elsewhere(config: Config, mark: OnlyStages) -> bool:
    return config.zero_optimization.stage not in mark.stages


def _clipping_note(config: Config) -> Iterator[ConfigNote]:
    if config.sources.get("gradient_clipping") == "default":
        value = config.gradient_clipping
        yield ConfigNote("gradient_clipping", f"not given; {value} as in DeepSpeed since 2026-06. 0 switches it off.")


def _offload_notes(config: Config) -> Iterator[ConfigNote]:
    zero = config.zero_optimization
    for name, section in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_param)):
        path = f"zero_optimization.{name}"
        if section.nvme_path and section.device != "nvme":
            reason = f"nothing goes there, since device is {section.device!r}."
            yield ConfigNote(f"{path}.nvme_path", reason)
        if section.device == "none":
            others = tuple(type(section).model_fields.keys() - {"device", "nvme_path"})
            for key in sorted(written_in_vain(config, path, others)):
                yield ConfigNote(key, "nothing is moved, since device is 'none'.")


def _tensor_notes(config: Config) -> Iterator[ConfigNote]:
    if config.tensor_parallel.size == 1:
        for key in written_in_vain(config, "tensor_parallel", ("sequence_parallel", "vocab_parallel_loss")):
            yield ConfigNote(key, "tensor_parallel.size is 1.")
    if max(context_sizes(config).values()) == 1:
        for key in written_in_vain(config, "context_parallel", ("method", "in_evaluation")):
            yield ConfigNote(key, "sequence_parallel_size is 1.")


def _counted_notes(config: Config) -> Iterator[ConfigNote]:
    """Note where ``comms_logger`` counts other collectives than one expects."""
    section, key = config.comms_logger, "comms_logger.prof_ops"
    if not section.enabled:
        return
    if section.prof_all:
        if section.prof_ops:
            yield ConfigNote(key, "all collectives are counted, unless prof_all is false.")
        return
    if not section.prof_ops:
        yield ConfigNote("comms_logger.prof_all", "no collective is counted: it is false, and prof_ops names none.")
    for name in section.prof_ops:
        if not any(part_of_label(name) in kind for kind in _COUNTED):
            near = did_you_mean(part_of_label(name), _COUNTED).replace("-", "_")
            kinds = ", ".join(_COUNTED).replace("-", "_")
            yield ConfigNote(key, f"no collective is counted as {name!r}. {near or f'There are {kinds}.'}")


def _autocast_note(config: Config) -> Iterator[ConfigNote]:
    """Note a dtype without effect. If the section does not say ``enabled``, the section itself is noted instead."""
    if config.torch_autocast.is_off() and config.sources.get("torch_autocast.enabled") != "default":
        for key in written_in_vain(config, "torch_autocast", ("dtype",)):
            yield ConfigNote(key, "torch_autocast.enabled is false.")


def _rounding_notes(config: Config) -> Iterator[ConfigNote]:
    section, wanted, actual = config.bf16, config.data_types.grad_accum_dtype, config.gradient_dtype
    if wanted not in (None, actual):
        reason = f"gradients are accumulated in {actual}; communication_data_type sets the dtype on the wire."
        yield ConfigNote("data_types.grad_accum_dtype", reason)
    in_bf16 = section.bf16_master_weights_and_grads or section.bf16_optimizer_states
    if section.enabled and not in_bf16 and "bf16.rounding" in _written(config):
        reason = (
            "masters and optimizer states are in fp32; bf16_master_weights_and_grads or bf16_optimizer_states reads it."
        )
        yield ConfigNote("bf16.rounding", reason)


def _unit_notes(config: Config) -> Iterator[ConfigNote]:
    zero, written = config.zero_optimization, _written(config)
    for name, policies in (
        ("unit_block_count", ("by_block_group",)),
        ("unit_numel", ("size_based", "by_block_and_size")),
    ):
        key = f"zero_optimization.{name}"
        if key in written and zero.unit_policy not in policies:
            yield ConfigNote(key, f"only unit_policy {' and '.join(policies)} read it.")


def _static_scale_notes(config: Config) -> Iterator[ConfigNote]:
    if not config.fp16.enabled or not config.fp16.loss_scale:
        return
    written = _written(config)
    for name in ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"):
        if f"fp16.{name}" in written:
            yield ConfigNote(f"fp16.{name}", f"the loss scale is fixed at {config.fp16.loss_scale:g}.")


def _recompute_notes(config: Config) -> Iterator[ConfigNote]:
    section, key = config.activation_checkpointing, "activation_checkpointing."
    if key + "every_n" in _written(config) and section.policy != "every_n":
        yield ConfigNote(key + "every_n", 'only policy "every_n" reads it.')
    if section.cpu_checkpointing and section.policy == "none":
        reason = 'policy is "none": it applies to calls of zerorun.checkpointing.checkpoint() only.'
        yield ConfigNote(key + "cpu_checkpointing", reason)


def _adam_note(config: Config) -> Iterator[ConfigNote]:
    if config.optimizer is None:
        return
    kind, params = config.optimizer.type.lower(), config.optimizer.params
    if kind == "adam" and params.get("weight_decay") and "adam_w_mode" not in params:
        reason = "Adam decays weights apart from the gradient, as AdamW; adam_w_mode false gives the L2 form."
        yield ConfigNote("optimizer.type", reason)
    if kind == "adamw" and params.get("adam_w_mode") is False:
        yield ConfigNote("optimizer.params.adam_w_mode", 'AdamW is always decoupled; type "Adam" with it is not.')


def _params_notes(config: Config) -> Iterator[ConfigNote]:
    """Note the optimizer's keywords that have no effect. The configuration holds them as a plain dict, without marks."""
    kind = find_kind("optimizer", config.optimizer.type) if config.optimizer else None
    if config.optimizer is None or kind is None:
        return
    for name in config.optimizer.params:
        field = kind.params.model_fields.get(name)
        for mark in field.metadata if field else ():
            if isinstance(mark, Inert):
                yield ConfigNote(f"optimizer.params.{name}", mark.reason)
