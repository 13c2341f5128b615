"""Monitors: where the values of steps are written, by the libraries that the configuration names.

An event is (name, value, samples so far). Only rank 0 has writers, and only it needs the libraries.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ..config.schema import Config
from ..config.sections import Comet, CsvMonitor, TensorBoard, Wandb
from ..errors import ConfigError, ConfigProblem
from ..log import is_rank_zero, logger

Event = tuple[str, float, int]
# The packages that sections need, by the names with which pip installs them; they are imported with _ for -.
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet-ml"}


class EventWriter(Protocol):
    """Writes events somewhere."""

    def write(self, events: Sequence[Event]) -> None: ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """Event files in ``output_path/job_name``."""

    def __init__(self, section: TensorBoard) -> None:
        from torch.utils.tensorboard import SummaryWriter  # which needs a package that few have

        self._writer: Any = SummaryWriter(log_dir=str(Path(section.output_path, section.job_name)))  # type: ignore[no-untyped-call]

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._writer.add_scalar(name, value, samples)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class CsvWriter:
    """A file for each name in ``output_path/job_name``, with the columns samples ("step") and value."""

    def __init__(self, section: CsvMonitor) -> None:
        self._folder = Path(section.output_path, section.job_name)
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            with (self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv").open("a", newline="") as file:
                rows = csv.writer(file, lineterminator="\n")
                if file.tell() == 0:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])

    def close(self) -> None:
        """Files are closed after every event."""


class WandbWriter:
    """A run of Weights & Biases. A run that the program has begun itself is used, and not ended."""

    def __init__(self, section: Wandb) -> None:
        wandb = import_module("wandb")
        self._is_own = wandb.run is None
        self._run = wandb.init(project=section.project, group=section.group, entity=section.team)

    def write(self, events: Sequence[Event]) -> None:
        together: dict[int, dict[str, float]] = {}
        for name, value, samples in events:
            together.setdefault(samples, {})[name] = value
        for samples, values in together.items():
            self._run.log(values, step=samples)

    def close(self) -> None:
        if self._is_own:
            self._run.finish()


class CometWriter:
    """An experiment of Comet. Of each name, a value is sent if ``samples_log_interval`` samples came since the last one."""

    def __init__(self, section: Comet) -> None:
        settings = section.model_dump(include={"api_key", "project", "workspace", "experiment_key", "mode", "online"})
        self._experiment = import_module("comet_ml").start(**settings)
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
        self._last: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            if name not in self._last or samples - self._last[name] >= self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name, value, step=samples)

    def close(self) -> None:
        self._experiment.end()


class Monitor:
    """All monitors of a configuration. ``sections``: it, or any object with those of its sections that are monitors.

    DeepSpeed calls it MonitorMaster. It writes on rank 0 and does nothing on others. Raises ConfigError if a library is
    missing or refuses to begin. One that fails later is switched off, with a warning: training goes on.
    """

    def __init__(self, sections: Any) -> None:
        wanted = _switched_on(sections) if is_rank_zero() else []
        self._writers: dict[str, EventWriter] = {key: _opened(key, section) for key, section in wanted}
        self.enabled = bool(_switched_on(sections))

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """Write (name, value, samples) each: a number, or a tensor with one, at a place of the x axis."""
        if self._writers:
            events = [(name, float(value), int(samples)) for name, value, samples in event_list]
            for key, writer in [*self._writers.items()]:
                try:
                    writer.write(events)
                except Exception as error:  # each library has errors of its own
                    self._give_up(key, error)

    def close(self) -> None:
        """Write what is left, and let go of files and runs. Nothing can be written afterwards."""
        for key, writer in [*self._writers.items()]:
            try:
                writer.close()
            except Exception as error:
                self._give_up(key, error)
        self._writers = {}

    def _give_up(self, key: str, error: Exception) -> None:
        del self._writers[key]
        logger.warning(
            "%s.enabled = True: it cannot write any more (%r), and is switched off. Training goes on. Remedy: mend that; a "
            "resumed run writes again.",
            key,
            error,
        )


_WRITERS: dict[str, Any] = {
    "tensorboard": TensorBoardWriter,
    "csv_monitor": CsvWriter,
    "wandb": WandbWriter,
    "comet": CometWriter,
}


def _switched_on(sections: Any) -> list[tuple[str, Any]]:
    found = ((key, getattr(sections, key, None)) for key in _WRITERS)
    return [(key, section) for key, section in found if section is not None and section.enabled]


def _opened(key: str, section: Any) -> EventWriter:
    try:
        writer: EventWriter = _WRITERS[key](section)
    except Exception as error:  # each library has errors of its own
        remedy = "Mend that, or set it to false."
        raise ConfigError([ConfigProblem(f"{key}.enabled", True, f"it cannot begin: {error!r}.", remedy)]) from error
    return writer


def refuse_missing_libraries(config: Config, *, writes: bool) -> None:
    """Raise ConfigError for monitors whose library this rank has not, if it is the one that ``writes``."""
    missing = [
        (key, package)
        for key, _ in (_switched_on(config) if writes else ())
        if (package := PACKAGES.get(key)) and find_spec(package.replace("-", "_")) is None
    ]
    if missing:
        raise ConfigError(
            [
                ConfigProblem(
                    f"{key}.enabled", True, f"the package {package} is not installed where rank 0 runs.",
                    f"pip install {package}, or set it to false.",
                )
                for key, package in missing
            ]
        )  # fmt: skip
