"""Plans for models that ship none: proposed from names and shapes, proven by numbers, or refused.

[Note: what is proposed]
Blocks are the items of the outermost ModuleLists (and Sequentials of modules with children). The linear layers of a block
are read in order. One or more layers, followed by one that restores the width, form a column- and row-parallel group: an
attention if they have the names of its projections, else an MLP. Other layers stay whole. A fused query-key-value layer
may hold three blocks, or query, key and value of one head after the other: both are tried. Every kind of blocks is then
proven by proof.py. A model without such lists is one block, in which a row-parallel layer need not restore the width. In
Hugging Face models, embedding and head are divided by vocabulary. In others they stay whole, because nothing tells
whether their weights are also used in another way.

[Note: what is tried out]
Blocks without values here (on the meta device, or partitioned by zero.Init), and large ones, are tried on a small copy of
the model, if it is one of transformers: its blocks must be the same but for their sizes. What depends on sizes is checked
on the model itself. Where no such copy can be made, a block is tried as it is, which takes ``bytes_of_trial``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from torch import nn

from ..errors import ModelError
from ..log import warn_once
from ..plan.small_model_copies import narrow, small_copy
from ..zero.init import part_of
from .block_kinds import kinds_of, same_but_for_sizes
from .heads import FUSED_NAMES, KEY_VALUE_NAMES, QUERY_NAMES
from .layer_pairs import norms_of_heads
from .layers import computes_by_itself, is_transposed
from .planning import linear_sizes, make_plan
from .proof import NOT_ALONE, Call, bytes_of_trial, capture, difference
from .sequence import blocks_of
from .styles import COLUMN, ParallelPlan, Style

_REMEDY = 'Remedy: pass a plan (name pattern -> style), for example {"layers.*.up": "colwise", "layers.*.down": "rowwise"}.'


LARGEST = 1_000_000  # parameters of a block that is tried as it is: this takes some 50 MB of memory


@dataclass(frozen=True)
class _Trial:
    """The block ``name`` in the model in which it is tried out. ``call``: its arguments; None if the model has none for it.

    ``layer``: the first that is divided, by its name in the block; "" for none.
    """

    model: nn.Module
    name: str
    layer: str
    width: int  # of the hidden states
    call: Call | None

    def difference(self, plan: ParallelPlan, *, along_sequence: bool = False) -> str | None:
        """Return how the block differs if it is divided by ``plan``, which is that of the model; None if it does not."""
        if self.call is None:
            return None
        block, own = self.model.get_submodule(self.name), plan.within(self.name)
        return difference(block, own, self.call, self.width, along_sequence=along_sequence)


class Trials:
    """Tries out the blocks of ``model`` on ``size`` ranks. ``bytes``: the most memory that this has taken.

    See [Note: what is tried out].
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        self.model, self.size = model, size
        self.bytes = 0

    def begin(self, name: str, layer: str) -> _Trial:
        """Return the trial of the block ``name``, of which ``layer`` is the first that is divided."""
        return self._on(self._model_of(name), name, layer)

    def fitting(
        self, trial: _Trial, plan: ParallelPlan, given: Mapping[str, Style] | None, spared: Collection[str] = ()
    ) -> tuple[_Trial, ParallelPlan]:
        """Return ``trial`` and the plan for its model, where ``plan``, made of ``given``, is that of the whole model."""
        if trial.model is self.model:
            return trial, plan
        try:
            return trial, make_plan(trial.model, given, self.size, spared)
        except ModelError:  # what ``given`` says of lengths is not true of the copy
            return self._on(self.model, trial.name, trial.layer), plan

    def _on(self, tried: nn.Module, name: str, layer: str) -> _Trial:
        block = tried.get_submodule(name)
        width = linear_sizes(layer, block.get_submodule(layer), "colwise")[1] if layer else 0
        call = capture(tried, block, width)
        if call is not None:
            self.bytes = max(self.bytes, bytes_of_trial(block, self.size))
        return _Trial(tried, name, layer, width, call)

    def _model_of(self, name: str) -> nn.Module:
        block = self.model.get_submodule(name)
        params = list(block.parameters())
        has_values = not any(param.is_meta or part_of(param) is not None for param in params)
        if has_values and sum(param.numel() for param in params) <= LARGEST:
            return self.model
        if self._copy is not None:
            with suppress(AttributeError):  # the copy has no such block
                if same_but_for_sizes(block, self._copy.get_submodule(name)):
                    return self._copy
        return self.model

    @cached_property
    def _copy(self) -> nn.Module | None:
        if getattr(self.model, "config", None) is None:
            return None
        try:
            return small_copy(self.model, lambda config: narrow(config, self.size))
        except Exception:  # whatever the class says to sizes that it does not take
            return None


@dataclass(frozen=True)
class _Linear:
    """A linear layer of a block, by its name in the block."""

    name: str
    out: int
    width: int  # of the input

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def projects(self) -> bool:
        """True for a projection to query, key or value alone."""
        return self.leaf in QUERY_NAMES | KEY_VALUE_NAMES


@dataclass(frozen=True)
class _Group:
    """Column-parallel layers, the row-parallel layer that joins them, and the styles that the columns may have."""

    columns: tuple[_Linear, ...]
    row: _Linear
    styles: tuple[str, ...]

    def plan(self, style: str) -> dict[str, Style]:
        return {**{column.name: style for column in self.columns}, self.row.name: "rowwise"}


def infer_plan(model: nn.Module, size: int) -> dict[str, Style]:
    """Return a plan for ``model`` over ``size`` ranks: name pattern -> style. Nothing is changed.

    Raises ModelError, naming the class of the block and what differs in it, if no plan is proven to give the same outputs
    and gradients.
    """
    return infer_with(Trials(model, size))


def infer_with(trials: Trials) -> dict[str, Style]:
    """Do as ``infer_plan`` for the model of ``trials``."""
    model = trials.model
    plan: dict[str, Style] = {}
    proven: dict[object, dict[str, Style]] = {}
    for container in _containers(model):
        names = [f"{container}.{name}" for name, _ in model.get_submodule(container).named_children()]
        plans = []
        for name, kind in zip(names, kinds_of([model.get_submodule(name) for name in names]), strict=True):
            if kind not in proven:
                proven[kind] = _prove(trials, name)
            plans.append(proven[kind])
        alike = all(found == plans[0] for found in plans)
        for name, found in zip(names, plans, strict=True):
            prefix = f"{container}.*" if alike else name
            plan |= {f"{prefix}.{own}": style for own, style in found.items()}
    if not plan:
        if not any(True for _ in _linears(model)):
            raise ModelError(f"no plan can be inferred for {type(model).__name__}: it has no linear layers. {_REMEDY}")
        plan = _prove(trials, "")
    return {**_vocabulary(model), **plan}


def prove_given(trials: Trials, plan: ParallelPlan, given: Mapping[str, Style], spared: Collection[str] = ()) -> None:
    """Try out the blocks of a model in which ``plan``, made of the user's ``given``, divides layers.

    Names tell neither how a fused layer is laid out nor what a block does between its layers. Raises ModelError if a
    divided block computes something else. For a block that cannot be run alone, the plan is accepted with a warning.
    """
    for name, label, divided in _one_of_each_kind(trials.model, plan, _containers(trials.model)):
        if not divided:
            continue
        trial, made = trials.fitting(trials.begin(name, _first_of(trials.model, name, divided)), plan, given, spared)
        found = f"{NOT_ALONE} token ids alone" if trial.call is None else trial.difference(made)
        if found is not None and found.startswith(NOT_ALONE):
            warn_once(
                f"{label} {found}, so that nothing has proved the tensor-parallel plan for it: it is taken as given. "
                "Remedy: see that nothing in it looks at all columns between divided layers; `zerorun verify` compares a "
                "few steps with one process."
            )
        elif found is not None:
            raise ModelError(
                f"{label}, divided by the plan over {plan.size} ranks, {found}. Remedy: leave out layers between which "
                "something looks at all columns; of a layer that holds query, key and value use "
                '"fused_colwise" for three blocks, "colwise" for those of each head in turn.'
            )


def prove_along_sequence(
    trials: Trials, plan: ParallelPlan, given: Mapping[str, Style] | None, spared: Collection[str] = ()
) -> None:
    """Try out all kinds of blocks with hidden states that are divided along the sequence, too.

    What a block does to them by functions alone, as a shift of tokens or a mean over them, no name of a class tells.
    ``given``: what ``plan`` is made of; None for the model's own. Raises ModelError if a block computes something else, or
    as ``blocks_of``.
    """
    for name, label, divided in _one_of_each_kind(trials.model, plan, [blocks_of(trials.model, plan)]):
        trial, made = trials.fitting(trials.begin(name, _first_of(trials.model, name, divided)), plan, given, spared)
        found = trial.difference(made, along_sequence=True)
        if found is not None and not found.startswith(NOT_ALONE):
            raise ModelError(
                f"{label} with a part of the sequence on each of {plan.size} tensor ranks {found}: between its divided "
                "layers something looks at other tokens, or takes the length of the sequence from a part of it. Remedy: "
                "put such code into a module in the block that has nothing but divided layers, such as an attention, which "
                "gets the whole sequence; or sequence_parallel=False."
            )


def _one_of_each_kind(model: nn.Module, plan: ParallelPlan, containers: list[str]) -> Iterator[tuple[str, str, set[str]]]:
    """Yield one block of each kind in ``containers``: its name, class and name, and what ``plan`` divides by columns in it.

    Blocks of one kind compute alike, and are divided alike.
    """
    seen: set[object] = set()
    for container in containers:
        blocks = dict(model.get_submodule(container).named_children())
        for (own, block), kind in zip(blocks.items(), kinds_of(list(blocks.values())), strict=True):
            name = f"{container}.{own}"
            entries = plan.within(name).entries
            key = kind, tuple(replace(entry, pattern="") for entry in entries)
            if key not in seen:
                seen.add(key)
                yield name, f"{type(block).__name__} ({name})", {e.name for e in entries if e.style in COLUMN}


def _first_of(model: nn.Module, name: str, divided: set[str]) -> str:
    """Return the first linear layer of the block ``name`` that is in ``divided``; "" for none."""
    return next((layer.name for layer in _linears(model.get_submodule(name)) if layer.name in divided), "")


def _containers(model: nn.Module) -> list[str]:
    """Return the names of the modules that hold the blocks."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not name or any(name.startswith(other + ".") for other in found):
            continue
        holds = isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.Sequential) and all(list(child.children()) for child in module)
        )
        if holds and any(True for _ in _linears(module)):
            found.append(name)
    return found


def _linears(block: nn.Module) -> Iterator[_Linear]:
    for name, module in block.named_modules():
        if name and (isinstance(module, nn.Linear) or is_transposed(module)) and not computes_by_itself(module):
            yield _Linear(name, *linear_sizes(name, module, "colwise"))


def _prove(trials: Trials, name: str) -> dict[str, Style]:
    """Return the proven plan of the block ``name``, with names relative to it. Raises ModelError if there is none."""
    model, size = trials.model, trials.size
    block = model.get_submodule(name)
    label = f"{type(block).__name__} ({name or 'the whole model'})"
    groups = list(_groups(block, restores=bool(name)))
    inside = f"{name}." if name else ""
    if not groups:
        raise ModelError(f"no plan can be inferred for {label}: its layers are of no known structure. {_REMEDY}")
    trial = trials.begin(name, groups[0].columns[0].name)
    if trial.call is None:
        raise ModelError(
            f"no plan can be inferred for {label}: the model runs on token ids without calling this block, so that nothing "
            f"can be tried out. {_REMEDY}"
        )
    reasons: list[str] = []
    for styles in product(*(group.styles for group in groups)):
        chosen: dict[str, Style] = {}
        for group, style in zip(groups, styles, strict=True):
            chosen |= group.plan(style)
            owner = group.columns[0].name.rpartition(".")[0]
            inner = dict.fromkeys(norms_of_heads(block, owner, list(chosen)), "replicated_with_grad_allreduce")
            chosen |= inner
        given = {inside + own: style for own, style in chosen.items()}
        try:
            made = make_plan(model, given, size)
        except ModelError as error:
            reasons.append(str(error))
            continue
        trial, made = trials.fitting(trial, made, given)
        found = trial.difference(made)
        if found is None:
            return chosen
        reasons.append(f"{', '.join(f'{own}: {style}' for own, style in chosen.items())}: the block {found}")
    raise ModelError(
        f"no plan can be inferred for {label} over {size} ranks. Tried:\n  " + "\n  ".join(reasons) + f"\n{_REMEDY}"
    )


def _groups(block: nn.Module, *, restores: bool) -> Iterator[_Group]:
    """Yield the groups. ``restores``: the row-parallel layer gives the width that the columns take."""
    pending: list[_Linear] = []
    for layer in _linears(block):
        styles = _closes(pending, layer, restores)
        if styles:
            yield _Group(tuple(pending), layer, styles)
            pending = []
        else:
            pending = [*pending, layer] if pending and pending[0].width == layer.width else [layer]


def _closes(columns: list[_Linear], row: _Linear, restores: bool) -> tuple[str, ...]:
    """Return the styles that ``columns`` may have if ``row`` joins them; () if it does not."""
    if not columns or (row.out != columns[0].width and (restores or len(columns) > 1)):
        return ()
    first = columns[0]
    if any(column.projects for column in columns):
        query = [column for column in columns if column.leaf in QUERY_NAMES]
        whole = len(columns) == 3 and all(column.projects for column in columns)
        return ("colwise",) if whole and not row.projects and [column.out for column in query] == [row.width] else ()
    if len(columns) == 1 and first.leaf in FUSED_NAMES:
        return ("fused_colwise", "colwise") if first.out > row.width else ()
    if all(column.out == row.width for column in columns):
        return ("colwise",)
    if len(columns) == 1 and first.out == 2 * row.width:
        return ("packed_colwise",)
    return ()


def _vocabulary(model: nn.Module) -> dict[str, Style]:
    """Return the plan of embedding and head of a Hugging Face model; {} for others, or if they share parameters."""
    found: dict[str, Style] = {}
    chosen = {"get_input_embeddings": "embedding_rowwise", "get_output_embeddings": "colwise_gather_output"}
    for method, style in chosen.items():
        get = getattr(model, method, None)
        try:
            layer = get() if callable(get) else None
        except NotImplementedError:  # as of models for speech, which have no such layer
            layer = None
        if isinstance(layer, nn.Embedding | nn.Linear) and isinstance(layer, nn.Embedding) == style.startswith("embedding"):
            found |= {name: style for name, module in model.named_modules() if module is layer}
    inside = {id(param) for name in found for param in model.get_submodule(name).parameters()}
    for name, module in model.named_modules():
        shares = any(id(param) in inside for param in module._parameters.values())
        if shares and name not in found:
            return {}
    return found
