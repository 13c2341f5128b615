"""Makes a tensor-parallel plan for a model. Everything is checked here, before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from ..distributed.tensor_shard import shards_of
from ..errors import ModelError
from .heads import (
    FUSED_NAMES,
    KEY_VALUE_NAMES,
    MLP_NAMES,
    QUERY_NAMES,
    Attribute,
    Heads,
    attributes_of,
    counts_heads,
    fused_lengths,
    heads_of,
    query_width_of,
    text_config,
)
from .layer_pairs import norm_problems, pairing_problems
from .layers import computes_by_itself, is_plain_embedding, is_transposed
from .styles import COLUMN, STYLES, SYNONYMS, WHOLE, Assignment, ParallelPlan, Style


def own_plan(model: nn.Module) -> dict[str, Style]:
    """Return the plan that a Hugging Face model ships, with full names; {} if it has none.

    What wraps such models, as peft does and whoever gives one a head of his own, has theirs.
    """
    wraps = hasattr(model, "peft_config")  # and hands on what it is asked for
    shipped = {} if wraps else _shipped(model)
    if shipped:
        return shipped
    found: dict[str, Style] = {}
    homes: list[str] = []
    for name, module in model.named_modules():
        if not name or not hasattr(type(module), "base_model_prefix") or any(name.startswith(f"{h}.") for h in homes):
            continue
        homes.append(name)
        found |= {f"{name}.{pattern}": style for pattern, style in _shipped(module).items()}
    return found


def _shipped(model: nn.Module) -> dict[str, Style]:
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if isinstance(plan, Mapping) and plan:
        return dict(plan)
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    if not isinstance(base, Mapping):
        return {}
    prefix = getattr(model, "base_model_prefix", "")
    inside = prefix and isinstance(getattr(model, prefix, None), nn.Module)
    return {f"{prefix}.{pattern}" if inside else pattern: style for pattern, style in base.items()}


def make_plan(model: nn.Module, plan: Mapping[str, Style] | None, size: int, spared: Collection[str] = ()) -> ParallelPlan:
    """Plan what becomes of each layer of ``model`` on ``size`` ranks. Nothing is changed.

    ``plan``: name pattern -> style, see styles.py; None: the model's own plan, whose patterns that match nothing are
    ignored. ``spared``: modules that stay as they are, with what is in them. Raises ModelError, which lists all problems:
    patterns that match nothing, unknown styles, layers of another kind than the style is for, heads that ``size`` does not
    divide, column- and row-parallel layers that do not belong together, a model that is divided already or has LoRA
    adapters.
    """
    patterns = own_plan(model) if plan is None else dict(plan)
    if size < 1 or not patterns:
        raise ModelError(
            f"no plan for tensor parallelism of {type(model).__name__} over {size} ranks: the model ships none. Remedy: "
            "pass a plan (name pattern -> style), or let zerorun.tensor_parallel.infer_plan propose one."
        )
    _refuse_changed(model)
    made = _Maker(model, size, shipped=plan is None)
    for name, pattern, style in made.matches(patterns, given=plan is not None):
        if not any(name == other or name.startswith(f"{other}.") for other in spared):
            made.enter(name, pattern, style)
    made.follow_ties()
    entries = made.in_order()
    attributes = made.attributes(entries)
    if not made.problems:
        made.problems += pairing_problems(model, entries)
        if plan is not None:
            made.problems += norm_problems(model, entries)
    if made.problems:
        found = list(dict.fromkeys(made.problems))
        noun = "problem" if len(found) == 1 else "problems"
        raise ModelError(f"the tensor-parallel plan has {len(found)} {noun}:\n  " + "\n  ".join(found))
    return ParallelPlan(size, tuple(entries), tuple(attributes))


def matches(model: nn.Module, pattern: str) -> bool:
    """True if ``pattern`` matches a module or parameter of ``model``."""
    names = (name for found in (model.named_modules(), model.named_parameters()) for name, _ in found)
    return any(_expression(pattern).fullmatch(name) for name in names if name)


def matches_names(params: Iterable[str], pattern: str) -> bool:
    """True if ``pattern`` matches one of the parameter names ``params``, or a module that holds some of them."""
    names = {".".join(parts[:end]) for parts in (name.split(".") for name in params) for end in range(1, len(parts) + 1)}
    return any(_expression(pattern).fullmatch(name) for name in names)


def _refuse_changed(model: nn.Module) -> None:
    if shards_of(model):
        raise ModelError(
            "the model is divided over tensor-parallel ranks already. Remedy: call parallelize() once, or undo() first."
        )
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft.tuners.") and hasattr(module, "base_layer"):
            raise ModelError(
                f"{name} has an adapter ({type(module).__name__} of peft), and adapters cannot be divided over "
                "tensor-parallel ranks. Remedy: merge it (merge_and_unload), or train it with tensor_parallel.size 1."
            )


class _Maker:
    """Collects the entries of one plan and what is wrong with it."""

    def __init__(self, model: nn.Module, size: int, *, shipped: bool) -> None:
        self.model, self.size, self.shipped = model, size, shipped
        self.modules = dict(model.named_modules())
        self.params = dict(model.named_parameters())
        self.entries: dict[str, Assignment] = {}
        self.problems: list[str] = []

    def matches(self, patterns: Mapping[str, Style], *, given: bool) -> Iterator[tuple[str, str, Style]]:
        """Yield (name, pattern, style) for every module and parameter that a pattern matches."""
        chosen: dict[str, tuple[str, Style]] = {}
        for pattern, style in patterns.items():
            found = [name for name in (*self.modules, *self.params) if name and _expression(pattern).fullmatch(name)]
            if not found and given:
                self.problems.append(
                    f"pattern {pattern!r} matches no module or parameter. Remedy: use names from model.named_modules(), "
                    '"*" for one part between dots.'
                )
            for name in found:
                known = chosen.setdefault(name, (pattern, style))
                if known[1] != style:
                    self.problems.append(
                        f"{name} is matched by {known[0]!r} ({known[1]}) and by {pattern!r} ({style}). Remedy: one of them."
                    )
        for name in (*self.modules, *self.params):
            if name in chosen:
                yield (name, *chosen[name])

    def enter(self, name: str, pattern: str, given: Style) -> None:
        """Add ``name`` to the plan, or record why it cannot be added."""
        style = given if isinstance(given, str) else str(given.get("style"))
        style = SYNONYMS.get(style, style)
        lengths = () if isinstance(given, str) else tuple(given.get("lengths", ()))
        if style not in STYLES:
            self.problems.append(
                f"{name}: style {style!r} is not known, or cannot be done with certainty. Remedy: use one of "
                f"{', '.join(sorted(STYLES))}, or leave the layer out."
            )
            return
        try:
            if name in self.params:
                self.entries[name] = self._parameter(name, pattern, style)
            else:
                self.entries[name] = self._module(name, pattern, style, lengths)
        except ModelError as error:
            self.problems.append(str(error))

    def _parameter(self, name: str, pattern: str, style: str) -> Assignment:
        """Assign a parameter: the matrices of all experts [experts, out, in], or one number for each head."""
        shape, packed = self.params[name].shape, style.startswith("packed")
        if style in WHOLE:
            return Assignment(name, pattern, style, parameter=True)
        dims = {"colwise": -2, "packed_colwise": -2, "rowwise": -1, "packed_rowwise": -1}
        if style not in dims or len(shape) not in (1, 3) or (len(shape) == 1 and style != "colwise"):
            raise ModelError(
                f"{name}: style {style!r} is not for a parameter of shape {tuple(shape)}. Remedy: divide 3-D parameters of "
                "experts (colwise, rowwise, packed_colwise, packed_rowwise), or leave it out."
            )
        dim = len(shape) + dims[style] if len(shape) == 3 else 0
        length = shape[dim]
        if packed and length % 2:
            raise ModelError(f"{name}: dimension {dim} has {length} elements, not two halves. Remedy: colwise or rowwise.")
        return Assignment(name, pattern, style, True, dim, (length // 2,) * 2 if packed else (length,))

    def _module(self, name: str, pattern: str, style: str, lengths: tuple[int, ...]) -> Assignment:
        module = self.modules[name]
        if isinstance(self.modules[name.rpartition(".")[0]], nn.MultiheadAttention):
            raise _wrong(name, module, style, "layers that are called; nn.MultiheadAttention uses their weights")
        if style in COLUMN:
            return self._column(name, pattern, style, lengths)
        if style in ("rowwise", "rowwise_split_input"):
            _, width = linear_sizes(name, module, style)
            return Assignment(name, pattern, style, lengths=(width,))
        if style == "embedding_rowwise":
            if not is_plain_embedding(module) or computes_by_itself(module):
                needed = "an nn.Embedding without max_norm, scale_grad_by_freq and sparse gradients"
                raise _wrong(name, module, style, needed)
            return Assignment(name, pattern, style, lengths=(int(module.weight.shape[0]),))  # type: ignore[union-attr, index]
        if style == "packed_rowwise":
            raise _wrong(name, module, style, "a parameter of experts")
        if style == "mla_kv_a_proj":
            return Assignment(name, pattern, style, lengths=self._latent(name, module))
        return Assignment(name, pattern, style)

    def _latent(self, name: str, module: nn.Module) -> tuple[int, int]:
        """Return the columns of the latent key-values, and of the rotary part that goes to all heads."""
        width, _ = linear_sizes(name, module, "mla_kv_a_proj")
        rotary = getattr(text_config(self.model), "qk_rope_head_dim", None)
        if not isinstance(rotary, int) or rotary >= width:
            raise ModelError(
                f"{name}: the configuration has no qk_rope_head_dim. Remedy: leave the attention out of the plan."
            )
        return width - rotary, rotary

    def _column(self, name: str, pattern: str, style: str, lengths: tuple[int, ...]) -> Assignment:
        width, _ = linear_sizes(name, self.modules[name], style)
        entry = Assignment(name, pattern, style, lengths=(width,))
        if style == "packed_colwise":
            if width % 2:
                raise ModelError(f"{name} has {width} columns, not two halves. Remedy: colwise.")
            return replace(entry, lengths=(width // 2,) * 2)
        if style == "colwise_gather_output":
            return entry
        heads = self._heads(entry)
        if style == "fused_colwise":
            return replace(entry, lengths=self._blocks(entry, heads, lengths))
        if heads is None:
            return entry
        counted = heads.key_value if entry.leaf in KEY_VALUE_NAMES | FUSED_NAMES else heads.query
        if width % counted:
            raise ModelError(
                f"{name} has {width} columns, which are not those of {counted} heads. Remedy: leave the attention out."
            )
        if entry.leaf in KEY_VALUE_NAMES and counted < self.size:
            return replace(entry, shared_heads=counted)
        return self._unshared(entry, heads) if entry.leaf in FUSED_NAMES else entry

    def _unshared(self, entry: Assignment, heads: Heads) -> Assignment:
        if heads.key_value < self.size:
            raise ModelError(
                f"{entry.name} holds query, key and value, with {heads.key_value} key-value heads, fewer than "
                f"tensor_parallel.size {self.size}, and a fused layer cannot be used by several ranks in part. Remedy: a "
                "size that divides them, or colwise_gather_output here and rowwise_split_input for the output projection."
            )
        return entry

    def _blocks(self, entry: Assignment, heads: Heads | None, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the blocks of a fused layer. Raises ModelError if they do not fit."""
        if heads is not None:
            self._unshared(entry, heads)
        if not lengths and heads is None:
            raise ModelError(
                f"{entry.name}: the number of heads is unknown. Remedy: give the lengths of its blocks: "
                '{"style": "fused_colwise", "lengths": [query, key, value]}.'
            )
        lengths = lengths or (fused_lengths(entry.name, entry.lengths[0], heads) if heads is not None else ())
        if sum(lengths) != entry.lengths[0] or any(length % self.size for length in lengths):
            raise ModelError(
                f"{entry.name}: blocks of {list(lengths)} columns are not the {entry.lengths[0]} that it has, or "
                f"{self.size} does not divide one. Remedy: lengths that add up, or another size."
            )
        return lengths

    def _heads(self, entry: Assignment) -> Heads | None:
        """Return the heads that a column layer projects to; None if it does not. Raises ModelError if they do not fit."""
        owner = self.modules[entry.owner]
        known = QUERY_NAMES | KEY_VALUE_NAMES | FUSED_NAMES
        if entry.leaf not in known and entry.style != "fused_colwise":
            named = any(child in known for child, _ in owner.named_children())
            if counts_heads(owner) and not named and entry.leaf not in MLP_NAMES:
                raise ModelError(
                    f"{entry.name} lies in {type(owner).__name__}, which has heads, and its name does not tell whether it "
                    f"projects to them. Remedy: call it one of {', '.join(sorted(known))}, or leave it out."
                )
            return None
        heads = heads_of(owner, self.model)
        problem = heads.problem(entry.owner or type(owner).__name__, self.size) if heads is not None else None
        if heads is None and entry.style != "fused_colwise":
            problem = (
                f"{entry.name} is a projection of an attention, and neither {type(owner).__name__} nor a configuration "
                "tells the number of heads. Remedy: let the module have an attribute num_heads."
            )
        if problem:
            raise ModelError(problem)
        return heads

    def follow_ties(self) -> None:
        """Add layers that are tied to a layer of the plan, divided in the way that follows from the tie."""
        owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for name, module in self.modules.items():
            for own_name, param in module._parameters.items():
                if param is not None:
                    owners.setdefault(id(param), []).append((name, module, own_name))
        for users in owners.values():
            entries = [self.entries[name] for name, _, _ in users if name in self.entries]
            if len(users) < 2 or not any(entry.lengths for entry in entries):
                continue
            for name, module, own_name in users:
                if name not in self.entries:
                    self._follow(name, module, own_name, entries[0])

    def _follow(self, name: str, module: nn.Module, own_name: str, leader: Assignment) -> None:
        by_vocabulary = leader.style in ("embedding_rowwise", "colwise", "colwise_gather_output") and own_name == "weight"
        if by_vocabulary and isinstance(module, nn.Embedding):
            self.enter(name, leader.pattern, "embedding_rowwise")
        elif by_vocabulary and isinstance(module, nn.Linear):
            self.enter(name, leader.pattern, "colwise_gather_output")
        else:
            self.problems.append(
                f"{name}.{own_name} is the same parameter as one of {leader.name}, which {leader.pattern!r} divides as "
                f"{leader.style}, and nothing says how {name} uses it. Remedy: leave {leader.name} out, or untie them."
            )

    def in_order(self) -> list[Assignment]:
        return [self.entries[name] for name in (*self.modules, *self.params) if name in self.entries]

    def attributes(self, entries: list[Assignment]) -> list[Attribute]:
        """Return the numbers of heads and the widths that the forwards of attentions and experts use."""
        found: list[Attribute] = []
        columns: dict[str, list[Assignment]] = {}
        for entry in entries:
            if entry.parameter and entry.lengths and len(self.params[entry.name].shape) == 3:
                found += self._expert_widths(entry)
            elif entry.style in ("colwise", "fused_colwise"):
                columns.setdefault(entry.owner, []).append(entry)
        for owner, layers in columns.items():
            known = [
                e for e in layers if e.leaf in QUERY_NAMES | FUSED_NAMES | KEY_VALUE_NAMES or e.style == "fused_colwise"
            ]
            heads = heads_of(self.modules[owner], self.model) if known else None
            if heads is None:
                continue
            fused = next((e.lengths[0] for e in known if len(e.lengths) > 1), None)
            width = fused or query_width_of(heads, [(e.leaf, sum(e.lengths)) for e in known])
            if self.shipped:  # the forward of a model that ships a plan reads widths from its activations
                width = None
            found += attributes_of(owner, self.modules[owner], heads, width or 0, self.size)
        return list(dict.fromkeys(found))

    def _expert_widths(self, entry: Assignment) -> Iterator[Attribute]:
        for name in ("intermediate_dim", "intermediate_size", "expert_dim", "moe_intermediate_size"):
            if vars(self.modules[entry.owner]).get(name) == entry.lengths[0]:
                parts = [entry.own(rank, self.size)[0] for rank in range(self.size)]
                yield Attribute(entry.owner, name, entry.lengths[0], tuple(high - low for low, high in parts))


def linear_sizes(name: str, module: nn.Module, style: str) -> tuple[int, int]:
    """Return (out, in) features of a linear layer. Raises ModelError if ``module`` is not one."""
    if computes_by_itself(module) and (is_transposed(module) or isinstance(module, nn.Linear)):
        raise _wrong(name, module, style, "linear layers that compute as those of torch do")
    weight = module._parameters.get("weight")
    if not isinstance(weight, nn.Parameter) and isinstance(module, nn.Linear):
        raise _wrong(name, module, style, "layers whose weight is a parameter, and not computed from others")
    if is_transposed(module):
        width, out = module.weight.shape  # type: ignore[union-attr, misc]
        return int(out), int(width)
    if not isinstance(module, nn.Linear):
        raise _wrong(name, module, style, "an nn.Linear or Conv1D")
    return module.out_features, module.in_features


def _wrong(name: str, module: nn.Module, style: str, needed: str) -> ModelError:
    return ModelError(
        f"{name} is a {type(module).__name__}, and style {style!r} is for {needed}. Remedy: another style, or leave it out."
    )


def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
