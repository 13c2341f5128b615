"""What DeepSpeed reads over without a word: in its mode each is a note instead of an error. And 1 and 0 are flags, and
words in quotes are flags and numbers where DeepSpeed's own reader takes them for these. What a file does not say of Muon is
as there.

Trainers write such keys for DeepSpeed, and scripts that run with it have them; nothing can depend on them.
"""

from __future__ import annotations

import contextlib
from typing import Any, get_args

from ..log import info_once
from .fields import Section, section_of
from .params import find_kind
from .reader import AUTO, is_comment
from .schema import Config
from .source import read_source

# Sections in which DeepSpeed looks for keys one by one. In the others it refuses what it does not know, as zerorun does.
_LOOKED_THROUGH = (
    *(
        "activation_checkpointing",
        "aio",
        "checkpoint",
        "data_types",
        "flops_profiler",
        "optimizer",
        "pipeline",
        "scheduler",
    ),
)

# What DeepSpeed's Muon does where its file says nothing, as far as zerorun does something else: its key there -> (the keys
# in a file that say it, the value).
_MUON = {
    "adjust_lr_fn": (("adjust_lr_fn",), "original"),
    "muon_lr": (("muon_lr", "lr"), 0.02),
    "adam_lr": (("adam_lr", "lr"), 3e-4),
}

# Sections that DeepSpeed checks with pydantic, which takes "true" and "2" for what they say.
_CONVERTED = ("zero_optimization", "fp16", "bf16", "bfloat16")


def as_deepspeed_reads(source: Any) -> Any:
    """Return the configuration without what DeepSpeed ignores, and tell on rank 0 what that was; else ``source`` itself.

    Raises ConfigError if it cannot be read.
    """
    if source is None or isinstance(source, Config):
        return source
    raw, name = read_source(source)
    flags = _with_muon(_with_switches(_with_flags(Config, _unquoted_sections(raw)), name), name)
    kept, dropped = dict(flags), list[str]()
    _drop_unknown(Config, kept, "", dropped)
    for section in _LOOKED_THROUGH:
        if isinstance(kept.get(section), dict):
            kept[section] = dict(kept[section])
            field = Config.fields_by_key()[section]
            kind = section_of(field)
            if kind is not None:
                _drop_unknown(kind, kept[section], f"{section}.", dropped)
    zero = kept.get("zero_optimization")
    if isinstance(zero, dict):
        kept["zero_optimization"] = _without_idle_offload(zero, dropped)
    if not dropped:
        return source if flags is raw else flags
    info_once(f"{name}: DeepSpeed ignores {', '.join(dropped)}, and so does zerorun in its mode.")
    return kept


def _with_flags(kind: type[Section], section: dict[str, Any]) -> dict[str, Any]:
    """Return the section with true and false for 1 and 0, which DeepSpeed takes for them; itself if there is none."""
    changed: dict[str, Any] = {}
    for key, field in kind.fields_by_key().items():
        value, inner = section.get(key), section_of(field)
        if isinstance(value, dict) and inner is not None:
            changed[key] = _with_flags(inner, value)
        elif type(value) is int and value in (0, 1) and _takes_flags(field.annotation):
            changed[key] = bool(value)
    return {**section, **changed} if any(section[key] is not value for key, value in changed.items()) else section


def _unquoted_sections(raw: dict[str, Any]) -> dict[str, Any]:
    """Return ``raw`` with flags and numbers for words in quotes in ``_CONVERTED``; itself if there are none.

    Elsewhere DeepSpeed fails at them, at once or in the first step, or takes every word for true.
    """
    changed: dict[str, Any] = {}
    for name in _CONVERTED:
        kind = section_of(Config.fields_by_key()[Config.spellings()[name]])
        if isinstance(raw.get(name), dict) and kind is not None:
            changed[name] = _unquoted(kind, raw[name])
    return {**raw, **changed} if any(raw[name] is not section for name, section in changed.items()) else raw


def _unquoted(kind: type[Section], section: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for spelling, key in kind.spellings().items():
        value, field = section.get(spelling), kind.fields_by_key()[key]
        inner = section_of(field)
        if isinstance(value, dict) and inner is not None:
            changed[spelling] = _unquoted(inner, value)
        elif isinstance(value, str) and (wanted := _only_type(field.annotation)) is not None:
            from pydantic import TypeAdapter, ValidationError  # which most files do not need

            with contextlib.suppress(ValidationError):  # what is no such word is told as always
                changed[spelling] = TypeAdapter(wanted).validate_python(value)
    return {**section, **changed} if any(section[key] is not value for key, value in changed.items()) else section


def _only_type(annotation: Any) -> type | None:
    """The type of a field of flags or of numbers; None for others."""
    kinds = {getattr(kind, "__origin__", kind) for kind in (annotation, *get_args(annotation))} & {bool, int, float, str}
    return kinds.pop() if len(kinds) == 1 and str not in kinds else None


def _with_switches(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return ``raw`` with false where "auto" is the switch of fp16 or bf16, which trainers fill in; itself if nowhere."""
    changed: dict[str, Any] = {}
    for key in ("fp16", "bf16", "bfloat16"):
        section = raw.get(key)
        if isinstance(section, dict) and section.get("enabled") == AUTO:
            changed[key] = {**section, "enabled": False}
    if not changed:
        return raw
    switches = ", ".join(f"{key}.enabled" for key in changed)
    info_once(
        f'{name}: "auto" in {switches} is false, as in DeepSpeed. Trainers write a value there; without one, write true '
        "for the precision that you want."
    )
    return {**raw, **changed}


def _with_muon(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return ``raw`` with what DeepSpeed's Muon does where the file does not say it; itself for other optimizers."""
    section = raw.get("optimizer")
    known = find_kind("optimizer", section.get("type")) if isinstance(section, dict) else None
    if not isinstance(section, dict) or known is None or known.name != "Muon":
        return raw
    params = section.get("params") or {}
    if not isinstance(params, dict):  # which is told as always
        return raw
    missing = {key: value for key, (said_by, value) in _MUON.items() if not any(word in params for word in said_by)}
    clipping = raw.get("gradient_clipping")
    if clipping:
        info_once(
            f"{name}: gradient_clipping is {clipping} with Muon. Here it clips the gradients. In DeepSpeed it clips the "
            "directions that Muon has made of them, which divides the learning rate. If the updates have to be as small as "
            "there, lower optimizer.params.muon_lr."
        )
    if not missing:
        return raw
    told = ", ".join(f"{key} = {value}" for key, value in missing.items())
    info_once(f"{name}: Muon has {told} in optimizer.params, as in DeepSpeed, because the file does not say it.")
    return {**raw, "optimizer": {**section, "params": {**missing, **params}}}


def _takes_flags(annotation: Any) -> bool:
    """True if bool is one of the types, and no number is."""
    kinds = {getattr(kind, "__origin__", kind) for kind in (annotation, *get_args(annotation))}
    return bool in kinds and not kinds & {int, float}


def _drop_unknown(kind: type[Section], section: dict[str, Any], path: str, dropped: list[str]) -> None:
    known = {*kind.spellings(), *kind.features}
    for key in [key for key in kind.rewrite(dict(section), path, []) if key not in known and not is_comment(key)]:
        if key in section:
            del section[key]
            dropped.append(path + key)


def _without_idle_offload(zero: dict[str, Any], dropped: list[str]) -> dict[str, Any]:
    """Return the section without offload at stages that have no shard of that kind, and without a hpZ of no ranks."""
    stage, kept = zero.get("stage", 0), dict(zero)
    if kept.get("zero_hpz_partition_size", 1) == 0:  # DeepSpeed takes it for 1, which is its default
        del kept["zero_hpz_partition_size"]
        dropped.append("zero_optimization.zero_hpz_partition_size = 0")
    if not isinstance(stage, int):
        return kept
    for key, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
        wanted = kept.get(key)
        if stage < lowest and isinstance(wanted, dict) and wanted.get("device", "none") not in ("none", None):
            del kept[key]
            dropped.append(f"zero_optimization.{key} at stage {stage}")
    return kept
