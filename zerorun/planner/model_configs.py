"""Model configurations: the shape that a Hugging Face config.json describes, and what of it cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigProblem
from .model_kinds import KINDS, ModelKind
from .model_shape import LatentAttention, ModelShape, too_deep
from .number_checks import not_whole

# Names of the same number in the configurations of models.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
}
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_POSITIONS = ("n_positions", "max_position_embeddings")
# Other keys whose numbers are read; 0 means that there is none.
_NUMBERS = (
    *("head_dim", "num_key_value_heads", "num_kv_heads", "kv_lora_rank", "q_lora_rank"),
    *("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "n_shared_experts"),
    *("first_k_dense_replace", "decoder_sparse_step", *_INNER, *_EXPERTS, *_LATENT, *_POSITIONS),
)
_BESIDE_TEXT = ("vision_config", "audio_config")
_NEAR = "give a zerorun.planner.model_shape.ModelShape that is near to it."


def read_shape(path: str | Path) -> ModelShape:
    """Read a ``config.json``. Raises ConfigError if it cannot be read, or is of a model that cannot be planned."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            [ConfigProblem("model", str(path), f"cannot be read: {error}.", "give a config.json.")]
        ) from error
    return shape_of(values, str(path))


def shape_of(values: Any, source: str = "model") -> ModelShape:
    """Return the shape that a model's configuration describes. Raises ConfigError if it cannot be planned."""
    config = _text_config(values, source)
    name = str(config.get("model_type", "llama"))
    problems = [*_missing(config)] or [*too_deep(_first(config, _NAMES["layers"]))]
    problems = problems or [*_not_known(config, name)] or [*_not_planned(config, name)]
    if problems:
        raise ConfigError(problems, source)
    try:
        return _shape(config, name, KINDS[name])
    except ConfigError as error:  # numbers that do not go together
        raise ConfigError(error.problems, source) from None


def _text_config(values: Any, source: str) -> dict[str, Any]:
    text = values.get("text_config") if isinstance(values, Mapping) else None
    if not isinstance(values, Mapping) or not isinstance(text or {}, Mapping):
        problem = ConfigProblem("model", type(values).__name__, "is no configuration of a model.", "give a config.json.")
        raise ConfigError([problem], source)
    return {**values, **(text or {})}


def _shape(config: dict[str, Any], name: str, kind: ModelKind) -> ModelShape:
    numbers = {key: _first(config, names) for key, names in _NAMES.items()}
    hidden, heads = numbers["hidden"], numbers["heads"]
    head_dim = config.get("head_dim") or kind.head_dim or hidden // heads
    tied = config.get("tie_word_embeddings")
    own: dict[str, Any] = {
        **numbers,
        "kv_heads": kind.keys_of(config, heads),
        "ffn": _first(config, _INNER) or kind.inner * hidden,
        "head_dim": head_dim,
        "rotary": _rotary_bytes(head_dim) if kind.rotary else 0,
    }
    return ModelShape(
        **{**own, **_mixture(config, name, kind), **_latent(config)},
        matrices=kind.matrices,
        gains=kind.gains,
        final_gains=kind.final_gains,
        normed=kind.normed,
        tied=kind.tied if tied is None else bool(tied),
        biases=kind.biases(config),
        sinks=kind.sinks,
        whole=kind.whole,
        cannot=frozenset(kind.cannot.split()),
        positions=0 if kind.positions is None else (_first(config, _POSITIONS) or 1024) + kind.positions,
    )


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the number that one of ``names`` has; 0 if none has one."""
    return next((config[name] for name in names if config.get(name)), 0)


def _rotary_bytes(size: int) -> int:
    return 2 * 4 * (size // 2)


def _mixture(config: dict[str, Any], name: str, kind: ModelKind) -> dict[str, Any]:
    """Return the fields of a mixture of experts; none for a model without."""
    if not kind.mixture:
        return {}
    ffn, dense = config.get("moe_intermediate_size"), len(_dense_blocks(config, kind))
    count = config.get("n_shared_experts", kind.shared_experts) or 0
    shared = config.get("shared_expert_intermediate_size") or count * (ffn or 0)
    return {
        "experts": _first(config, _EXPERTS),
        "used_experts": config.get("num_experts_per_tok") or 1,
        "ffn": ffn or config.get("intermediate_size"),
        "shared_ffn": shared,
        "shared_gate": name == "qwen2_moe",
        "dense_layers": dense,
        "dense_ffn": config.get("intermediate_size") if dense else 0,
        "expert_biases": name == "gpt_oss",
        "corrected": name == "deepseek_v3",
    }


def _latent(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of narrow attention; none for a model without."""
    if not config.get("kv_lora_rank"):
        return {}
    plain, rotary, values = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent = LatentAttention(config.get("q_lora_rank") or 0, config["kv_lora_rank"], plain, rotary, values)
    return {"latent": latent, "head_dim": values, "rotary": _rotary_bytes(rotary)}


def _dense_blocks(config: dict[str, Any], kind: ModelKind) -> list[int]:
    """Return the numbers of the blocks that have no experts."""
    first, chosen = config.get("first_k_dense_replace", kind.dense_layers) or 0, config.get("mlp_only_layers") or ()
    every, layers = config.get("decoder_sparse_step") or 1, _first(config, _NAMES["layers"])
    return [block for block in range(layers) if block < first or block in chosen or (block + 1) % every]


# -- what cannot be planned --------------------------------------------------------------------------------------


def _missing(config: dict[str, Any]) -> Iterator[ConfigProblem]:
    """Yield the numbers that are needed and are not there, and what should be one and is none."""
    needed = [*_NAMES.values()]
    if config.get("kv_lora_rank"):
        needed += [(name,) for name in _LATENT]
    for names in needed:
        given = next((name for name in names if config.get(name) is not None), None)
        if given is None:
            yield ConfigProblem(names[0], None, "is not in the configuration of the model.", "give it.")
        else:
            yield from not_whole({given: config[given]}, 1)
    others = {name: config[name] for name in sorted({*_NUMBERS} - {*_LATENT}) if config.get(name) is not None}
    yield from not_whole(others, 0)
    chosen = config.get("mlp_only_layers")
    if chosen is not None and not (isinstance(chosen, list) and all(type(block) is int for block in chosen)):
        yield ConfigProblem("mlp_only_layers", chosen, "is no list of numbers of blocks.", "give one.")


def _not_known(config: dict[str, Any], name: str) -> Iterator[ConfigProblem]:
    """Yield what is known of no block here: a plan of another block would look right and be wrong."""
    kind, count = KINDS.get(name), _first(config, _EXPERTS)
    mixtures = [known for known, own in KINDS.items() if own.mixture]
    if count > 1 and (kind is None or not kind.mixture):
        known = f"of mixtures, blocks are known of {', '.join(mixtures)}."
        yield ConfigProblem("model_type", name, known, _NEAR)
    elif kind is None:
        known = f"blocks are known of {', '.join(known for known in KINDS if known not in mixtures)}."
        remedy = f"say the model_type of one with the same blocks, or {_NEAR}"
        yield ConfigProblem("model_type", name, known, remedy)
    elif kind.mixture and count < 2:
        yield ConfigProblem(_EXPERTS[0], count or None, f"a {name} has several experts.", "give their number.")
    for key in _BESIDE_TEXT:
        if config.get(key):
            reason = "only what reads text is planned, and this model has more."
            yield ConfigProblem(key, "...", reason, "give its text_config alone.")


def _not_planned(config: dict[str, Any], name: str) -> Iterator[ConfigProblem]:
    kind, hidden = KINDS[name], _first(config, _NAMES["hidden"])
    if not (kind.inner or _first(config, (*_INNER, "moe_intermediate_size"))):
        yield ConfigProblem("intermediate_size", None, "is not in the configuration of the model.", "give it.")
    if config.get("word_embed_proj_dim", hidden) != hidden:
        value = config["word_embed_proj_dim"]
        yield ConfigProblem("word_embed_proj_dim", value, f"is not the hidden size {hidden}, which is not planned.", _NEAR)
    if kind.mixture:
        yield from _mixtures_not_planned(config, kind)


def _mixtures_not_planned(config: dict[str, Any], kind: ModelKind) -> Iterator[ConfigProblem]:
    layers, dense = _first(config, _NAMES["layers"]), _dense_blocks(config, kind)
    if dense != [*range(len(dense))] or len(dense) == layers > 0:
        key = "mlp_only_layers" if config.get("mlp_only_layers") else "decoder_sparse_step"
        reason = f"blocks {dense} have no experts; planned are models whose first blocks have none, and no others."
        yield ConfigProblem(key, config.get(key), reason, _NEAR)
    if config.get("kv_lora_rank") and config.get("attention_bias"):
        yield ConfigProblem("attention_bias", True, "is not planned for attention with kv_lora_rank.", _NEAR)
    if config.get("moe_layer_freq", 1) != 1:
        reason = "not every block has experts; planned are models whose first blocks have none, and all others have some."
        yield ConfigProblem("moe_layer_freq", config["moe_layer_freq"], reason, _NEAR)
