"""What another project's tests find instead of GPUs and of a hub: CPUs, random models of the same classes, words."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from functools import cache, wraps
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate.state
import datasets
import torch
import transformers
from accelerate.commands import launch
from accelerate.test_utils import testing
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, testing_utils
from transformers.models.auto.auto_factory import _BaseAutoModelClass

SIZES = {"hidden_size": 16, "n_embd": 16, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 2, "n_head": 2,
         "intermediate_size": 32, "vocab_size": 1000, "n_positions": 192, "max_position_embeddings": 192,
         "num_key_value_heads": 2, "rotary_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 16, "d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2,
         "decoder_layers": 2, "encoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
         "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dim": 16, "hidden_dim": 32, "d_inner": 32, "d_head": 8,
         "embedding_size": 16, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
# What some types need besides. None: they have no such size.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "fsmt": {"src_vocab_size": 1000, "tgt_vocab_size": 1000, "langs": ["en", "de"]},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "block_repeats": [1, 1], "num_decoder_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 192, "max_decoder_position_embeddings": 192},
    "marian": {"decoder_start_token_id": 0, "decoder_vocab_size": 1000},
    "longformer": {"attention_window": 8, "max_position_embeddings": 224},
    "mbart": {"decoder_start_token_id": 2},
    "mobilebert": {"true_hidden_size": 16, "intra_bottleneck_size": 16, "embedding_size": 16},
    "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2},
    "roberta": {"max_position_embeddings": 224},
    "vit": {"image_size": 30, "patch_size": 10},
    "xlm-roberta": {"max_position_embeddings": 224},
    "xlnet": {"max_position_embeddings": None},
}
# A part of a model's name on the hub -> the type of its configuration, unless it is the same. The longest counts.
_PARTS = (
    "albert bart bert big_bird bigbird_pegasus blenderbot bloom deberta deberta-v2 distilbert electra flaubert funnel gpt2 "
    "gpt_neo gptj layoutlm led llama longformer m2m_100 marian mbart mobilebert mobilevit mpnet pegasus prophetnet roberta "
    "squeezebert t5 vit xlm-roberta xlnet"
)
KINDS = {"qwen": "qwen2_moe", "wmt19": "fsmt", "bigscience": "bloom"} | {part: part for part in _PARTS.split(" ")}
# The architecture of a kind that is more than its configuration. Others begin with a new head.
ARCHITECTURES = {"gpt2": "GPT2LMHeadModel", "qwen2_moe": "Qwen2MoeForCausalLM", "t5": "T5ForConditionalGeneration",
                 "bert": "BertForSequenceClassification", "gptj": "GPTJForCausalLM",
                 "llama": "LlamaForCausalLM", "funnel": "FunnelModel"}  # fmt: skip
WORDS = [f"word{number}" for number in range(64)]


def install() -> None:
    """Put the stand-ins into transformers and accelerate, in this process."""
    _run_on_cpus()
    for owner in (_BaseAutoModelClass, PreTrainedModel, AutoConfig, AutoTokenizer):
        _read_local(owner)
    load = datasets.load_dataset
    made = {"json": load, "text": load, "hf-internal-testing/cats_vs_dogs_sample": pictures}
    datasets.load_dataset = lambda *names, **kwargs: made.get(names[0], glue)(*names, **kwargs)
    sentences = SimpleNamespace(find=lambda name: None)  # what a script needs to find the ends of them is there
    for name, content in (("evaluate", {"load": lambda *names, **kwargs: Metric()}), ("nltk", {"data": sentences})):
        sys.modules[name] = module = ModuleType(name)
        module.__dict__.update(__spec__=ModuleSpec(name, None), **content)


def _run_on_cpus() -> None:
    """Let accelerate take processes without a GPU for ranks, and skip nothing for want of one."""
    real = accelerate.state.PartialState.__init__

    def begin(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        real(self, True, **kwargs)

    accelerate.state.PartialState.__init__ = begin  # type: ignore[method-assign]
    begin_group = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend=None, *args, **kwargs: begin_group("gloo", *args, **kwargs)
    alone, many = launch.simple_launcher, launch.multi_gpu_launcher
    launch.simple_launcher = lambda args: (many if (args.num_processes or 1) > 1 else alone)(args)
    for name in ("require_non_cpu", "require_fp16", "require_multi_device", "require_huggingface_suite"):
        setattr(testing, name, lambda test: test)
    for name in ("require_torch_accelerator", "require_torch_fp16", "require_torch_multi_accelerator"):
        setattr(testing_utils, name, lambda test: test)
    testing_utils.backend_device_count = lambda device: 2  # how many ranks its tests start
    transformers.TrainingArguments.__dataclass_fields__["use_cpu"].default = True


def _read_local(owner: Any) -> None:
    """Let ``owner.from_pretrained`` take a name on the hub for a folder with a random model."""
    real: Callable[..., Any] = owner.from_pretrained.__func__

    @wraps(real)
    def read(cls: Any, name: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(name, str) and not os.path.isdir(name):
            name = folder_of(name)
        return real(cls, name, *args, **kwargs)

    owner.from_pretrained = classmethod(read)


@cache
def _room() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with this process."""
    return tempfile.TemporaryDirectory(prefix="stand_ins_")


def folder_of(name: str) -> str:
    """A folder with a random model of the kind that the name on the hub says, and with its tokenizer."""
    parts = [part for part in KINDS if part in name.lower()]
    return _folder_with(KINDS[max(parts, key=len)] if parts else "gpt2")


@cache
def _folder_with(kind: str) -> str:
    folder = Path(_room().name, kind)
    config = transformers.AutoConfig.for_model(kind)
    if kind != "mobilevit":
        known = {key: value for key, value in SIZES.items() if hasattr(config, key)} | OWN_SIZES.get(kind, {})
        config = transformers.AutoConfig.for_model(kind, **{key: size for key, size in known.items() if size is not None})
    if kind == "t5":
        config.decoder_start_token_id = 0  # a hub's models have it
    folder.mkdir()
    config.to_json_file(folder / "config.json", use_diff=False)  # save_pretrained() writes on one rank only
    if kind != "mobilevit":
        with torch.random.fork_rng():
            torch.manual_seed(0)  # the same model in all processes, as a hub has it
            base = transformers.MODEL_MAPPING[type(config)]  # whose from_config() would divide it between ranks
            model = (getattr(transformers, ARCHITECTURES[kind]) if kind in ARCHITECTURES else base)(config)
        if kind == "bert":
            torch.nn.init.constant_(model.classifier.bias[1:], 2.0)  # it knows the data of glue(), as a trained one would
        weights = {name: value.clone().contiguous() for name, value in model.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        _tokenizer(kind).save_pretrained(folder)
    if kind == "vit":
        size = {"height": config.image_size, "width": config.image_size}
        transformers.ViTImageProcessor(size=size).save_pretrained(folder)
    return str(folder)


def _tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special |= {"cls_token": "<cls>", "sep_token": "<sep>", "mask_token": "<mask>"}
    words = {word: number for number, word in enumerate([*special.values(), *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if kind == "longformer":  # it finds where a question ends by these
        pair = "<s> $A </s> </s> $B </s>"
        made.post_processor = TemplateProcessing("<s> $A </s>", pair, [(word, words[word]) for word in ("<s>", "</s>")])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=160, **special)


def glue(*names: Any, split: Any = None, **kwargs: Any) -> Any:
    """Pairs of sentences of random words, all of which are labelled 1; in the parts that ``split`` names, or both."""
    made = random.Random(11)
    rows = [(" ".join(made.choices(WORDS, k=8)), " ".join(made.choices(WORDS, k=8))) for _ in range(160)]
    first, second = zip(*rows, strict=True)
    columns = {"sentence1": list(first), "sentence2": list(second), "label": [1] * 160, "idx": list(range(160))}
    part = datasets.Dataset.from_dict(columns).cast_column("label", datasets.ClassLabel(names=["other", "same"]))
    return datasets.DatasetDict({"train": part, "validation": part.select(range(32)), "test": part.select(range(32))})


def pictures(*names: Any, **kwargs: Any) -> Any:
    """Random ones of eight sizes, of two kinds."""
    from PIL import Image  # what uses pictures has it

    made = random.Random(11)
    rows = [Image.effect_noise((made.randrange(40, 80), 48), 50.0) for _ in range(8)]
    part = datasets.Dataset.from_dict({"image": rows, "labels": [0, 1] * 4})
    return datasets.DatasetDict({"train": part.cast_column("labels", datasets.ClassLabel(names=["cat", "dog"]))})


class Metric:
    """Accuracy of what was added since it was last computed, or of what is given; and a good score for each translation."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self._right += (predictions == references).tolist()

    def compute(self, predictions: Any = None, references: Any = None) -> dict[str, float]:
        if predictions is not None:
            self._right = [bool(mine == right) for mine, right in zip(predictions, references, strict=True)]
        share, self._right = sum(self._right) / len(self._right), []
        return {"accuracy": share, "f1": share, "score": 2.0}
