"""Load, check, resolve and print a configuration. Needs no torch and touches no device.

    python -m zerorun.config ds.json --world-size 64

prints the resolved configuration, or every problem with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from zerorun.config.batch import resolve_batch
from zerorun.config.degrees import degrees_for_experts, divisors
from zerorun.config.fields import ConfigNote, EffectiveValue
from zerorun.config.params import CheckedParams, find_kind
from zerorun.config.reader import AUTO, ConfigReader
from zerorun.config.rules import collect_notes, context_sizes, find_contradictions, tensor_sizes, written_in_vain
from zerorun.config.schema import Config, Optimizer, Provenance, Scheduler, ZeroOptimization, flatten
from zerorun.config.source import read_source
from zerorun.errors import ConfigError, ConfigProblem
from zerorun.log import open_standard_streams, print_lines

__all__ = [
    "Config",
    "ConfigNote",
    "EffectiveValue",
    "ModelFacts",
    "Optimizer",
    "Scheduler",
    "ZeroOptimization",
    "load_config",
    "main",
    "resolve",
]

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_ACCUMULATION = "gradient_accumulation_steps"
_ZERO = "zero_optimization."
_NO_OPTIMIZER = "there is no optimizer section, and no optimizer was passed to initialize."

_OPTIMIZER = "or pass optimizer= to initialize(). The command python -m zerorun.config takes {}."
_SCHEDULE = "or pass lr_scheduler= to initialize(). The command python -m zerorun.config takes {}."
# Dotted key -> what to do, for each "auto" that only the caller can decide.
_UNDECIDABLE = {
    "optimizer.params.lr": f"Write a number, {_OPTIMIZER.format('--lr')}",
    "optimizer.params.weight_decay": f"Write a number, {_OPTIMIZER.format('--weight-decay')}",
    "scheduler.params.total_num_steps": f"Write the number of optimizer steps, {_SCHEDULE.format('--total-steps')}",
    "scheduler.params.warmup_max_lr": f"Write a number, {_SCHEDULE.format('--lr')}",
    "zero_optimization.stage": "Write 0, 1, 2 or 3.",
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model. ``hidden_size``: width of its residual stream, in elements, for "auto".

    ``pipelined``: it is made for a pipeline, and follows a pipeline schedule even with one stage.
    """

    hidden_size: int | None = None
    pipelined: bool = False


def load_config(
    source: object,
    *,
    optimizer_given: bool = False,
    scheduler_given: bool = False,
    world_size: int | None = None,
    micro_batch_hint: int | None = None,
) -> Config:
    """Return the checked configuration from a path, a dict (copied) or base64 text. Values may still be "auto".

    Raises only :class:`ConfigError`, with all problems at once; with ``world_size`` (ranks), these include problems with
    the batch sizes. A Config is returned as it is. If the caller passes an optimizer or a schedule, problems in the section
    that it replaces do not count, unless it cannot be read at all: it may name a type that only the caller's program knows.
    ``micro_batch_hint``: as for ``resolve``.
    """
    if isinstance(source, Config):
        return source
    raw, name = read_source(source)
    reader = ConfigReader()
    config = reader.build(Config, raw)
    written = dict.fromkeys(flatten(config.model_dump(by_alias=True, exclude_unset=True)), "file")
    sources = written | dict.fromkeys(reader.auto, "auto")
    config = config.stating(Provenance(name, sources, off=tuple(reader.notes)))
    # A section that is not used is not checked, only noted. A section that cannot be read cannot be noted, so its problems
    # stay.
    given = {"optimizer": optimizer_given, "scheduler": scheduler_given}
    unused = tuple(
        f"{section}." for section, is_given in given.items() if is_given and getattr(config, section) is not None
    )
    found = [*reader.problems, *find_contradictions(config, reader.params)]
    problems = [problem for problem in found if not problem.key.startswith(unused)]
    if problems and world_size is not None:
        problems += _batch_problems(config, {problem.key for problem in problems}, world_size, micro_batch_hint)
    _raise(problems, name)
    values = _shard_values(config, raw) | _tensor_size(config) | _context_size(config)
    return _with(config, values, dict.fromkeys(sources, "file"), tuple(reader.auto))


def check_keywords(section: str, name: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return what a program gives for ``params`` of ``section``, type ``name``. Raises ConfigError as for a file."""
    reader = ConfigReader()
    given = reader.keywords(f"{section}.", name, params)
    unresolved = [ConfigProblem(key, AUTO, "'auto' is resolved in files alone.", "Give a value.") for key in reader.auto]
    _raise([*reader.problems, *unresolved], f"{name}()")
    return given


def _batch_problems(config: Config, wrong: set[str], world_size: int, hint: int | None) -> list[ConfigProblem]:
    """Return the problems that ``resolve`` would find in the batch sizes; none if they depend on a ``wrong`` key."""
    sizes = _tensor_size(config) | _context_size(config)
    follows = {_TRAIN, _MICRO, _ACCUMULATION, "pipeline", "pipeline.stages", *tensor_sizes(config), *context_sizes(config)}
    if wrong & follows or any(key.startswith(("tensor_parallel", "context_parallel")) for key in wrong):
        return []
    work = _Resolution(config, {key for key, source in config.sources.items() if source == "auto"})
    try:
        work.batch(data_parallel_degree(with_values(config, sizes), world_size), hint)
    except ConfigError as error:
        return error.problems
    return work.problems


def _tensor_size(config: Config) -> dict[str, Any]:
    """Return the tensor-parallel degree, for which DeepSpeed has three more keys."""
    size = max(tensor_sizes(config).values())
    return {"tensor_parallel.size": size} if size > 1 else {}


def _context_size(config: Config) -> dict[str, Any]:
    """Return the number of ranks that divide a sequence, for which there are two keys."""
    size = max(context_sizes(config).values())
    return {"sequence_parallel_size": size} if size > 1 else {}


def data_parallel_degree(config: Config, world_size: int) -> int:
    """Return the number of ranks with different data: ``world_size`` over the degrees of all other axes.

    Raises ConfigError if the degrees do not divide ``world_size``.
    """
    degrees = {
        "tensor_parallel.size": (config.tensor_parallel.size, "tensor ranks"),
        "pipeline.stages": (config.pipeline.stages, "pipeline stages"),
        "sequence_parallel_size": (config.sequence_parallel_size or 1, "ranks for each sequence"),
    }
    wide = {key: degree for key, degree in degrees.items() if degree[0] > 1}
    product = prod(size for size, _ in wide.values())
    if world_size % product:
        key = next(key for key in ("pipeline.stages", *wide) if key in wide)
        reason = f"{world_size} ranks are no multiple of {' x '.join(f'{size} {what}' for size, what in wide.values())}."
        remedy = (
            f"Start a multiple of {product} ranks, or lower {'the degree' if len(wide) == 1 else 'one of the degrees'}."
        )
        raise ConfigError([ConfigProblem(key, wide[key][0], reason, remedy)], config.provenance.file)
    return world_size // product


def _shard_values(config: Config, raw: dict[str, Any]) -> dict[str, Any]:
    """Return the values for HYBRID_SHARD and MiCS: both shard within groups of ranks."""
    zero = config.zero_optimization
    written = raw["zero_optimization"].get("stage") if isinstance(raw.get("zero_optimization"), dict) else None
    values: dict[str, Any] = {}
    if isinstance(written, str) and written.upper() == "HYBRID_SHARD":
        values[_ZERO + "hybrid_shard"] = True
    if zero.mics_shard_size > 1 and zero.stage == 3:
        values |= {_ZERO + "hybrid_shard": True, _ZERO + "shard_degree": zero.mics_shard_size}
    return values


def _any(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _raise(problems: list[ConfigProblem], source: str) -> None:
    """Raise ConfigError if there are problems. It lists one for each key and reason, in order."""
    if problems:
        raise ConfigError(list({(problem.key, problem.reason): problem for problem in problems}.values()), source)


def _with(
    config: Config,
    values: dict[str, Any],
    sources: dict[str, str],
    auto: tuple[str, ...],
    notes: Iterable[ConfigNote] = (),
) -> Config:
    """Return a copy with ``values`` (dotted key -> value). Their source is "derived" unless ``sources`` names another."""
    content = config.model_dump(by_alias=True, exclude_unset=True)
    for key, value in values.items():
        *parents, name = key.split(".")
        section = content
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    result = Config.model_validate(content)
    every_key = flatten(result.model_dump(by_alias=True))
    known = {**dict.fromkeys(every_key, "default"), **dict.fromkeys(values, "derived"), **sources}
    provenance = replace(config.provenance, sources=known, auto=auto)
    told = collect_notes(result.stating(provenance))
    return result.stating(replace(provenance, notes=(*told, *provenance.off, *notes)))


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return a copy with other ``values`` (dotted key -> value), or ``config`` itself if nothing changes."""
    changed = {key: value for key, value in values.items() if value != flatten(config.as_dict()).get(key)}
    kept = {key: source for key, source in config.sources.items() if source != "default" and key not in changed}
    return _with(config, changed, kept, config.auto) if changed else config


def resolve(
    config: Config,
    *,
    data_parallel_size: int,
    model_facts: ModelFacts | None = None,
    micro_batch_hint: int | None = None,
    optimizer_given: bool = False,
    scheduler_given: bool = False,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    total_num_steps: int | None = None,
    bf16_available: bool = True,
) -> Config:
    """Return a configuration in which nothing is "auto" and the batch sizes are numbers.

    ``data_parallel_size`` counts ranks that see different data. ``micro_batch_hint`` is the batch size of the caller's
    data. With ``optimizer_given`` the optimizer section is not used; ``learning_rate`` should then be that optimizer's.
    With ``scheduler_given`` the scheduler section is not used. Raises ConfigError with all problems at once.
    """
    work = _Resolution(config, set(config.auto))
    work.batch(data_parallel_size, micro_batch_hint)
    work.precision(bf16_available)
    facts = model_facts or ModelFacts()
    work.sizes(facts.hidden_size)
    work.pipeline(facts.pipelined)
    work.data(facts.pipelined)
    work.ranks(data_parallel_size)
    work.optimizer(optimizer_given, learning_rate, weight_decay)
    work.scheduler(scheduler_given, optimizer_given, learning_rate, total_num_steps)
    undecidable = _required_keywords(config) | _UNDECIDABLE
    work.problems += [
        ConfigProblem(key, AUTO, "cannot be decided from what is known.", undecidable[key])
        for key in sorted(work.open & undecidable.keys())
    ]
    _raise(work.problems, config.provenance.file)
    kept = {key: source for key, source in config.sources.items() if source != "default"}
    sources = {**kept, **dict.fromkeys(work.values, "derived"), **dict.fromkeys(config.auto, "auto")}
    return _with(config, work.values, sources, (), work.notes)


def _required_keywords(config: Config) -> dict[str, str]:
    """Return dotted key -> what to do if it says "auto", for the keywords that optimizer and schedule require."""
    found: dict[str, str] = {}
    for section, given in (("optimizer", config.optimizer), ("scheduler", config.scheduler)):
        kind = find_kind(section, given.type) if given is not None else None
        if kind is not None and issubclass(kind.params, CheckedParams):
            instead = "lr_scheduler=" if section == "scheduler" else "optimizer="
            remedy = f"Write a value, or pass {instead} to initialize()."
            found |= dict.fromkeys((f"{section}.params.{word}" for word in kind.params.required), remedy)
    return found


@dataclass
class _Resolution:
    """The values that replace "auto", and what is wrong. Each method decides one group of keys."""

    config: Config
    open: set[str]  # keys that say "auto" and are not decided yet; those left at the end keep their defaults
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)
    notes: list[ConfigNote] = field(default_factory=list)

    def decide(self, key: str, value: Any) -> None:
        """Give ``key`` its value if it says "auto" and the value is known."""
        if key in self.open and value is not None:
            self.open.remove(key)
            self.values[key] = value

    def batch(self, ranks: int, hint: int | None) -> None:
        train, micro, accumulation = (getattr(self.config, key) or None for key in (_TRAIN, _MICRO, _ACCUMULATION))
        # If the file leaves the micro-batch size to be derived from the other two, the data loader's does not override it.
        if micro is None and (train is None or _MICRO in self.open):
            micro = hint
        origins = {key: self.config.sources.get(key, "given") for key in (_TRAIN, _MICRO, _ACCUMULATION)}
        origins.update(dict.fromkeys(self.open & origins.keys(), AUTO))
        if hint is not None and micro == hint and origins[_MICRO] in ("default", "file", AUTO) and not self._has_micro():
            origins[_MICRO] = "batch size of the data"
        origins["data_parallel_size"] = "ranks"
        try:
            batch = resolve_batch(train, micro, accumulation, ranks, origins)
        except ConfigError as error:
            self.problems += error.problems
            return
        for key, value in ((_TRAIN, batch.train), (_MICRO, batch.micro), (_ACCUMULATION, batch.accumulation)):
            if getattr(self.config, key) != value:
                self.values[key] = value

    def _has_micro(self) -> bool:
        return bool(self.config.train_micro_batch_size_per_gpu)

    def precision(self, bf16_available: bool) -> None:
        """Choose bf16 if the device has it, else fp32. Never choose fp16, which needs a loss scale and may diverge."""
        config, asked = self.config, "fp16.enabled" in self.open
        free = not config.fp16.enabled and not config.torch_autocast.enabled
        self.decide("fp16.enabled", False)
        if "bf16.enabled" in self.open:
            self.decide("bf16.enabled", bf16_available and free)
            if bf16_available and free:
                self.notes.append(
                    ConfigNote("bf16.enabled", "auto chose bf16, which the device has; write false for fp32.")
                )
        elif asked and free and bf16_available and config.sources.get("bf16.enabled") == "default":
            self.values["bf16.enabled"] = True
            self.notes.append(ConfigNote("fp16.enabled", "auto chose bf16; write true for fp16."))
        if not bf16_available:
            for key, used in (
                ("bf16.enabled", config.bf16.enabled),
                ("torch_autocast.dtype", config.torch_autocast.enabled and config.torch_autocast.dtype == "bf16"),
            ):
                if used:
                    reason, remedy = "this device has no bf16.", "Use fp16, or set enabled to false for fp32."
                    self.problems.append(ConfigProblem(key, True, reason, remedy))
        self._param_dtype()

    def _param_dtype(self) -> None:
        wanted = self.config.data_types.param_dtype
        bf16 = self.values.get("bf16.enabled", self.config.bf16.enabled)
        actual = "fp16" if self.config.fp16.enabled else "bf16" if bf16 else "fp32"
        if wanted not in (None, actual):
            reason, remedy = f"fp16 and bf16 make the parameters {actual}.", "Remove the key."
            self.problems.append(ConfigProblem("data_types.param_dtype", wanted, reason, remedy))

    def sizes(self, hidden: int | None) -> None:
        """Decide sizes, in elements: those of one square weight of the model, and of a few layers' small parameters."""
        if hidden is None:
            return
        self.decide(_ZERO + "reduce_bucket_size", hidden * hidden)
        self.decide(_ZERO + "stage3_prefetch_bucket_size", hidden * hidden * 9 // 10)
        self.decide(_ZERO + "stage3_param_persistence_threshold", 10 * hidden)

    def pipeline(self, pipelined: bool) -> None:
        if pipelined or self.config.pipeline.stages > 1:
            return
        reason = "with one stage, only a PipelineModule reads it."
        keys = written_in_vain(self.config, "pipeline", ("schedule", "activation_checkpoint_interval"))
        self.notes += [ConfigNote(key, reason) for key in keys]

    def data(self, pipelined: bool) -> None:
        """Decide shuffling. Pipelines read data in its own order by default, as scripts for DeepSpeed expect."""
        in_stages = pipelined or self.config.pipeline.stages > 1
        self.decide("dataloader.shuffle", not in_stages)
        if in_stages and self.config.sources.get("dataloader.shuffle", "default") == "default":
            self.values["dataloader.shuffle"] = False

    def ranks(self, ranks: int) -> None:
        wanted, degree = self.config.data_parallel_size, self.config.zero_optimization.shard_degree
        context = self.config.sequence_parallel_size or 1
        if wanted not in (None, ranks):
            reason = f"there are {ranks} data-parallel ranks."
            self.problems.append(ConfigProblem("data_parallel_size", wanted, reason, "Remove the key."))
        if ranks < 1:
            return
        ranks *= context  # which have states of their own
        if degree is not None and ranks % degree:
            reason, remedy = f"must divide the {ranks} data-parallel ranks.", f"Use one of {_any(divisors(ranks))}."
            self.problems.append(ConfigProblem(_ZERO + "shard_degree", degree, reason, remedy))
            return
        if degree is not None and not self.config.zero_optimization.hybrid_shard and degree < ranks:
            self.values[_ZERO + "hybrid_shard"] = True
        if degree is not None or not self.config.zero_optimization.hybrid_shard:  # else the ranks of a node shard
            self.problems += [*self._second_copy(degree or ranks), *self._experts(ranks, degree or ranks)]

    def _second_copy(self, shard: int) -> Iterator[ConfigProblem]:
        zero = self.config.zero_optimization
        if zero.stage == 3 and shard > 1 and shard % zero.zero_hpz_partition_size:
            reason = f"must divide the {shard} ranks that divide the states."
            remedy = f"Set it to the number of these ranks on a node, one of {_any(divisors(shard))}."
            yield ConfigProblem(_ZERO + "zero_hpz_partition_size", zero.zero_hpz_partition_size, reason, remedy)

    def _experts(self, data: int, shard: int) -> Iterator[ConfigProblem]:
        expert, tensor = self.config.expert_parallel.size, self.config.tensor_parallel.size
        fitting = degrees_for_experts(data, shard, tensor)
        if expert not in fitting and data > 1:  # one rank is what a file is checked for where nobody says how many
            reason = f"groups of that many do not fit the {data} data-parallel ranks, {shard} of which divide the states."
            remedy = f"Use one of {_any(fitting)}."
            yield ConfigProblem("expert_parallel.autoep_size", expert, reason, remedy)

    def optimizer(self, given: bool, learning_rate: float | None, weight_decay: float | None) -> None:
        if given:
            self.open -= {key for key in self.open if key.startswith("optimizer.")}
            if self.config.optimizer is not None:
                reason = "not used: an optimizer was passed to initialize, and that one counts."
                self.notes.append(ConfigNote("optimizer", reason))
            return
        self.decide("optimizer.params.lr", learning_rate)
        self.decide("optimizer.params.weight_decay", weight_decay)

    def scheduler(self, given: bool, optimizer_given: bool, learning_rate: float | None, total: int | None) -> None:
        if given:
            self.open -= {key for key in self.open if key.startswith("scheduler.")}
        if self.config.scheduler is not None and (given or not (optimizer_given or self.config.optimizer)):
            reason = "a schedule was passed to initialize, and that one counts." if given else _NO_OPTIMIZER
            self.notes.append(ConfigNote("scheduler", f"not used: {reason}"))
        if given:
            return
        self.decide("scheduler.params.warmup_min_lr", 0.0)
        if "scheduler.params.warmup_num_steps" in self.open:
            self.decide("scheduler.params.warmup_num_steps", 0)
            self.notes.append(ConfigNote("scheduler.params.warmup_num_steps", "auto means no warm-up."))
        self.decide("scheduler.params.total_num_steps", total)
        optimizer = None if optimizer_given else self.config.optimizer
        own = optimizer.params.get("lr") if optimizer is not None else None
        self.decide("scheduler.params.warmup_max_lr", learning_rate if own is None else own)
        scheduler = self.config.scheduler
        follows = scheduler is not None and scheduler.type.lower() == "warmuplr"
        # WarmupLR without a highest lr takes the optimizer's own. And a missing learning rate is reported only once.
        if follows or "optimizer.params.lr" in self.open:
            self.open.discard("scheduler.params.warmup_max_lr")


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns 0, or 2 if the configuration cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m zerorun.config", description="Check and print a configuration.")
    parser.add_argument("source", nargs="?", help="path of the JSON file, or base64 text")
    parser.add_argument(
        "--keys", nargs="?", const="", metavar="WORD", help="print all keys that a file can have, or those with WORD"
    )
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks (default 1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--micro-batch", type=int, help="samples per rank, where the file says auto or nothing")
    parser.add_argument("--lr", type=float, help="learning rate, where the file says auto")
    parser.add_argument("--weight-decay", type=float, help="weight decay, where the file says auto")
    parser.add_argument("--total-steps", type=int, help="optimizer steps in all, where the file says auto")
    parser.add_argument("--hidden-size", type=int, help="hidden size of the model, for bucket sizes that say auto")
    parser.add_argument("--no-bf16", action="store_true", help="the device has no bf16")
    options = parser.parse_args(arguments)
    if options.keys is not None:
        return _print_keys(options.keys)
    if options.source is None:
        parser.error("which configuration? Remedy: give the path of a JSON file, or --keys")
    if options.world_size < 1:
        parser.error(f"--world-size {options.world_size}: a job has at least one rank")
    try:
        loaded = load_config(options.source, world_size=options.world_size, micro_batch_hint=options.micro_batch)
        config = resolve(
            loaded,
            data_parallel_size=data_parallel_degree(loaded, options.world_size),
            model_facts=ModelFacts(options.hidden_size),
            micro_batch_hint=options.micro_batch,
            learning_rate=options.lr,
            weight_decay=options.weight_decay,
            total_num_steps=options.total_steps,
            bf16_available=not options.no_bf16,
        )
    except ConfigError as error:
        problems = [{**problem._asdict(), "value": repr(problem.value)} for problem in error.problems]
        _print(json.dumps({"errors": problems}, indent=2) if options.json else str(error))
        return 2
    _print(json.dumps(_report(config), indent=2) if options.json else config.describe())
    return 0


def _print_keys(word: str) -> int:
    from zerorun.config.keys import keys_with  # it reads source code, which nothing else does

    found = keys_with(word)
    if not found:
        told = f"no key has {word!r} in its name. Keywords of optimizers and schedules are those of torch and DeepSpeed."
        print(f"python -m zerorun.config: {told}", file=sys.stderr)
        return 2
    print_lines("\n\n".join(found).splitlines())
    return 0


def _report(config: Config) -> dict[str, Any]:
    return {
        "config": config.as_dict(),
        "fingerprint": config.fingerprint(),
        "sources": config.sources,
        "notes": [dataclasses.asdict(note) for note in config.notes],
    }


def _print(text: str) -> None:
    """Print ``text`` so that any terminal can show it: a configuration may contain half a surrogate pair."""
    open_standard_streams()
    encoding = sys.stdout.encoding or "utf-8"
    print_lines(text.encode(encoding, "backslashreplace").decode(encoding).splitlines())
