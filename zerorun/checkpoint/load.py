"""Load: read a checkpoint into a model in training, whatever its ZeRO stage, precision and number of ranks.

Everything is compared before anything is changed: the checkpoint is compared with the whole model, even if the pipeline
stages are on different ranks. Then each rank reads just the elements that it keeps, into the place where it keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..distributed.topology import Topology
from ..errors import CheckpointError
from ..log import is_rank_zero, listed, logger
from ..ops.single_pass import Adam8bit, SinglePassOptimizer
from ..ops.state_format import BLOCK, SCALE, Blocks, StateFormat, held, keep_state
from ..optim.parameter_parts import PartsOptimizer, StateRange
from ..plan.optimizer_states import new_states
from ..plan.parameter_kinds import as_bytes, inner_tensors
from ..plan.sharding_plan import ParameterRun
from ..zero.flat_group import TrainedGroup
from ..zero.load_hooks import run_hooks_after, tell_of_hooks
from ..zero.optimizer_pieces import OptimizerPiece
from ..zero.sharded_model import may_change
from ..zero.sharded_optimizer import ShardedOptimizer
from .extra_states import give_back, refuse_lacking
from .frozen_base import refuse_other_base, sums_of_parts
from .gather import PeerReader
from .inventory import Contents, Inventory, SavedParameter, ranges_of, together
from .json_values import decode
from .matching import NameMap, Wanted, compare_tensors, compare_ties, misfit
from .param_group_settings import FRESH_MOMENTS, Variant, compare_variants, is_of, of_schedule, take_over
from .quantised_states import decoded, is_coded, is_scale_set, keeps_blocks, scale_shard, scales
from .rank_buffers import own_buffers
from .ranks import Ranks, attempt, leads_stage
from .read import Read, Reader
from .save import states_apart, unpack_scalars, unpack_values
from .tensorfile import dtype_of
from .write_plan import BUFFER, MASTER, MODEL, OPTIMIZER, RESIDUAL


def _begin_afresh(reader: Reader, wanted: Wanted, thawed: list[str]) -> None:
    """Say that ``thawed``, parameters that were frozen, have no state; raise CheckpointError unless that is allowed."""
    refused = [repr(name) for name in thawed if not wanted.allows(name)]
    if refused and not wanted.allows("optimizer"):
        remedy = "pass allow_missing=[...] with names or patterns if their moments may begin afresh."
        what = "has no optimizer state, since they were frozen when it was saved, for"
        raise misfit(reader, what, refused, remedy)
    if thawed and is_rank_zero():
        shown = listed([repr(name) for name in thawed])
        logger.warning("%s: moments begin afresh for what was frozen when it was saved: %s.", reader.path, shown)


@dataclass
class PreparedOptimizer:
    """What an optimizer is to become. ``words``: what is stored of it. ``groups``: hyperparameters, in its own order."""

    words: str
    groups: list[dict[str, Any]]
    apart: dict[str, Any]  # what its state has under keys that are no parameters
    more: dict[str, Any]  # what its class adds to its state_dict
    others: list[Variant] = field(default_factory=list)  # what is stored and not followed
    states: list[tuple[OptimizerPiece, dict[str, Any]]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)  # what fills the states

    def leaves_out(self, group: int, kind: str) -> bool:
        """True for the set of a state that the formulas of this run do not have in ``group``."""
        return any(variant.group == group and is_of(kind, variant.left_out) for variant in self.others)


class ModelLoader:
    """Loads weights, masters, buffers and optimizer state of one checkpoint into one model.

    ``model``: the contents of the modules of all pipeline stages together.
    """

    def __init__(self, inventory: Inventory, reader: Reader, wanted: Wanted, model: Contents) -> None:
        self.inventory, self.reader, self.wanted, self.model = inventory, reader, wanted, model
        self.subject = inventory.subject
        self._names = NameMap(reader, model.aliases, getattr(self.subject.module, "base_model_prefix", ""))
        self.find = self._names.find
        self._conversions: list[Callable[[], None]] = []  # of states that the files have in another format
        self._entries = {(id(home.flat_group), home.entry): name for name, home in inventory.homes.items()}

    @classmethod
    def compared(cls, inventory: Inventory, reader: Reader, wanted: Wanted, ranks: Ranks) -> ModelLoader:
        """Make a loader, or raise CheckpointError on all ranks if the checkpoint does not fit the model. Collective.

        Nothing is changed yet.
        """
        own = inventory.contents()
        model = together(ranks.gather(own if leads_stage(ranks.topology) else None))
        loader, problem = attempt(lambda: cls(inventory, reader, wanted, model))
        ranks.agree(problem)
        assert loader is not None
        ranks.agree(attempt(loader._compare)[1])
        compare_ties(reader, loader._names, wanted, ranks)
        return loader

    def _compare(self) -> None:
        compare_tensors(self.reader, self._names, self.model.shapes, self.wanted)
        refuse_lacking(self.reader, self.model.extra, self.wanted)

    def compare_base(self, ranks: Ranks, read_peer: PeerReader | None) -> None:
        """Compare the model's frozen weights with the checksums of those that the checkpoint leaves out. Collective.

        Raises CheckpointError if they differ. If not strict, there is only a warning, and they stay as they are.
        """
        base = self.reader.manifest.frozen_base if self.reader.manifest else None
        if base is not None:
            live = sums_of_parts(base, self.inventory, self.model.shapes, ranks, read_peer)
            refuse_other_base(self.reader, base, live, strict=self.wanted.strict)

    # -- weights -------------------------------------------------------------------------------------------------

    def load_weights(self, ranks: Ranks) -> None:
        """Read weights, masters and buffers. Collective."""
        subject = self.subject
        subject.model.make_ready()
        with may_change(subject.model):
            subject.comm.fence()
            ranks.gather(None)  # from here on no rank reads another's shards
            subject.model.runtime.gathers.evict_all()
            subject.model.runtime.reducer.forget_residuals()
            reads = [read for name, home in self.inventory.homes.items() for read in self._weight_reads(name, home)]
            buffers = self.inventory.beside().buffers
            own, copies = own_buffers(self.reader, subject.topology), []
            for name, buffer in (*self.inventory.kept_apart().items(), *buffers.items()):
                stored = self.find(name)
                if stored is not None:
                    flat = torch.empty(buffer.numel(), dtype=buffer.dtype)
                    kind, place = (BUFFER, own[stored]) if stored in own else (MODEL, stored)
                    reads.append(Read(kind, place, 0, flat))
                    copies.append((buffer, flat))
            self.reader.fetch(reads, ranks)
            self._convert_all()
            for buffer, flat in copies:
                buffer.copy_(flat.view(buffer.shape))
            ranks.agree(attempt(lambda: self._require_scales(buffers))[1])
            if subject.optimizer is not None:
                subject.optimizer.write_back()
            wide = [r for r in reads if r.set == MODEL and r.out.dtype == torch.float64]
            self.reader.fetch(wide, ranks)  # fp64 weights are more precise than their masters
            subject.model.publish()

    def _require_scales(self, buffers: dict[str, torch.Tensor]) -> None:
        """Raise CheckpointError if a layer computes the scales of its packed weight anew instead of taking those loaded."""
        now = self.inventory.beside().buffers
        anew = [(name, value) for name, value in buffers.items() if now[name].data_ptr() != value.data_ptr()]
        lost = [name for name, value in anew if not torch.equal(as_bytes(now[name]), as_bytes(value))]
        if lost:
            raise CheckpointError(
                f"{self.reader.path} has other values of {listed(list(map(repr, lost)))}, which the layers here do not "
                "take, so that their packed weights would be read wrongly. Remedy: build and quantise the model from "
                "the weights that the checkpoint was made with, before initialize()."
            )

    def _weight_reads(self, name: str, home: SavedParameter) -> Iterable[Read]:
        stored, flat_group, shard = self.find(name), home.flat_group, home.shard
        if stored is None:
            return
        if isinstance(flat_group, TrainedGroup):
            source = MASTER if stored in self.reader.places(MASTER) else MODEL
            run = flat_group.plan.owned_run(home.entry)
            if run is not None:
                out = flat_group.master[run.offset : run.offset + run.numel]
                if flat_group.rest is not None:
                    out = torch.empty(run.numel)
                    self._conversions.append(partial(flat_group.keep_exact, out, run.offset))
                yield Read(source, stored, run.start, out, shard)
        if not flat_group.trainable or flat_group.dtype == torch.float64:
            source = _set_for(self.reader, stored, flat_group.dtype)
            if flat_group.plan.resident:
                yield Read(source, stored, 0, home.part_of_full(flat_group.full), shard)
                return
            piece = flat_group.plan.shard_piece(home.entry)
            if piece is not None:
                part = flat_group.shard[piece.shard_start : piece.shard_start + piece.numel]
                yield Read(source, stored, piece.start, part, shard)

    def load_residuals(self, ranks: Ranks, topology: Topology) -> list[str]:
        """Go on with what coding had left out of gradients, if these are the ranks that sent them. Collective.

        Return what was restored, in words. To be called when the counters and the loss scale are there.
        """
        reducer, layout = self.subject.model.runtime.reducer, self.reader.manifest.layout if self.reader.manifest else {}
        own = reducer.residual_places()
        axes = {axis: topology.size(axis) for axis in ("replicate", "shard", "pipe", "tensor", "expert")}
        same = all(layout.get(axis, 1) == size for axis, size in axes.items())
        there = self.reader.places(RESIDUAL) if RESIDUAL in self.reader.sets else {}
        fits = same and all(n in there and self.reader.tensor(RESIDUAL, n).numel == t.numel() for n, t in own.items())
        if not any(ranks.gather(bool(own))):
            return []
        if all(ranks.gather(fits)):
            self.reader.fetch([Read(RESIDUAL, name, 0, residual) for name, residual in own.items()], ranks)
            reducer.go_on_with_residuals()
            return ["what coding had left out of gradients"]
        if is_rank_zero():
            logger.info(
                "what coding leaves out of gradients begins anew: the checkpoint has nothing of these ranks, which are "
                "laid out in another way or had other gradients. At most one sum's rounding is lost by it."
            )
        return []

    def load_extra(self, tensors: dict[str, torch.Tensor]) -> None:
        """Give modules back what their ``get_extra_state`` returned when the checkpoint was saved, and call their hooks."""
        give_back(self.subject.module, self.inventory.beside().extra, self.reader, tensors)
        tell_of_hooks(self.subject.module, "a load")
        run_hooks_after(self.subject.module, "a load", self.subject.model)

    # -- optimizer -----------------------------------------------------------------------------------------------

    def prepare_optimizer(self, ranks: Ranks, tensors: dict[str, torch.Tensor]) -> PreparedOptimizer | None:
        """Compare the optimizer with what is stored of it, and make what is to be filled. Collective; nothing is changed.

        Ranks without an optimizer call it, too. Return None if no optimizer state is there, and it may be missing.
        """
        manifest = self.reader.manifest
        assert manifest is not None
        described = manifest.optimizer
        if described is None:
            if self.wanted.allows("optimizer"):
                return None
            raise CheckpointError(
                f'{self.reader.path} has no optimizer state. Remedy: pass allow_missing=["optimizer"], or {FRESH_MOMENTS}'
            )
        lost = [repr(key) for key in described.get("states", []) if f"{OPTIMIZER}{key}" not in self.reader.sets]
        if lost and self.wanted.allows("optimizer"):
            return None
        if lost:
            raise misfit(self.reader, "lacks, of the optimizer,", lost, FRESH_MOMENTS)
        groups = {name: group for found in ranks.gather(self.inventory.groups()) for name, group in found.items()}
        prepared, problem = attempt(lambda: self._prepare(described, groups, tensors))
        ranks.agree(problem)
        return prepared

    def _prepare(
        self, described: dict[str, Any], groups: dict[str, int], tensors: dict[str, torch.Tensor]
    ) -> PreparedOptimizer:
        """``groups``: parameter name -> optimizer group, of the whole model."""
        self._compare_optimizer(described)
        self._compare_groups(described, groups)
        keys = [kind for kind in self.reader.sets if kind.startswith(OPTIMIZER)]
        stored, own = decode(described["groups"], tensors), self.subject.optimizer
        members = [[self.find(name) or name for name, of in groups.items() if of == n] for n in range(len(stored))]
        prepared = PreparedOptimizer(
            described["type"],
            stored,
            unpack_values(described.get("apart", {})),
            unpack_values(described.get("more", {})),
            [] if own is None else compare_variants(self.reader, own.optimizer.param_groups, stored, members),
        )
        taken = [k for k in keys if not all(prepared.leaves_out(group, k) for group in range(len(stored)))]
        names = [kind.removeprefix(OPTIMIZER) for kind in taken] + list(described["scalars"])
        prepared = replace(prepared, words=f"{described['type']} ({', '.join(names)})")
        self._make_states(keys, unpack_scalars(described["scalars"]), prepared)
        return prepared

    def load_optimizer(self, prepared: PreparedOptimizer, ranks: Ranks, schedule: Any) -> str:
        """Read the optimizer's state, and take over its hyperparameters. Collective. Return what was restored, in words.

        ``schedule``: that of this run, if it does not go on from the checkpoint. What it has set stays, then.
        """
        sharded, problem = self.subject.optimizer, None
        if sharded is not None:
            groups = zip(sharded.optimizer.param_groups, prepared.groups, strict=True)
            for number, (group, stored) in enumerate(groups):
                left = frozenset() if schedule is None else of_schedule(schedule, number, group, stored)
                take_over(group, stored, left, self.inventory.settings[number])
            states = sharded.optimizer.state  # once: an access waits for the updates of all units
            for piece, state in prepared.states:
                states.pop(piece.tensor, None)
                if state:
                    states[piece.tensor].update(state)
            for key in states_apart(states).keys() - prepared.apart.keys():
                del states[key]
            states.update(prepared.apart)  # type: ignore[arg-type]
            _, problem = attempt(lambda: _load_more(sharded.optimizer, prepared.more))
        ranks.agree(problem)
        self.reader.fetch(prepared.reads, ranks)
        self._convert_all()
        if prepared.others and is_rank_zero():
            others = listed(list(map(str, prepared.others)))
            logger.warning("%s: the optimizer updates as this run asks for: %s.", self.reader.path, others)
        return prepared.words

    def _convert_all(self) -> None:
        for convert in self._conversions:
            convert()
        self._conversions.clear()

    def _compare_optimizer(self, described: dict[str, Any]) -> None:
        sharded = self.subject.optimizer
        if sharded is None:
            return
        kind = optimizer_kind(sharded.optimizer)
        if described["type"] not in ("", kind):
            raise CheckpointError(
                f"{self.reader.path} was saved with the optimizer {described['type']}, and this run has {kind}, whose "
                "state means something else. Remedy: use the same optimizer, or pass load_optimizer=False."
            )
        if len(described["groups"]) != len(sharded.optimizer.param_groups):
            raise CheckpointError(
                f"{self.reader.path} has {len(described['groups'])} parameter groups, and this run's optimizer "
                f"{len(sharded.optimizer.param_groups)}. Remedy: make the same groups, or pass load_optimizer=False."
            )

    def _compare_groups(self, described: dict[str, Any], groups: dict[str, int]) -> None:
        """Raise CheckpointError if a parameter is in another group than it was: it would get the hyperparameters of others.

        A schedule has a state for each group, by its number. So they are not put in another order. One that was in none was
        frozen, and has no state: that must be allowed. One without elements never has a state, and earlier versions knew it
        in none where several ranks divided it.
        """
        manifest = self.reader.manifest
        there = {name: entry["group"] for name, entry in manifest.parameters.items()} if manifest else {}
        thawed: list[str] = []
        for name, shape in self.model.shapes.items():
            known = self.find(name) or name
            group, stored = groups.get(name), there.get(known)
            if group is not None and stored is None and known in there and 0 not in shape:
                thawed.append(name)
            if None not in (group, stored) and stored != group:
                raise CheckpointError(
                    f"{self.reader.path} has {name!r} in parameter group {stored}, and this run's optimizer in group "
                    f"{group}, which would get the hyperparameters of other parameters. Remedy: make the groups of the "
                    f"same parameters, in the same order (it has {_kept(described, stored)} in group {stored}), or pass "
                    "load_optimizer=False."
                )
        if described.get("states") or described["scalars"]:
            _begin_afresh(self.reader, self.wanted, thawed)

    def _signature(
        self, piece: OptimizerPiece, run: ParameterRun, keys: list[str], scalars: dict[str, dict[str, Any]]
    ) -> Any:
        """What must be equal for all parameters that share a piece: which states they have, and their scalars."""
        stored = self._stored_name(piece, run)
        there = tuple(
            kind for kind in keys if stored in self.reader.places(kind) and not is_scale_set(self.reader, kind, stored)
        )
        return there, repr(scalars.get(stored))

    def _home(self, piece: OptimizerPiece, run: ParameterRun) -> SavedParameter:
        return self.inventory.homes[self._entries[id(piece.flat_group), run.entry]]

    def _stored_name(self, piece: OptimizerPiece, run: ParameterRun) -> str:
        name = self._entries[id(piece.flat_group), run.entry]
        return self.find(name) or name

    def _make_states(self, keys: list[str], scalars: dict[str, dict[str, Any]], prepared: PreparedOptimizer) -> None:
        """Add to ``prepared`` a state for every piece, with the right keys and shapes, and what is to fill it."""
        sharded = self.subject.optimizer
        if sharded is None:
            return
        self._separate(sharded, keys, scalars)
        if isinstance(sharded.optimizer, SinglePassOptimizer):  # it makes missing states itself, where they belong
            sharded.optimizer.prepare(piece.tensor for piece in sharded.pieces)
        states = sharded.optimizer.state
        for piece in sharded.pieces:
            old = states.get(piece.tensor, {})
            own = [kind for kind in keys if not prepared.leaves_out(piece.group, kind)]
            prepared.states.append((piece, self._state(piece, old, own, scalars, prepared.reads)))

    def _separate(self, sharded: ShardedOptimizer, keys: list[str], scalars: dict[str, dict[str, Any]]) -> None:
        """Cut every piece whose parameters had not taken the same steps."""
        sharded.cut(lambda piece: len({self._signature(piece, run, keys, scalars) for run in piece.runs}) > 1)

    def _state(
        self,
        piece: OptimizerPiece,
        old: dict[str, Any],
        keys: list[str],
        scalars: dict[str, dict[str, Any]],
        reads: list[Read],
    ) -> dict[str, Any]:
        """Make the state of one piece, from tensors of ``old`` where they fit. Add to ``reads`` what is to fill it."""
        state: dict[str, Any] = {}
        first = self._stored_name(piece, piece.runs[0])
        for key, value in scalars.get(first, {}).items():
            made_anew = deepcopy(value)  # pieces may not share a list
            on = _place_of_scalars(self.subject.optimizer, piece)
            state[key] = made_anew.to(on) if _is_tensor(value) else made_anew
        state |= self._wrapped(piece, first, keys, reads)
        for kind in keys:
            if first not in self.reader.places(kind) or _is_inner(kind):
                continue
            there, key = self.reader.tensor(kind, first), kind.removeprefix(OPTIMIZER)
            assert self.subject.optimizer is not None
            if isinstance(self.subject.optimizer.optimizer, SinglePassOptimizer) and key in old:
                self._read_formatted(piece, old, key, reads)
                state |= {k: old[k] for k in (key, key + SCALE) if k in old}
                continue
            ranges = ranges_of(self.subject.optimizer.optimizer, piece, key)
            if ranges is not None:
                dtype = self._dtype_of_state(piece, key, there.dtype)
                state[key] = torch.zeros(sum(r.numel for r in ranges), dtype=dtype, device=piece.tensor.device)
                reads += _range_reads(self.reader, kind, first, state[key], ranges)
                continue
            home = self._home(piece, piece.runs[0])
            whole = there.shape == home.shape
            if not whole and home.shard is not None:
                raise CheckpointError(
                    f"{self.reader.path} has {kind} of {first!r} in the shape {list(there.shape)}, not that of the "
                    "parameter, which cannot be divided over tensor-parallel ranks. Remedy: pass load_optimizer=False."
                )
            shape = tuple(piece.tensor.shape) if whole else there.shape
            made: Any = old.get(key)
            dtype = self._dtype_of_state(piece, key, there.dtype)
            if not _is_tensor(made) or made.shape != shape or made.dtype != dtype or not made.is_contiguous():
                made = torch.zeros(shape, dtype=dtype, device=piece.tensor.device)
            flat = made.view(-1)
            for run in piece.runs if whole else ():
                part, shard = flat[run.offset : run.offset + run.numel], self._home(piece, run).shard
                reads.append(Read(kind, self._stored_name(piece, run), run.start, part, shard))
            if not whole:
                reads.append(Read(kind, first, 0, flat))
            state[key] = made
        return state

    def _dtype_of_state(self, piece: OptimizerPiece, key: str, stored: str) -> torch.dtype:
        """The dtype in which the optimizer keeps the state ``key`` of ``piece``. ``stored``: that of the checkpoint.

        bf16 may come from a run that kept in bf16 what this one keeps in fp32.
        """
        found = dtype_of(stored)
        if piece.format is StateFormat.BF16 and found.is_floating_point:
            return torch.bfloat16
        if found is torch.bfloat16 and self.subject.optimizer is not None:
            if isinstance(self.subject.optimizer.optimizer, PartsOptimizer):
                return torch.float32
            small = torch.empty((2,) * piece.tensor.dim(), device=piece.tensor.device)
            native: Any = new_states(self.subject.optimizer.optimizer, piece.group, small).get(key)
            return torch.float32 if _is_tensor(native) and native.dtype == torch.float32 else found
        return found

    def _read_formatted(self, piece: OptimizerPiece, states: dict[str, Any], key: str, reads: list[Read]) -> None:
        """Fill the state ``key`` of a piece, which has a format of its own, from the files, whatever they have."""
        kind, here = f"{OPTIMIZER}{key}", held(states, key)
        for run in piece.runs:
            home, name = self._home(piece, run), self._stored_name(piece, run)
            there, coded = self.reader.tensor(kind, name), is_coded(self.reader, kind, name)
            if there.shape != home.shape:
                found = [f"{kind} of {name!r} with shape {list(there.shape)}, not {list(home.shape)}"]
                raise misfit(self.reader, "has, of the optimizer,", found, FRESH_MOMENTS)
            if isinstance(here, Blocks) and coded and keeps_blocks(home.shard):
                end, beside = run.offset + run.numel, scale_shard(home.shard) if home.shard is not None else None
                scale = here.scale[run.offset // BLOCK : -(-end // BLOCK)]
                reads.append(Read(kind, name, run.start, here.codes.view(-1)[run.offset : end], home.shard))
                reads.append(Read(kind + SCALE, name, run.start // BLOCK, scale, beside))
            elif isinstance(here, Blocks) or coded:
                self._convert(states, key, run, Read(kind, name, run.start, torch.empty(0), home.shard), reads)
            else:
                part = here.view(-1)[run.offset : run.offset + run.numel]
                reads.append(Read(kind, name, run.start, part, home.shard))

    def _convert(self, states: dict[str, Any], key: str, run: ParameterRun, read: Read, reads: list[Read]) -> None:
        """Read what ``read`` says into memory for a while, and from there, once it has come, into the state ``key``."""
        coded = is_coded(self.reader, read.set, read.name)
        found = torch.empty(run.numel, dtype=torch.uint8 if coded else torch.float32)
        reads.append(replace(read, out=found))
        scale = scales(self.reader, read.set, read.name) if coded else None
        reads += [scale] if scale is not None else []

        def convert() -> None:
            values = found if scale is None else decoded(read.set, found, scale.out, run.start, read.shard)
            keep_state(states, key, values.to(states[key].device), run.offset)

        self._conversions.append(convert)

    def _wrapped(self, piece: OptimizerPiece, name: str, keys: list[str], reads: list[Read]) -> dict[str, Any]:
        """The states that wrap other tensors. The optimizer itself makes them, since no file says how."""
        stored = {kind for kind in keys if _is_inner(kind) and name in self.reader.places(kind)}
        stored = {kind for kind in stored if not is_scale_set(self.reader, kind, name)}
        if not stored:
            return {}
        assert self.subject.optimizer is not None
        made = new_states(self.subject.optimizer.optimizer, piece.group, piece.tensor)
        found = {}
        for key, value in made.items():
            inner = dict(inner_tensors(value)) if _is_tensor(value) else {}
            kinds = {f"{OPTIMIZER}{key}{path}": tensor for path, tensor in inner.items() if path}
            if kinds and kinds.keys() <= stored:
                found[key] = value
                for kind, tensor in kinds.items():
                    _compare_inner(self.reader, kind, name, tensor)
                    reads.append(Read(kind, name, 0, tensor.view(-1)))
                stored -= kinds.keys()
        if stored:
            what, remedy = "has, of the optimizer,", "use the settings it was saved with, or pass load_optimizer=False."
            raise misfit(self.reader, what, [f"{kind} of {name!r}" for kind in sorted(stored)], remedy)
        return found


def _set_for(reader: Reader, stored: str, dtype: torch.dtype) -> str:
    """The set with the digits of a weight in ``dtype``: that of the masters, if it is wider than the stored weights."""
    there = dtype_of(reader.tensor(MODEL, stored).dtype)
    wider = dtype.is_floating_point and there.is_floating_point and dtype.itemsize > there.itemsize
    return MASTER if wider and stored in reader.places(MASTER) else MODEL


def _range_reads(reader: Reader, kind: str, name: str, flat: torch.Tensor, ranges: Sequence[StateRange]) -> Iterable[Read]:
    """What fills ``flat``, a state of which the checkpoint stores that of the whole parameter."""
    there = reader.tensor(kind, name)
    for part in ranges:
        if there.shape != part.shape:
            found = [f"{kind} of {name!r} with shape {list(there.shape)}, not {list(part.shape)}"]
            remedy = "use the optimizer it was saved with, or pass load_optimizer=False."
            raise misfit(reader, "has, of the optimizer,", found, remedy)
        yield Read(kind, name, part.start, flat[part.offset : part.offset + part.numel], part.shard)


def _compare_inner(reader: Reader, kind: str, name: str, tensor: torch.Tensor) -> None:
    there = reader.tensor(kind, name)
    if (tuple(tensor.shape), tensor.dtype) != (there.shape, dtype_of(there.dtype)):
        raise CheckpointError(
            f"{reader.path} has {kind} of {name!r} as {there.dtype} {list(there.shape)}, and this run's optimizer "
            f"keeps {tensor.dtype} {list(tensor.shape)}. Remedy: use the settings it was saved with, such as the size "
            "of blocks, or pass load_optimizer=False."
        )


def _load_more(optimizer: torch.optim.Optimizer, more: dict[str, Any]) -> None:
    """Let the optimizer's own ``load_state_dict`` have what its ``state_dict`` added. States stay where they are."""
    if more:
        states = dict(optimizer.state)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}, **more})
        optimizer.state.update(states)


def _kept(described: dict[str, Any], group: Any) -> str:
    """The numbers among the hyperparameters of a group, in words."""
    kept = described["groups"][group] if group < len(described["groups"]) else {}
    return ", ".join(f"{key} {value:g}" for key, value in kept.items() if type(value) in (int, float))


def _is_inner(kind: str) -> bool:
    """True for the set of a tensor that is wrapped in a state, such as ``optimizer.exp_avg.codes``."""
    return "." in kind.removeprefix(OPTIMIZER)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _place_of_scalars(sharded: ShardedOptimizer | None, piece: OptimizerPiece) -> torch.device:
    """The device of scalar states: fused and capturable optimizers keep step counts on the device, others on the host."""
    assert sharded is not None
    group = sharded.optimizer.param_groups[piece.group]
    on_device = group.get("fused") or group.get("capturable") or "decoupled" in group
    return piece.tensor.device if on_device else torch.device("cpu")


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """The optimizer's name, with one name for all whose state means the same: Adam, AdamW and FusedAdam are "Adam"."""
    name = type(optimizer).__name__
    if isinstance(optimizer, Adam8bit):  # that of bitsandbytes has the same name, and other states
        return "Adam"
    return "Adam" if name in ("Adam", "AdamW", "FusedAdam") else name
