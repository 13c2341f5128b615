"""Model kinds: what the ``model_type`` of a Hugging Face configuration says of a block, and its defaults.

A configuration leaves out what its class has by default, so that another class's default would be another model. The table
is checked against the classes of transformers (tests/unit/test_model_kinds.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_ATTENTION = "query key value output"  # the layers of attention, in ``biased``

# What a run may do with a model: tensor ranks divide its layers, or also the rows between these; it has stages; ranks
# divide its sequences; its layers multiply in fp8.
FEATURES = ("tensor", "rows", "stages", "context", "fp8")


@dataclass(frozen=True)
class ModelKind:
    """What is known of one ``model_type``.

    ``matrices``: of an MLP, 3 if it is gated. ``inner``: its width in terms of the hidden size, if the configuration does
    not say it; 0 if it must. ``gains``, ``final_gains``, ``normed``: as of a ModelShape. ``biased``: layers that always
    have biases; ``bias_keys``: those that have some by a key, and whether they have by default. ``positions``: rows of a
    table of positions beside those of the configuration; None without a table. ``rotary``: positions are rotary.

    Values of keys that the configuration may leave out: ``tied``: embedding and head are one; ``kv_heads``: 0 for as many
    as heads; ``head_dim``: 0 for the hidden size over the heads; ``multi_query``: one head of keys, unless keys say
    otherwise; ``shared_experts``, ``dense_layers``.

    ``mixture``: blocks have experts. ``sinks``, ``whole``: as of a ModelShape. ``cannot``: which of FEATURES zerorun
    refuses.
    """

    matrices: int = 3
    inner: int = 0
    gains: int = 2
    final_gains: int = 1
    normed: str = ""
    biased: str = ""
    bias_keys: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    positions: int | None = None
    rotary: bool = True
    tied: bool = False
    kv_heads: int = 0
    head_dim: int = 0
    multi_query: bool = False
    mixture: bool = False
    shared_experts: int = 0
    dense_layers: int = 0
    sinks: bool = False
    whole: bool = False
    cannot: str = ""

    def biases(self, config: Mapping[str, Any]) -> str:
        """Return the layers with biases, as of a ModelShape."""
        layers = set(self.biased.split())
        for key, (named, default) in self.bias_keys.items():
            layers |= set(named.split()) if config.get(key, default) else set()
        if "query" not in layers:
            return "mlp" if "mlp" in layers else ""
        return "all" if "mlp" in layers else "attention" if "output" in layers else "qkv"

    def keys_of(self, config: Mapping[str, Any], heads: int) -> int:
        """Return the heads of keys."""
        if self.multi_query and config.get("multi_query", True) and not config.get("new_decoder_architecture"):
            return 1
        given = next((config[key] for key in ("num_key_value_heads", "num_kv_heads") if key in config), self.kv_heads)
        return given or heads


_BY_KEY = {"attention_bias": (_ATTENTION, False)}
_LLAMA = ModelKind(bias_keys={**_BY_KEY, "mlp_bias": ("mlp", False)})
_PLAIN = ModelKind(bias_keys=_BY_KEY)
_GPT2 = ModelKind(
    matrices=2, inner=4, gains=4, final_gains=2, biased=f"{_ATTENTION} mlp", positions=0, rotary=False, tied=True
)
_GPTJ = ModelKind(matrices=2, inner=4, final_gains=2, biased="mlp")
_GEMMA = replace(_PLAIN, tied=True, kv_heads=16, head_dim=256)
_GEMMA2 = replace(_GEMMA, gains=4, kv_heads=4)
_GLM = ModelKind(bias_keys={"attention_bias": ("query key value", True)}, kv_heads=2, head_dim=128)
_COHERE = replace(_PLAIN, gains=1, tied=True)
_OLMO2 = replace(_PLAIN, normed="all", cannot="rows")
_QWEN3 = replace(_PLAIN, normed="head", kv_heads=32, head_dim=128)
_DEEPSEEK = replace(_PLAIN, mixture=True, whole=True)

KINDS: dict[str, ModelKind] = {
    "apertus": replace(_PLAIN, matrices=2, normed="head", cannot="rows"),  # its activations have parameters
    "arcee": replace(_LLAMA, matrices=2),
    # Two gains are after the embedding. Biases by distance have all heads of a batch in one dimension.
    "bloom": replace(_GPT2, final_gains=4, positions=None, cannot="tensor context"),
    "codegen": replace(_GPTJ, cannot="tensor context"),  # queries, keys and values lie in four parts
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "cwm": ModelKind(bias_keys={"mlp_bias": ("mlp", False)}, kv_heads=8, head_dim=128),
    "ernie4_5": ModelKind(bias_keys={"use_bias": (f"{_ATTENTION} mlp", False)}, tied=True, kv_heads=2, head_dim=128),
    "exaone4": ModelKind(normed="head", kv_heads=32),
    "falcon": ModelKind(
        matrices=2,
        inner=4,
        final_gains=2,
        bias_keys={"bias": (f"{_ATTENTION} mlp", False)},
        tied=True,
        multi_query=True,
        cannot="context fp8",  # linear layers of its own
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, normed="head"),
    "glm": _GLM,
    "glm4": replace(_GLM, gains=4),
    "gpt-sw3": replace(_GPT2, cannot="fp8"),  # Conv1D
    "gpt2": replace(_GPT2, cannot="fp8"),
    "gpt_bigcode": replace(_GPT2, multi_query=True),
    "gpt_neo": replace(_GPT2, biased="output mlp", cannot="context"),
    "gpt_neox": ModelKind(
        matrices=2, inner=4, gains=4, final_gains=2, biased="mlp", bias_keys={"attention_bias": (_ATTENTION, True)}
    ),
    "gptj": replace(_GPTJ, cannot="context"),
    "granite": _LLAMA,
    "helium": replace(_LLAMA, head_dim=128),
    "hunyuan_v1_dense": replace(_PLAIN, normed="head", kv_heads=32, cannot="tensor rows"),  # by its plan only the head is
    "hyperclovax": replace(_LLAMA, gains=4),
    "jais2": ModelKind(
        matrices=2,
        gains=4,
        final_gains=2,
        bias_keys={"attention_bias": (_ATTENTION, True), "mlp_bias": ("mlp", True)},
        kv_heads=26,
        head_dim=128,
    ),
    "llama": _LLAMA,
    "ministral3": ModelKind(kv_heads=8, head_dim=128),
    "mistral": ModelKind(kv_heads=8),
    "mpt": ModelKind(matrices=2, inner=4, rotary=False, tied=True, cannot="tensor context"),  # biases by distance
    "nanochat": replace(_PLAIN, matrices=2, gains=0, final_gains=0, cannot="stages"),  # one norm is before blocks and after
    "nemotron": replace(_LLAMA, matrices=2, gains=4, final_gains=2, head_dim=128),
    "olmo": replace(_PLAIN, gains=0, final_gains=0),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "opt": replace(_GPT2, positions=2, cannot="rows"),  # it folds rows of a batch into one
    "persimmon": ModelKind(matrices=2, gains=4, final_gains=2, biased=f"{_ATTENTION} mlp", normed="head"),
    "phi": ModelKind(matrices=2, final_gains=2, biased=f"{_ATTENTION} mlp"),
    "phi3": ModelKind(),
    "qwen2": ModelKind(biased="query key value", kv_heads=32),
    "qwen3": _QWEN3,
    "seed_oss": ModelKind(
        bias_keys={"attention_bias": ("query key value", True), "attention_out_bias": ("output", False)},
        kv_heads=8,
        head_dim=128,
    ),
    "smollm3": replace(_LLAMA, tied=True, kv_heads=4),
    "stablelm": ModelKind(gains=4, final_gains=2, bias_keys={"use_qkv_bias": ("query key value", False)}, kv_heads=32),
    "starcoder2": ModelKind(
        matrices=2,
        gains=4,
        final_gains=2,
        bias_keys={"use_bias": (f"{_ATTENTION} mlp", True)},
        tied=True,
        kv_heads=2,
    ),
    # Mixtures. Those that are whole leave attention or shared experts whole by their own plan for tensor ranks.
    "deepseek_v2": replace(_DEEPSEEK, shared_experts=2),
    "deepseek_v3": replace(_DEEPSEEK, shared_experts=1, dense_layers=3),
    "gpt_oss": ModelKind(
        bias_keys={"attention_bias": (_ATTENTION, True)}, kv_heads=8, head_dim=64, mixture=True, sinks=True, whole=True
    ),
    "mixtral": ModelKind(kv_heads=8, mixture=True),
    "olmoe": replace(_PLAIN, normed="all", kv_heads=16, mixture=True, whole=True),
    "qwen2_moe": ModelKind(bias_keys={"qkv_bias": ("query key value", True)}, kv_heads=16, mixture=True, whole=True),
    "qwen3_moe": replace(_PLAIN, normed="head", kv_heads=4, mixture=True),
}
