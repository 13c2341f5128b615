"""From plain data to checked models: known keys at every level, old spellings, "auto", and problems instead of errors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from zerorun.config.fields import NOT_ENABLED, ConfigNote, Feature, Section, quoted_words, section_of
from zerorun.config.params import CheckedParams, find_kind
from zerorun.config.schema import Config, Optimizer, Scheduler
from zerorun.errors import ConfigProblem, did_you_mean, in_json

AUTO = "auto"
_LEFT_OFF = '"auto" leaves it off.'
_S = TypeVar("_S", bound=Section)

# Keys that occur in real configurations, that no section knows, and whose purpose is plain.
_KNOWN_MISTAKES = {
    "comms_config": 'DeepSpeed reads it as "comms_logger" only; remove it, and use engine.communication_report().',
    "monitor_config": 'DeepSpeed reads "tensorboard", "wandb", "csv_monitor" and "comet" at the top level instead.',
    "zero_optimization.aio": 'Move "aio" to the top level.',
    "optimizer.params.learning_rate": 'Did you mean "lr"?',
    "dataloader.pin_memory": "Remove it: this loader does not pin. For pinned batches, make a DataLoader with "
    "pin_memory=True, and call engine.set_dataloader().",
    "allgather_size": 'Use "allgather_bucket_size" inside "zero_optimization".',
}

# Keys that occur in real configurations, that no section knows, and that DeepSpeed has never read, so that nothing can
# depend on them.
_NEVER_READ = {
    "log": "DeepSpeed does not read it either; steps_per_print, for one, belongs to the top level.",
    "cuda_visible_devices": "DeepSpeed does not read it either; the launcher or CUDA_VISIBLE_DEVICES chooses devices.",
}


def is_comment(key: str) -> bool:
    """True for keys that people use for remarks, or to switch an entry off."""
    return key.startswith(("_", "//")) or key == "comment"


class ConfigReader:
    """One pass over a configuration, which collects problems, notes and the dotted keys that say "auto"."""

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.auto: list[str] = []
        self.params: list[tuple[str, Section]] = []  # checked keywords of optimizer and scheduler, for the rules
        self.notes: list[ConfigNote] = []  # on keys and sections that no model holds
        self.invalid: set[str] = set()  # keys with a problem of their own, so that no rule blames them again

    def build(self, model: type[_S], raw: dict[str, Any], path: str = "") -> _S:
        """Build the model from ``raw``. Invalid entries become problems and are left out, so that the rest is checked."""
        return self._validate(model, self._clean(model, raw, path), path)

    def _add(self, key: str, value: object, reason: str, remedy: str) -> None:
        self.invalid.add(key)
        self.problems.append(ConfigProblem(key, value, reason, remedy))

    def _clean(self, model: type[Section], raw: dict[str, Any], path: str) -> dict[str, Any]:
        """Return ``raw`` with today's spellings, and without comments, nulls, "auto" and unknown keys."""
        written: dict[str, tuple[str, Any]] = {}  # key -> the spelling and value that were found
        spellings, fields = model.spellings(), model.fields_by_key()
        raw = model.rewrite(raw, path, self.problems)
        for spelling, value in raw.items():
            if is_comment(spelling):
                continue
            if spelling in model.features:
                self._feature(path + spelling, value, model.features[spelling])
            elif path + spelling in _NEVER_READ:
                self.notes.append(ConfigNote(path + spelling, f"not used: {_NEVER_READ[path + spelling]}"))
            elif spelling not in spellings:
                self._unknown(model, path, spelling, value)
            elif value is None:
                continue
            elif (key := spellings[spelling]) in written:
                other, other_value = written[key]
                if value != other_value:
                    reason = f"is another spelling of {path}{other}, which says {other_value!r:.60}."
                    self._add(path + spelling, value, reason, "Keep one of the two.")
            else:
                written[key] = (spelling, value)
        cleaned: dict[str, Any] = {}
        for key, (_, value) in written.items():
            self._entry(model, raw, path, key, value, fields[key], cleaned)
        return cleaned

    def _entry(
        self,
        model: type[Section],
        raw: dict[str, Any],
        path: str,
        key: str,
        value: Any,
        field: FieldInfo,
        cleaned: dict[str, Any],
    ) -> None:
        section = section_of(field)
        if value == AUTO:
            self._auto(path + key, section)
        elif key == "params" and model in (Optimizer, Scheduler):
            cleaned[key] = self.keywords(path, raw.get("type"), value)
        elif section is None:
            cleaned[key] = value
        elif isinstance(value, dict):
            cleaned[key] = self._clean(section, value, f"{path}{key}.")
        else:
            self._add(path + key, value, "must be an object, { ... }.", f"Write for example {_example(section, key)}.")

    def _auto(self, key: str, section: type[Section] | None) -> None:
        """Note a key that says "auto". If a whole section does, it is the section's switch that is to be decided."""
        switch = next((name for name in ("enabled", "stage") if section and name in section.model_fields), None)
        self.auto.append(f"{key}.{switch}" if switch else key)

    def keywords(self, path: str, name: object, value: Any) -> dict[str, Any]:
        """Return the keywords of an optimizer or schedule. They are checked only if its name is known.

        A class of the user's checks its own; any other unknown name is a problem of its own.
        """
        key = f"{path}params"
        if not isinstance(value, dict):
            self._add(key, value, "must be an object, { ... }.", 'Write for example "params": {"lr": 1e-4}.')
            return {}
        kind = find_kind(path.rstrip("."), name)
        if kind is None:
            self.auto += [f"{key}.{word}" for word, item in value.items() if item == AUTO]
            return {word: item for word, item in value.items() if item != AUTO and not is_comment(word)}
        params = self.build(kind.params, value, f"{key}.")
        self.params.append((f"{key}.", params))
        if isinstance(params, CheckedParams):
            self._require(params, f"{key}.", kind.name)
        return params.model_dump(exclude_unset=True)

    def _require(self, params: CheckedParams, path: str, name: str) -> None:
        for word in params.required:
            known = word in params.model_fields_set or path + word in self.auto or path + word in self.invalid
            if not known:
                meaning = f", {params.meanings[word]}" if word in params.meanings else ""
                self._add(path + word, None, f"{name} needs it{meaning}.", f'Add "{word}" to {path.rstrip(".")}.')

    def _feature(self, path: str, value: Any, feature: Feature) -> None:
        """Check that a section that must be off is off, and check the spelling of its keys."""
        if value is None or value is False or value == {}:
            return
        if value == AUTO:
            self.notes.append(ConfigNote(path, _LEFT_OFF))
            return
        if not isinstance(value, (bool, dict)):
            self._add(path, value, "must be an object, { ... }.", "Remove it.")
            return
        entries = value if isinstance(value, dict) else {"enabled": True}
        known = [*(feature.keys or ()), "enabled"]
        for word, item in entries.items():
            if word in known or is_comment(word):
                continue
            if feature.keys or did_you_mean(word, ["enabled"]):
                self._add(f"{path}.{word}", item, "is not a known key.", _one_of(word, known))
        switch = entries.get("enabled")
        if switch is not None and not isinstance(switch, bool) and switch != AUTO:
            self._add(f"{path}.enabled", switch, "must be true or false.", "Write false, or remove the section.")
        elif switch is True or (switch is None and (feature.on_when_present or _any_enabled(entries))):
            remedy = "Set enabled to false, or remove the section." if switch else "Remove it."
            if value is True:
                remedy = "Set it to false, or remove it."
            self._add(path, value, feature.reason, feature.remedy or remedy)
        elif switch == AUTO and path == "amp":
            self._add(f"{path}.enabled", switch, "cannot be decided here.", feature.remedy)
        elif switch == AUTO:
            self.notes.append(ConfigNote(path, _LEFT_OFF))
        elif not _says_enabled(entries):
            self.notes.append(ConfigNote(path, NOT_ENABLED))

    def _unknown(self, model: type[Section], path: str, word: str, value: object) -> None:
        known = [*model.spellings(), *model.features]
        remedy = _KNOWN_MISTAKES.get(path + word)
        if remedy is None and f".{path}".endswith(f".{word}."):  # a section inside itself
            remedy = "Write what it has into the section itself." if isinstance(value, dict) else "Remove it."
            if "enabled" in known and not isinstance(value, dict):
                remedy = f'Remove it; "enabled" switches {path.rstrip(".")} on or off.'
        if remedy is None and (homes := [home for home in _homes().get(word, ()) if home != path + word]):
            question = did_you_mean(word, known).replace("Did", " Or did", 1)
            remedy = f"It belongs elsewhere: write it as {' or '.join(homes[:3])}.{question}"
        where = path.rstrip(".") or "the top level"
        self._add(path + word, value, f"is not a known key of {where}.", remedy or _one_of(word, known))

    def _validate(self, model: type[_S], cleaned: dict[str, Any], path: str) -> _S:
        """Build the model. On errors, note them, drop the entries that caused them, and build it from the rest."""
        for _ in range(4):  # an optional section that loses a required key is dropped in a later round
            try:
                return model.model_validate(cleaned)
            except ValidationError as error:
                for entry in error.errors(include_url=False):
                    self._add_error(model, path, entry)
                    _drop(cleaned, entry["loc"])
        return model.model_validate({})

    def _add_error(self, model: type[Section], path: str, entry: Any) -> None:
        loc = entry["loc"]
        key = path + _dotted(loc)
        if key in self.invalid:
            return
        value = None if entry["type"] == "missing" else entry["input"]
        reason, remedy = _explain(entry)
        field = _field_at(model, loc)
        default = None if field is None or field.is_required() else field.get_default(call_default_factory=True)
        # The default is mentioned only if leaving the key out is a sensible remedy.
        if isinstance(default, (int, float, str)) and default not in (0, "") and value is not None:
            remedy += f" Without the key it is {in_json(default)}."
        self._add(key, value, reason, remedy)


def _explain(entry: Any) -> tuple[str, str]:
    """Reason and remedy for one of pydantic's errors."""
    context = entry.get("ctx", {})
    kind = entry["type"]
    if kind == "zerorun":
        return context["reason"], context["remedy"]
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        bound = next(iter(context.values()))
        word = {"g": "at least" if "equal" in kind else "more than", "l": "at most" if "equal" in kind else "less than"}
        return f"must be {word[kind[0]]} {bound}.", f"Use a number that is {word[kind[0]]} {bound}."
    if kind == "literal_error":
        allowed = quoted_words(context["expected"])
        words = ", ".join(map(repr, allowed)) or context["expected"]  # numbers
        question = did_you_mean(entry["input"], allowed) if isinstance(entry["input"], str) else ""
        return f"is not one of {words}.", question or f"Use one of {words}."
    if kind == "missing":
        return "is required.", "Add it, or remove the section."
    if kind in ("tuple_type", "list_type"):
        return "must be a list.", "Write it as [ ... ]."
    if kind == "dict_type":
        return "must be an object.", "Write it as { ... }."
    return f"is not valid ({entry['msg']}).", "Correct it, or remove the key."


def _one_of(word: str, known: list[str]) -> str:
    """Return the remedy for a key that is not among the ``known`` ones."""
    some = ", ".join(sorted(set(known))[:12]) + (", ..." if len(known) > 12 else "")
    return did_you_mean(word, known) or f"Remove it, or put _ in front to keep it as a comment. Known keys: {some}."


def _any_enabled(entries: Any) -> bool:
    """True if anything nested says ``enabled: true``."""
    if isinstance(entries, dict):
        return entries.get("enabled") is True or any(_any_enabled(item) for item in entries.values())
    return isinstance(entries, list) and any(_any_enabled(item) for item in entries)


def _says_enabled(entries: Any) -> bool:
    """True if ``enabled`` is written anywhere, or if only remarks and nulls are written."""
    if not isinstance(entries, dict):
        return False
    written = {word: item for word, item in entries.items() if item is not None and not is_comment(word)}
    return not written or "enabled" in written or any(map(_says_enabled, written.values()))


def _example(section: type[Section], key: str) -> str:
    name, field = next(iter(section.fields_by_key().items()))
    kind = '"AdamW"' if key == "optimizer" else '"WarmupLR"'
    switched_on = {"type": kind, "enabled": "true", "device": '"cpu"', "every_steps": "1"}
    value = switched_on.get(name)
    if value is None:
        value = in_json(field.get_default(call_default_factory=True))
    return f'"{key}": {{"{name}": {value}}}'


@cache
def _homes() -> dict[str, tuple[str, ...]]:
    """Return every key of every section -> the dotted paths where it is allowed, without common words like "enabled"."""
    homes: dict[str, list[str]] = {}
    for path in _paths(Config, ""):
        homes.setdefault(path.rpartition(".")[2], []).append(path)
    return {word: tuple(paths) for word, paths in homes.items() if len(paths) <= 3}


def _paths(model: type[Section], prefix: str) -> Iterator[str]:
    for word in model.features:
        yield prefix + word
    for key, field in model.fields_by_key().items():
        yield prefix + key
        section = section_of(field)
        if section is not None:
            yield from _paths(section, f"{prefix}{key}.")


def _dotted(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _field_at(model: type[Section], loc: tuple[int | str, ...]) -> FieldInfo | None:
    """Return the field that an error location points at, or None."""
    current: type[Section] | None = model
    field: FieldInfo | None = None
    for part in loc:
        field = current.fields_by_key().get(str(part)) if current else None
        current = section_of(field) if field else None
    return field


def _drop(cleaned: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    """Remove the entry that an error is about. A section that lacks a required key is removed as a whole."""
    parents: list[tuple[dict[str, Any], str]] = []
    here: Any = cleaned
    for part in loc:
        if not isinstance(here, dict) or not isinstance(part, str):
            break
        if part not in here:
            break
        parents.append((here, part))
        here = here[part]
    if parents:
        container, key = parents[-1]
        container.pop(key, None)
