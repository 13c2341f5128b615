"""split_pretrained: the local stage of an unmodified Hugging Face model, under the model's own names.

The model counts as ``blocks + 2`` layers: 0 is what runs before the repeated blocks, then each block, then what runs after.
See the note in ``pretrained_views`` for how a part runs, and ``pretrained_proof`` for how the split is proven correct.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import ModelError, PipelineError
from ..plan.units import layerdrop_of
from .partition import LayerFacts, Method, bounds_of
from .pipelined import Pipelined, StageCut, find_ties
from .pretrained_anatomy import Anatomy, refusal
from .pretrained_proof import NO_TOKENS, compare, embeds_tokens, examine, specimen
from .pretrained_views import Crossing, Views

HIDDEN = "hidden_states"
# Keywords that need all layers, of which a part has only some.
OF_ALL_LAYERS = ("past_key_values", "output_hidden_states", "output_attentions", "output_router_logits")


def split_pretrained(
    model: nn.Module, num_stages: int, stage: int, partition_method: Method = "best", chunks: int = 1
) -> PretrainedPipeline:
    """Return stage ``stage`` of a transformers model. ``model`` is changed: layers of other stages are taken out of it.

    Before that, the parts of the model, or of a small copy, are compared with the whole on a few tokens; every stage does
    so by itself. A model on the meta device can be split before it gets its values.
    partition_method: see ``partition.bounds_of``; a list counts blocks + 2 layers.
    Raises ModelError, which names the model's class, if the split is not certain to be correct (encoder-decoder models, a
    loss over all layers, ...), and PipelineError if there are too few layers for the stages.
    """
    _refuse(model)
    tried = specimen(model)
    anatomy = examine(tried)
    if tried is not model:
        _try_cut(tried, anatomy, num_stages * chunks)
        anatomy = _of_full_length(model, anatomy)
    bounds = bounds_of(partition_method, _facts(model, anatomy), num_stages * chunks, chunks)
    if bounds[1] == 0 or bounds[-2] == bounds[-1]:
        raise PipelineError(
            f"partition_method cuts {type(model).__name__} at {list(bounds)}: the first and the last part must not be "
            "empty, because they have the embedding and the loss. Remedy: leave only parts between them empty."
        )
    if tried is model:
        _try(model, anatomy, bounds)
    pipeline = PretrainedPipeline(model, anatomy, StageCut(bounds, num_stages, chunks, stage))
    pipeline.free()
    return pipeline


def _refuse(model: nn.Module) -> None:
    kinds = type(model).__mro__
    if not any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds):
        raise ModelError(
            f"{type(model).__name__} is no transformers model. Remedy: give its layers to zerorun.PipelineModule, or, if a "
            "transformers model is inside (peft: get_base_model()), give that one."
        )
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(model, "an encoder-decoder model has two chains of blocks")
    if getattr(config, "output_router_logits", False):
        raise refusal(
            model, "config.output_router_logits adds a loss over the routers of all layers (it can be set to False)"
        )
    if not embeds_tokens(model):
        raise refusal(model, NO_TOKENS)
    layerdrop = layerdrop_of(model)
    if layerdrop > 0:
        raise refusal(model, f"layerdrop = {layerdrop} leaves out blocks at random (it can be made with a layerdrop of 0)")


def _facts(model: nn.Module, anatomy: Anatomy) -> list[LayerFacts]:
    blocks = [[block] for block in model.get_submodule(anatomy.blocks).children()]
    ends = [[model.get_submodule(name) for name in names] for names in (anatomy.before, anatomy.after)]
    facts = []
    for modules in (ends[0], *blocks, ends[1]):
        params = {id(param): param for module in modules for param in module.parameters() if param.requires_grad}
        classes = " ".join(dict.fromkeys(type(module).__name__ for module in modules))
        facts.append(LayerFacts(classes, sum(param.numel() for param in params.values())))
    return facts


def _of_full_length(model: nn.Module, anatomy: Anatomy) -> Anatomy:
    """Return the anatomy that was seen on a copy, for ``model``, which may have more blocks."""
    try:
        for name in (*anatomy.before, *anatomy.after):
            model.get_submodule(name)
        count = len(list(model.get_submodule(anatomy.blocks).children()))
    except AttributeError as error:
        raise refusal(model, f"it differs from a model made from its configuration ({error})") from None
    return Anatomy(anatomy.blocks, count, anatomy.before, anatomy.after, anatomy.tuple_length)


def _try_cut(model: nn.Module, anatomy: Anatomy, parts: int) -> None:
    layers = _facts(model, anatomy)
    _try(model, anatomy, bounds_of("uniform", layers, min(parts, len(layers))))


def _try(model: nn.Module, anatomy: Anatomy, bounds: tuple[int, ...]) -> None:
    """Run all parts in this process, and compare with the whole model."""
    parts = len(bounds) - 1
    pipeline = PretrainedPipeline(model, anatomy, StageCut(bounds, 1, parts, 0))

    def forward(batches: list[Any]) -> list[Any]:
        # Each part runs on all batches before the next: state that a model keeps from block to block would get mixed up.
        values = [pipeline.inputs_of(batch) for batch in batches]
        for part in range(parts):
            values = [pipeline(value, part, batch) for value, batch in zip(values, batches, strict=True)]
        return values

    compare(model, forward)


class PretrainedPipeline(Pipelined):
    """One stage of a Hugging Face model, made by ``split_pretrained``. It has the children of ``model``, under their names.

    A batch is a mapping of the model's keywords (input_ids, attention_mask, position_ids, labels, ...). Parts send each
    other a dict: "hidden_states" [batch, length, width], and all other keywords except labels and inputs_embeds, because
    later parts need them. The last part takes the labels from its own batch, and returns what the model returns:
    ``.loss``, ``.logits``.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, cut: StageCut) -> None:
        super().__init__()
        # These are the same dicts, so this module and the model always have the same children and parameters.
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self._held = (model,)  # in a tuple, so that it is not a child, whose names would get a prefix
        self._cut = cut
        self._views = Views(model, anatomy, cut)
        self._empty = {part for part, (start, end) in enumerate(pairwise(cut.bounds)) if start == end}
        places: dict[int, list[tuple[int, str]]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            layer = anatomy.layer_of(name)
            if layer is None:
                raise refusal(model, f"nothing that runs before or after its blocks has the parameter {name}")
            places.setdefault(id(param), []).append((cut.part_of(layer), name))
        self._ties, self._names = find_ties(places)
        self.training = model.training

    @property
    def whole_model(self) -> nn.Module:
        """The transformers model. It runs by itself only on a pipeline of one stage."""
        return self._held[0]

    @property
    def config(self) -> Any:
        """The configuration of the transformers model."""
        return self.whole_model.config

    def free(self) -> None:
        """Drop the layers of other stages, so that their memory is freed."""
        self._views.free()

    def train(self, mode: bool = True) -> PretrainedPipeline:
        """Set the mode as any module does, and also that of the model itself, which is not a child."""
        super().train(mode)
        self.whole_model.training = mode
        return self

    def modules_of(self, chunk: int) -> list[nn.Module]:
        """The layers of one chunk that are modules."""
        return self._views.modules(self._cut.layers(self._cut.part(chunk)))

    def inputs_of(self, batch: Any) -> dict[str, Any]:
        """Return all keywords but the labels. Raises PipelineError for keywords that need all layers in one place."""
        if not isinstance(batch, Mapping):
            raise PipelineError(
                f"a batch for {type(self.whole_model).__name__} is a dict of its keywords, got {type(batch).__name__}. "
                "Remedy: make one in the data set, or with engine.set_batch_fn."
            )
        for name in OF_ALL_LAYERS:
            if batch.get(name):
                raise PipelineError(f"{name} in a batch: a stage has only some of the layers. Remedy: leave it out.")
        return {name: value for name, value in batch.items() if name != "labels"}

    def forward(self, value: Any, chunk: int = 0, batch: Any = None) -> Any:
        """Run one chunk on ``inputs_of(batch)``, or on what the part before returned. The last part needs ``batch``."""
        part = self._cut.part(chunk)
        if part in self._empty:
            return value
        keywords = dict(value)
        received: torch.Tensor | None = keywords.pop(HIDDEN) if part else None
        length = _length_in(keywords)
        if received is not None and "input_ids" not in keywords:
            keywords["inputs_embeds"] = Crossing(length=length).shown(received)  # only its shape is used
        if self.is_last(chunk) and batch is not None and "labels" in batch:
            keywords["labels"] = batch["labels"]
        with self._views.of(part, received, length) as crossing:
            output = self.whole_model(**keywords)
            sent = crossing.sent
        if self.is_last(chunk):
            return output
        return {**{name: item for name, item in dict(value).items() if name not in (HIDDEN, "inputs_embeds")}, HIDDEN: sent}

    def loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        """Return the loss that the model computed. Raises PipelineError if the batch had no labels."""
        if output.loss is None:
            raise PipelineError(
                f"{type(self.whole_model).__name__} computed no loss: it had no labels. Remedy: put labels into the batch, "
                "and give the batch to the forward of the last part."
            )
        loss: torch.Tensor = output.loss
        return loss


def _length_in(keywords: Mapping[str, Any]) -> int | None:
    """The length of whole sequences, which ranks may divide between them, as keywords for tokens show it."""
    found = (keywords.get(name) for name in ("input_ids", "position_ids", "attention_mask"))
    return next((item.shape[-1] for item in found if isinstance(item, torch.Tensor)), None)
