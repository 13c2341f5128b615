"""Memory copies: the newest step in the shared memory of each host and of another one, for a start after a failure.

[Note: what a copy is]
Each rank keeps its parts of what a checkpoint would have in a file of the host's shared memory, in a folder that the host's
supervisor has made (launcher/copy_keeper.py); what several ranks have, one of them keeps. It sends them to a rank of the
next host, which checks them. All ranks' parts together are loaded as a checkpoint is, at any number of ranks, and each from
whichever host has it undamaged. Of a frozen parameter there are checksums only, computed once: the script that is started
again makes it as it did before. But the script may change it, as the weights of a teacher that are averages of others', or
load it later than in initialize(): where it is another one than at the end of initialize(), it is kept as the others are.

[Note: one step at most]
The parts of step s are copied at its end, and sent behind the forward and the backward of step s + 1, whose update begins
when all ranks have said that theirs are checked. So when s + 1 is finished, s is whole on two hosts; whatever fails then,
at most one finished step is repeated. Each rank has two files, and writes the one that has not the newest whole copy.
What a start has loaded is copied anew at once: after a host was lost, the other one has the only copy of some parts.

[Note: several engines]
A job may have several engines, at a time or one after the other, and none may take the copies of another for its own. What
tells them apart for the next start is the order in which the script makes them: each has a folder of its number.

Engines that take turns in a loop have to go on from one pass of it. A pass is over when the one has stepped that made its
first step last, and none is over before all have stepped. So a record tells whether a pass was over with this step, and
which steps the other engines had then; and a copy is kept until those of the same pass are whole. A start takes such steps
that a pass was over with them. Of an engine that makes several steps in a pass nobody knows which of them ends it: then
there may be none, and a warning says that the engine goes on in the midst of a pass.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from ..distributed.device import on_gpu, pin, synchronize
from ..distributed.waits import waiting
from ..distributed.wire import decode, encode
from ..errors import CheckpointError, DamagedError
from ..launcher import copy_keeper
from ..log import is_rank_zero, logger, warn_once
from ..watch.board import NOBODY, stay_off_the_board
from ..zero.sharded_model import without_edits
from .checkpointer import Checkpointer
from .inventory import Subject, TensorPart
from .kept_parts import (
    BLOCK_BYTES,
    PartsLayout,
    PartsReader,
    PartsRecord,
    Turn,
    block_sums,
    is_good,
    make_room,
    parts_file,
    record_of,
    records_in,
    sums_of,
    write_record,
)
from .matching import Wanted
from .ranks import Problem, Ranks, attempt
from .save import Captured, as_number, frozen_sums, merge_facts, now, plan_together

_STOPPED = 100  # copies of other engines, after which one that makes none is taken for one that does not step any more
_Version = tuple[str, int]  # an epoch, which begins with a start and where the script loads something else; the step
_Found = dict[int, tuple[Path, PartsRecord]]  # by the rank that has kept it


class MemoryCopies:
    """Those of one engine. All methods but ``due`` are collective. ``place``: its folder on this host."""

    def __init__(self, subject: Subject, run: Any, place: Path, every_steps: int) -> None:
        self.checkpointer = Checkpointer(subject, run)
        self._place, self._every_steps = place, every_steps
        self._epoch, self._newest = "", 0  # this one's; the last one that is known
        self._slot, self._whole = 0, -1  # what is written now; what has the newest whole copy
        self._described: Any = None  # what the layout was made for
        self._layout = PartsLayout((), (), 0)
        self._encoded = b""
        self._places = self.checkpointer.saver.ranks.volumes(place)  # for each rank, the first one of its host
        self._memory: dict[tuple[int, int], torch.Tensor] = {}  # by slot and rank
        self._sums = _sums_by_name(self.checkpointer.inventory.frozen_weights())  # as the script has made them
        self._has_frozen = any(self.checkpointer.saver.ranks.gather(bool(self._sums)))
        self._frozen: dict[str, dict[str, Any]] = {}  # the checksums of whole ones
        self._constant: set[str] = set()  # those of which nothing else is kept
        self._thread: threading.Thread | None = None
        self._problem: Problem | None = None
        self._turn = Turn(True, {})  # of what is kept next
        _waiting[self] = next(_numbers)

    @classmethod
    def make(cls, subject: Subject, run: Any, every_steps: int) -> MemoryCopies | None:
        """Return None if they are not asked for, or if no launcher keeps them."""
        place = copy_keeper.own_folder()
        if every_steps and place is None:
            warn_once("checkpoint.in_memory has no effect: only `zerorun --max-restarts` keeps copies for another start.")
        if not every_steps or place is None:
            return None
        return cls(subject, run, copy_keeper.engine_folders.take(place), every_steps)  # see [Note: several engines]

    def due(self, global_steps: int) -> bool:
        """True if a copy is to be made after this many steps."""
        return global_steps > 0 and global_steps % self._every_steps == 0

    # -- keeping ---------------------------------------------------------------------------------------------------------

    def keep_step(self) -> None:
        """Copy what the ranks have after a step, and begin to send it."""
        self.settle()
        self._turn = _take_turn(self)
        self.keep()

    def keep(self) -> None:
        """Copy what the ranks have now, which is what they have loaded, and begin to send it."""
        self.settle()
        with without_edits(self.checkpointer.subject.model):
            captured = self.checkpointer.capture("", {}, trainable_only=True)
            captured.copy_tensors()
            changed = self._changed(captured.frozen)
        captured.parts += [part for part in captured.frozen if part.name in changed]
        captured.frozen = [part for part in captured.frozen if part.name not in changed]
        self._plan(captured)
        self._slot = 1 - self._whole if self._whole >= 0 else 0
        _, problem = attempt(lambda: self._copy(captured))
        self._thread = threading.Thread(target=self._finish, args=(captured, problem), name="zerorun memory copy")
        self._thread.start()

    def begin_anew(self) -> None:
        """Copy what the ranks have now, and forget all copies before: the script has loaded something else."""
        self.settle()
        epoch, self._epoch, self._memory, self._described = self._epoch, "", {}, None
        self._forget_others(epoch, self._whole)  # there is room for two
        self._turn = Turn(True, _steps_beside(self))
        self.keep()
        self.settle()

    def settle(self) -> None:
        """Wait until the last copy is whole. If it failed, say so: training goes on, with the copy before that."""
        if self._thread is None:
            return
        for copies in (*_turns, self):
            copies.wait()
        self._thread, problem = None, self._problem
        try:
            self.checkpointer.saver.ranks.agree(problem)
        except CheckpointError as error:
            logger.warning("no copy of this step is kept in memory: %s", error)
            return
        self._whole = self._slot
        self._forget_others(self._epoch, self._whole)

    def wait(self) -> None:
        """Wait until this rank's part in the last copy is over, whatever came of it."""
        if self._thread is not None:
            with waiting("checkpoint: a copy in memory", span=NOBODY):
                self._thread.join()

    @property
    def number(self) -> int:
        """Which engine of the job it is."""
        return int(self._place.name)

    @property
    def steps(self) -> int:
        """That its engine has made."""
        return self.checkpointer.run.counters()["global_steps"]

    def _changed(self, frozen: Iterable[TensorPart]) -> set[str]:
        """The names of frozen parameters that are other ones than at the end of initialize(), on any rank."""
        if not self._has_frozen:
            return set()
        changed = [name for name, sums in _sums_by_name(frozen).items() if not torch.equal(sums, self._sums[name])]
        return set().union(*self.checkpointer.saver.ranks.gather(changed))

    def _plan(self, captured: Captured) -> None:
        """Decide what each rank keeps, and where, if what the ranks have is not what they had before."""
        ranks, peers = self.checkpointer.saver.ranks, self.checkpointer.subject.comm.dense.peer_reader()
        described = [_shape_of(part) for part in captured.parts], captured.order
        if not any(ranks.gather(described != self._described)):
            return
        self._described = described
        self._layout = PartsLayout.of(plan_together(captured.parts, captured.order, ranks), ranks.rank)
        self._encoded = encode(self._layout)
        begun = ranks.first(lambda: as_number(now()))
        self._newest = max(begun, *(1 + newest for newest in ranks.gather(self._newest)))  # clocks of hosts differ
        self._epoch = f"{self._newest:024}"  # as many digits as a time has
        self._memory, self._whole = {}, -1
        self._constant = set().union(*ranks.gather([part.name for part in captured.frozen]))
        if not self._constant <= self._frozen.keys():
            self._frozen = frozen_sums(captured.frozen, captured.order, ranks, peers)

    def _file(self, rank: int) -> Path:
        return self._place / parts_file(self._epoch, self._slot, rank)

    def _room(self, rank: int, nbytes: int, *, pinned: bool = False) -> torch.Tensor:
        """The memory for the parts of ``rank``, whose record is gone: they are no copy while they are written."""
        path = self._file(rank)
        record_of(path).unlink(missing_ok=True)
        if (self._slot, rank) not in self._memory:
            path.unlink(missing_ok=True)
            self._place.mkdir(mode=0o700, exist_ok=True)
            made = self._memory[self._slot, rank] = make_room(path, nbytes)
            if pinned:
                pin(made)
        return self._memory[self._slot, rank]

    def _copy(self, captured: Captured) -> None:
        ranks = self.checkpointer.saver.ranks
        pinned = any(on_gpu(part.tensor) for part in captured.parts)
        memory = self._room(ranks.rank, self._layout.nbytes, pinned=pinned)
        own = {(part.set, part.name): part.tensor for part in captured.parts}
        sources, places = [], []
        for part in self._layout.parts:
            source = own[part.set, part.name][part.offset : part.offset + part.numel]
            sources.append(source)
            places.append(memory[part.begin : part.end].view(source.dtype))
        if places:
            torch._foreach_copy_(places, sources)
        for device in {source.device for source in sources}:
            synchronize(device)

    def _finish(self, captured: Captured, problem: Problem | None) -> None:
        """In the thread: check, send, and receive what another rank sends."""
        stay_off_the_board()
        ranks = self.checkpointer.saver.ranks
        own: tuple[bytes, torch.Tensor] | None = None
        if problem is None:
            own, problem = attempt(lambda: self._checked(captured))
        other, late = attempt(lambda: self._exchange(own))
        problem = problem or other or late
        if own is not None:
            _, late = attempt(lambda: self._take(ranks.rank, own[0]))
        self._problem = problem or late

    def _exchange(self, own: tuple[bytes, torch.Tensor] | None) -> Problem | None:
        try:
            return exchange(self.checkpointer.saver.ranks, partners(self._places), own, self._room, self._take)
        except CheckpointError:
            raise
        except RuntimeError as error:
            raise CheckpointError(f"another rank ended, or gave up, while a copy was sent ({error}).") from error

    def _checked(self, captured: Captured) -> tuple[bytes, torch.Tensor]:
        """(the encoded record of this rank's parts, the parts)."""
        self.checkpointer.check_point("write")
        ranks, memory = self.checkpointer.saver.ranks, self._memory[self._slot, self.checkpointer.saver.ranks.rank]
        captured.manifest.frozen_base = {name: self._frozen[name] for name in sorted(self._constant)} or None
        step, facts = captured.manifest.global_steps, captured.facts(ranks)
        who = step, self._epoch, self._slot, ranks.rank, ranks.size
        what = memory.numel(), block_sums(memory), self._encoded, facts, self._turn
        return encode(PartsRecord(*who, *what)), memory

    def _take(self, rank: int, record: bytes) -> None:
        self.checkpointer.check_point("record")
        write_record(self._file(rank), record)

    def _forget_others(self, epoch: str, slot: int) -> None:
        """Delete all copies on this host but one. The files of this start stay, and are written again."""
        if self._places[self.checkpointer.saver.ranks.rank] != self.checkpointer.saver.ranks.rank:
            return  # the first rank of the host does it
        for path in self._place.glob("*.*.*.*"):
            of_epoch, of_slot, *_, kind = path.name.split(".")
            again = of_epoch == self._epoch and kind != "record"
            if of_epoch != epoch or not (of_slot == str(slot) or again):
                path.unlink(missing_ok=True)

    # -- loading ---------------------------------------------------------------------------------------------------------

    def load(self, wanted: Wanted, steps: int, saved_at: str) -> Path | None:
        """Load the newest copy that is whole, and newer than a checkpoint of ``steps`` that was ``saved_at``; else None.

        It has as many steps, or the script has loaded something else since: then the checkpoint is of steps given up.
        """
        ranks = self.checkpointer.saver.ranks
        here = _found_in(self._place)
        self._newest = max(self._newest, *(int(epoch) for epoch, _ in here), 0)
        self.checkpointer.subject.model.make_ready()  # otherwise they would change what is loaded
        whole = _complete(ranks, here)
        ends = self._ends_of_passes(ranks, whole)
        at_ends, in_midst = ([v for v in whole if (v[1] in ends) == is_end] for is_end in (True, False))
        for versions, later in ((at_ends, in_midst), (in_midst, [])):
            for version in versions:
                epoch, step = version
                if max([step, *(reached for _, reached in later)]) < steps and int(epoch) < as_number(saved_at):
                    break  # the checkpoint is newer than these, and than all that is later in the same pass
                found = here.get(version, {})
                try:
                    reader = self._open(ranks, found)
                    self.checkpointer.restore(reader, wanted)
                except DamagedError as error:
                    if is_rank_zero():
                        logger.warning("the copy of step %d in memory is not whole: %s", step, error)
                    continue
                self._forget_others(epoch, next((record.slot for _, record in found.values()), -1))
                self._go_on(step, whole[version], in_midst=step not in ends)
                return reader.path
        return None

    def _ends_of_passes(self, ranks: Ranks, whole: Mapping[_Version, Turn]) -> set[int]:
        """The steps with which a pass was over, see [Note: several engines], as far as they fit what has gone on."""
        gone_on = copy_keeper.engine_folders.gone_on
        found = {
            step
            for (_, step), turn in whole.items()
            if turn.ends_pass and all(turn.beside.get(number, steps) == steps for number, steps in gone_on.items())
        }
        numbers = [int(path.name) for path in self._place.parent.glob("*") if path.name.isdecimal()]
        for other in sorted(set().union(*ranks.gather(numbers)) - {self.number}):
            for (_, step), turn in _complete(ranks, _found_in(self._place.parent / str(other))).items():
                if turn.ends_pass and self.number in turn.beside and gone_on.get(other, step) == step:
                    found.add(turn.beside[self.number])
        return found

    def _go_on(self, step: int, turn: Turn, *, in_midst: bool) -> None:
        self._turn = turn
        copy_keeper.engine_folders.note(self.number, step)
        if in_midst and is_rank_zero():
            logger.warning(
                "checkpoint.in_memory: engine %d of this job goes on from step %d, in the midst of a pass of a loop that "
                "steps several engines: the others may go on from another one. Remedy, if they should not: let each engine "
                "make one step in a pass, or save all of them at its end with save_checkpoint(), and load these.",
                self.number,
                step,
            )

    def _open(self, ranks: Ranks, here: _Found) -> PartsReader:
        """Open one copy, of which this host has ``here``. Each of its files is checked by one rank of the host."""
        places = self._places
        near = [rank for rank, place in enumerate(places) if place == places[ranks.rank]]
        mine = sorted(here)[near.index(ranks.rank) :: len(near)]
        good = ranks.gather([rank for rank in mine if is_good(*here[rank])])
        bad = [rank for rank in mine if rank not in good[ranks.rank]]
        if bad:
            logger.warning("parts of ranks %s in %s are damaged; those on another host are looked for.", bad, self._place)
        providers: dict[int, int] = {}  # rank that has kept -> first rank of the first host that has it undamaged
        around: set[int] = set()
        for rank, found in enumerate(good):
            for kept in found:
                providers[kept] = min(places[rank], providers.get(kept, places[rank]))
                around |= {kept} if rank in near else set()
        told = ranks.gather({kept: here[kept][1] for kept, rank in providers.items() if rank == ranks.rank})
        records = {kept: record for found in told for kept, record in found.items()}
        world = max(record.world for record in records.values()) if records else 0
        lost = [kept for kept in range(max(world, 1)) if kept not in records]
        if lost:
            raise DamagedError(f"no host has undamaged parts of ranks {lost}.")
        facts = merge_facts(records[kept].facts for kept in sorted(records))
        missing = {records[kept].file: rank for kept, rank in providers.items() if kept not in around}
        by_file = {record.file: record for record in records.values()}
        return PartsReader(self._place, facts, missing, by_file)

    def close(self) -> None:
        """Wait for the last copy, and release the process group."""
        self.settle()
        _turns.pop(self, None)
        _waiting.pop(self, None)
        self.checkpointer.close()


def _sums_by_name(parts: Iterable[TensorPart]) -> dict[str, torch.Tensor]:
    """By the name of a parameter, the checksums of the part of it."""
    return {part.name: sums_of(part.tensor).cpu() for part in parts}


def _shape_of(part: TensorPart) -> tuple[Any, ...]:
    """All of a part but its values."""
    return part.set, part.name, part.start, part.tensor.numel(), part.tensor.dtype, part.shape, part.shard, part.rounded


def _found_in(place: Path) -> dict[_Version, _Found]:
    """What this host has in ``place``."""
    here: dict[_Version, _Found] = {}
    for path, record in attempt(lambda: list(records_in(place)))[0] or []:
        here.setdefault(record.version, {})[record.rank] = path, record
    return here


def _complete(ranks: Ranks, here: dict[_Version, _Found]) -> dict[_Version, Turn]:
    """The versions of which the hosts together have the files of all ranks, the newest first."""
    kept: dict[_Version, set[int]] = {}
    told: dict[_Version, tuple[int, Turn]] = {}
    records = {version: next(iter(files.values()))[1] for version, files in here.items()}
    for found in ranks.gather([(v, list(files), (records[v].world, records[v].turn)) for v, files in here.items()]):
        for version, members, what in found:
            kept.setdefault(version, set()).update(members)
            told[version] = what
    whole = [version for version, members in kept.items() if members == set(range(told[version][0]))]
    return {version: told[version][1] for version in sorted(whole, reverse=True)}


# -- engines that take turns -----------------------------------------------------------------------------------------------

_turns: WeakKeyDictionary[MemoryCopies, int] = WeakKeyDictionary()  # in the order of their first steps: the last turn
_waiting: WeakKeyDictionary[MemoryCopies, int] = WeakKeyDictionary()  # those of engines that have not stepped: since when
_several: WeakSet[MemoryCopies] = WeakSet()  # those of engines that step more than once in a pass
_numbers = itertools.count()


def _take_turn(copies: MemoryCopies) -> Turn:
    """See [Note: several engines]. ``copies`` are those of an engine that has stepped."""
    now, before = next(_numbers), _turns.get(copies)
    _turns[copies] = now
    _waiting.pop(copies, None)
    for others in (_turns, _waiting):
        for other, last in list(others.items()):
            if now - last > _STOPPED:
                del others[other]
    if len(_turns) == 1:
        _several.discard(copies)
    elif before == now - 1:
        _several.add(copies)
    ends_pass = [*_turns][-1] is copies and copies not in _several and not _waiting
    return Turn(ends_pass, _steps_beside(copies))


def _steps_beside(copies: MemoryCopies) -> dict[int, int]:
    """By its number, the steps of each other engine that takes turns with this one, or will."""
    return {other.number: other.steps for other in (*_turns, *_waiting) if other is not copies}


_CHUNK = 128 * BLOCK_BYTES  # bytes of a message


def partners(places: Sequence[int]) -> list[int]:
    """Return for each rank the one on the next host that takes its parts; the rank itself if there is but one host.

    ``places``: for each rank, the first rank of its host.
    """
    hosts: dict[int, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place, []).append(rank)
    order = list(hosts)
    if len(order) == 1:
        return list(range(len(places)))
    following = {place: hosts[order[(index + 1) % len(order)]] for index, place in enumerate(order)}
    return [following[place][hosts[place].index(rank) % len(following[place])] for rank, place in enumerate(places)]


def exchange(
    ranks: Ranks,
    to: Sequence[int],
    own: tuple[bytes, torch.Tensor] | None,
    room: Callable[[int, int], torch.Tensor],
    take: Callable[[int, bytes], object],
) -> Problem | None:
    """Send ``own``, a record and the parts that it is of, to this rank's partner, and receive what comes. Collective.

    ``own``: None if there is nothing, because something went wrong. ``room(rank, nbytes)`` returns memory for the parts of
    a rank; ``take(rank, record)`` is called when they have come and are checked. Return what went wrong here: no rank waits
    for this one then, whatever it was.
    """
    sends = []
    if to[ranks.rank] != ranks.rank:
        record, memory = own or (b"", torch.empty(0, dtype=torch.uint8))
        head = torch.tensor([len(record), memory.numel()])
        messages = [head, *([torch.frombuffer(bytearray(record), dtype=torch.uint8)] if record else [])]
        messages += memory.split(_CHUNK) if memory.numel() else []
        sends = [ranks.send(message, to[ranks.rank], number) for number, message in enumerate(messages)]
    problem: Problem | None = None
    for rank, partner in enumerate(to):
        if partner == ranks.rank != rank:
            problem = _receive(ranks, rank, room, take) or problem
    for send in sends:
        send.wait()
    return problem


def _receive(
    ranks: Ranks, rank: int, room: Callable[[int, int], torch.Tensor], take: Callable[[int, bytes], object]
) -> Problem | None:
    """Take what ``rank`` sends. It goes on after a problem, which it returns: the sender waits for that."""
    head = torch.empty(2, dtype=torch.int64)
    ranks.receive(head, rank, 0)
    size, nbytes = head.tolist()
    if size == 0:
        return None  # it tells all ranks itself
    content = torch.empty(size, dtype=torch.uint8)
    ranks.receive(content, rank, 1)
    memory, problem = attempt(lambda: room(rank, nbytes))
    sums = [torch.empty(0, dtype=torch.int64)]
    for number, begin in enumerate(range(0, nbytes, _CHUNK)):
        length = min(_CHUNK, nbytes - begin)
        part = torch.empty(length, dtype=torch.uint8) if memory is None else memory[begin : begin + length]
        ranks.receive(part, rank, 2 + number)
        sums.append(block_sums(part))

    def check_and_take() -> None:
        record = bytes(content.numpy())
        if not torch.equal(torch.cat(sums), decode(record).sums):
            raise DamagedError(f"the parts of rank {rank} have come with other checksums than they were sent with.")
        take(rank, record)

    return problem or attempt(check_and_take)[1]
