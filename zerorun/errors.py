"""The named errors that zerorun raises. Each message says what was found, why it cannot work and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple


class ZerorunError(Exception):
    """Base of all errors that zerorun raises on purpose."""


def in_json(value: object) -> str:
    """Write ``value`` as it stands in a configuration file: true, "name". What JSON does not know is Python's repr."""
    import json  # few runs have anything to show

    return json.dumps(value, default=repr, ensure_ascii=False, skipkeys=True)


class ConfigProblem(NamedTuple):  # not a dataclass: `zerorun --help` would import what makes those, a quarter of its time
    """One thing wrong with a configuration: ``key`` is a dotted path such as ``zero_optimization.stage``."""

    key: str
    value: object
    reason: str
    remedy: str

    def told(self, written: Callable[[object], str]) -> str:
        """Return the problem in words. ``written``: makes text of its value."""
        shown = written(self.value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return f"{self.key} = {shown}: {self.reason} Remedy: {self.remedy}"

    def __str__(self) -> str:
        return self.told(in_json)


class ConfigError(ZerorunError, ValueError):
    """The configuration cannot be used. The message lists every problem found, not only the first."""

    def __init__(self, problems: list[ConfigProblem], source: str = "config") -> None:
        self.problems = list(problems)
        self.source = source
        noun = "problem" if len(self.problems) == 1 else "problems"
        written = repr if source.endswith("()") else in_json  # arguments of a function are Python's
        lines = [f"{source}: {len(self.problems)} {noun}", *(f"  {problem.told(written)}" for problem in self.problems)]
        super().__init__("\n".join(lines))

    @classmethod
    def saying(cls, text: str) -> ConfigError:
        """Make the error with the message of another rank's error."""
        error = cls([])
        error.args = (text,)
        return error


class ModelError(ZerorunError, ValueError):
    """The module, its parameters or the optimizer given for them cannot be trained as they are."""


class TopologyError(ZerorunError, ValueError):
    """Ranks, degrees or process groups do not fit together."""


class PipelineError(ZerorunError, ValueError):
    """Layers, stages and batches of a pipeline do not fit together."""


class DoesNotFitError(ZerorunError, MemoryError):
    """The training needs more memory than there is. It is raised before anything is allocated."""


class StepError(ZerorunError, RuntimeError):
    """The training loop called the engine in an order, or with a value, that makes no sense."""


class VocabularyError(ZerorunError, IndexError):
    """A token id or a label is outside a vocabulary that is divided over ranks."""


class ReleasedParameterError(ZerorunError, RuntimeError):
    """A parameter was used while its full value was not on this rank."""


class OrderError(ZerorunError, RuntimeError):
    """Ranks disagree about which collective comes next. The message names the first unit and rank that differ."""


class RankLeftError(OrderError):
    """Another rank has ended, or come to the end of its script, and this one goes on."""


class MessageError(ZerorunError, RuntimeError):
    """A value cannot be sent to other ranks, or a message from another rank cannot be read."""


class LossScaleError(ZerorunError, ArithmeticError):
    """fp16 gradients overflow at the smallest loss scale, or in ten steps in a row at a static one.

    The training can still be saved and inspected.
    """


class NonFiniteError(ZerorunError, ArithmeticError):
    """The loss or the gradients are NaN or infinite, and no dynamic loss scale can help."""


class CheckpointError(ZerorunError, RuntimeError):
    """A checkpoint cannot be written, or a stored one does not match what is asked for."""


class DamagedError(CheckpointError):
    """Files of a checkpoint are missing, truncated, or not what was written."""


class SwapError(ZerorunError, RuntimeError):
    """A disk has no room for the data that should be offloaded to it, or reading or writing it failed."""


class LaunchError(ZerorunError, RuntimeError):
    """Workers could not be started as asked."""


class ScheduleError(ZerorunError, ValueError):
    """A pipeline schedule cannot be made as asked, or cannot be run as it stands."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question with the known words that ``word`` was most likely meant to be; empty if none is similar."""
    likely = _nearest(word[:80].lower(), known)
    return "Did you mean " + " or ".join(f'"{candidate}"' for candidate in likely) + "?" if likely else ""


def _nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the most similar words, best first; several if they are about equally similar.

    Words are also similar if one contains the other.
    """
    from difflib import SequenceMatcher  # only needed when something is wrong

    least = 0.5 if len(word) <= 3 else 0.65
    matcher = SequenceMatcher(None, "", word)
    scored = []
    for candidate in known:
        lower = candidate.lower()
        matcher.set_seq1(lower)
        shorter, longer = sorted((word, lower), key=len)
        score = max(matcher.ratio(), least if len(shorter) > 2 and shorter in longer else 0.0)
        if score >= least:
            scored.append((score, candidate))
    scored.sort(reverse=True)
    return [candidate for score, candidate in scored[:3] if score >= scored[0][0] - 0.05]
