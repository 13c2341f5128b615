"""Model configurations: the shape that a Hugging Face config.json describes, and what of it cannot be planned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ConfigProblem
from .model_shape import LatentAttention, ModelShape

# Names of the same number in the configurations of models.
_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_NOT_GATED = ("gpt", "falcon", "opt", "bloom", "mpt", "phi")
_WITHOUT_GAINS = ("olmo",)
_NORMED = {"qwen3": "head", "qwen3_moe": "head", "olmoe": "all"}
# The mixtures whose blocks are known.
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss")
# Those whose own plan for tensor ranks leaves attention or shared experts whole.
_WHOLE = ("qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss")


def read_shape(path: str | Path) -> ModelShape:
    """Read a ``config.json``. Raises ConfigError if it cannot be read, or is of a model that cannot be planned."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            [ConfigProblem("model", str(path), f"cannot be read: {error}.", "give a config.json.")]
        ) from error
    return shape_of(values, str(path))


def shape_of(values: dict[str, Any], source: str = "model") -> ModelShape:
    """Return the shape that a model's configuration describes. Raises ConfigError if it cannot be planned."""
    config = {**values, **values.get("text_config", {})}
    kind = str(config.get("model_type", "llama"))
    problems = [*_missing(config), *_not_planned(config, kind)]
    if problems:
        raise ConfigError(problems, source)
    numbers = {key: next(config[name] for name in names if name in config) for key, names in _NAMES.items()}
    hidden, heads = numbers["hidden"], numbers["heads"]
    table = kind.startswith("gpt2") or kind == "opt"
    head_dim = config.get("head_dim") or hidden // heads
    norms: dict[str, Any] = {"gains": 0, "final_gains": 0} if kind in _WITHOUT_GAINS else {}
    if table:
        norms = {"gains": 4, "final_gains": 2}
    own: dict[str, Any] = {
        "ffn": config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        "head_dim": head_dim,
        "normed": _NORMED.get(kind, ""),
        "rotary": 0 if table else _rotary_bytes(head_dim),
    }
    return ModelShape(
        **numbers,
        **norms,
        **{**own, **_mixture(config, kind), **_latent(config)},
        kv_heads=config.get("num_key_value_heads") or config.get("num_kv_heads") or heads,
        matrices=2 if kind.startswith(_NOT_GATED) and kind != "gpt_oss" else 3,
        tied=bool(config.get("tie_word_embeddings", kind.startswith(_NOT_GATED) and kind != "gpt_oss")),
        biases=_biases(config, kind, table=table),
        sinks=kind == "gpt_oss",
        whole=kind in _WHOLE,
        positions=config.get("n_positions") or config.get("max_position_embeddings") or 1024 if table else 0,
    )


def _rotary_bytes(size: int) -> int:
    return 2 * 4 * (size // 2)


def _biases(config: dict[str, Any], kind: str, *, table: bool) -> str:
    attention, mlp = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if table or kind == "gpt_oss" or (attention and mlp):
        return "all"
    return "attention" if attention else "mlp" if mlp else "qkv" if kind in ("qwen2", "qwen2_moe") else ""


def _count_of_experts(config: dict[str, Any]) -> int:
    return next((int(config[name]) for name in _EXPERTS if config.get(name)), 1)


def _mixture(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields of a mixture of experts; none for a model without."""
    count, ffn = _count_of_experts(config), config.get("moe_intermediate_size")
    if count == 1:
        return {}
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * (ffn or 0)
    return {
        "experts": count,
        "used_experts": config.get("num_experts_per_tok") or 1,
        "ffn": ffn or config.get("intermediate_size"),
        "shared_ffn": shared,
        "shared_gate": kind == "qwen2_moe",
        "dense_layers": len(_dense_blocks(config)),
        "dense_ffn": config.get("intermediate_size") if _dense_blocks(config) else 0,
        "expert_biases": kind == "gpt_oss",
        "corrected": kind == "deepseek_v3",
    }


def _latent(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of narrow attention; none for a model without."""
    if not config.get("kv_lora_rank"):
        return {}
    plain, rotary, values = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    latent = LatentAttention(config.get("q_lora_rank") or 0, config["kv_lora_rank"], plain, rotary, values)
    return {"latent": latent, "head_dim": values, "rotary": _rotary_bytes(rotary)}


def _dense_blocks(config: dict[str, Any]) -> list[int]:
    """Return the numbers of the blocks that have no experts."""
    first, chosen = config.get("first_k_dense_replace") or 0, config.get("mlp_only_layers") or ()
    every, layers = config.get("decoder_sparse_step") or 1, next(config[n] for n in _NAMES["layers"] if n in config)
    return [block for block in range(layers) if block < first or block in chosen or (block + 1) % every]


# -- what cannot be planned --------------------------------------------------------------------------------------


def _missing(config: dict[str, Any]) -> Iterator[ConfigProblem]:
    needed = [*_NAMES.values()]
    if config.get("kv_lora_rank"):
        needed += [(name,) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    for names in needed:
        if not any(isinstance(config.get(name), int) for name in names):
            yield ConfigProblem(names[0], None, "is not in the configuration of the model.", "give it.")


def _not_planned(config: dict[str, Any], kind: str) -> Iterator[ConfigProblem]:
    """Yield what is known of no block here: a plan of another block would look right and be wrong."""
    if _count_of_experts(config) == 1:
        return
    remedy = "give a zerorun.planner.model_shape.ModelShape that is near to it."
    if kind not in _MIXTURES:
        known = f"of mixtures, blocks are known of {', '.join(_MIXTURES)}."
        yield ConfigProblem("model_type", kind, known, remedy)
        return
    layers = next((config[name] for name in _NAMES["layers"] if name in config), 0)
    dense = _dense_blocks(config) if layers else []
    if dense != [*range(len(dense))] or len(dense) == layers > 0:
        key = "mlp_only_layers" if config.get("mlp_only_layers") else "decoder_sparse_step"
        reason = f"blocks {dense} have no experts; planned are models whose first blocks have none, and no others."
        yield ConfigProblem(key, config.get(key), reason, remedy)
    if config.get("kv_lora_rank") and config.get("attention_bias"):
        yield ConfigProblem("attention_bias", True, "is not planned for attention with kv_lora_rank.", remedy)
    if config.get("moe_layer_freq", 1) != 1:
        reason = "not every block has experts; planned are models whose first blocks have none, and all others have some."
        yield ConfigProblem("moe_layer_freq", config["moe_layer_freq"], reason, remedy)
