"""``zerorun-checkpoint inspect``: say what is in a checkpoint, as a page or as JSON. Reads manifest and headers only."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...log import counted
from .. import directory as folder
from ..adapters import ADAPTERS_FILE, stored_adapters
from ..manifest import Manifest, read_manifest
from ..read import Reader
from ..tensorfile import Located, TensorFile
from ..write_plan import MODEL, OPTIMIZER, STATE
from .choose import candidates, in_bytes, nbytes_of, survey
from .folder import describe_folder, head_of_folder, is_folder

FORMAT = 1  # of what --json prints


def run(args: argparse.Namespace) -> tuple[int, Iterator[str]]:
    """The exit status and the lines to print. Raises CheckpointError if there is nothing to look at."""
    directory = Path(args.dir)
    if args.tag is None and is_folder(directory):
        found = describe_folder(directory)
        return 0, iter(json.dumps({"format": FORMAT, **found}, indent=2).splitlines()) if args.json else _folder_page(found)
    path, manifest = _choose(candidates(directory, args.tag))
    beside = _list(directory) if path != directory else []
    report = {"format": FORMAT, **describe(path, manifest), "checkpoints": beside}
    if args.json:
        return 0, iter(json.dumps(report, indent=2).splitlines())
    return 0, _page(report, directory)


def _choose(paths: Sequence[Path]) -> tuple[Path, Manifest]:
    """Return the first checkpoint whose manifest can be read, as a run would go back from damaged ones.

    Raises the error of the first one if there is none.
    """
    problem: CheckpointError | None = None
    for path in paths:
        try:
            return path, read_manifest(path)
        except CheckpointError as error:
            problem = problem or error
    raise problem or CheckpointError("there is no checkpoint.")


def _list(directory: Path) -> list[dict[str, Any]]:
    return [
        {
            "tag": entry.name,
            "step": entry.manifest.global_steps if entry.manifest else None,
            "saved_at": entry.manifest.saved_at if entry.manifest else None,
            "bytes": entry.nbytes,
            "complete": not entry.problems,
            "problems": list(entry.problems),
        }
        for entry in survey(directory)
    ]


# -- what is there -----------------------------------------------------------------------------------------------


def describe(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Everything that --json prints about one checkpoint, as far as damage allows. Sizes are in bytes."""
    problems = [f"{name} {what}" for name, what in folder.missing_files(path, manifest.files).items()]
    headers = {kind: _headers(path, manifest, kind, problems) for kind in manifest.sets}
    return {
        "path": str(path),
        "tag": manifest.tag,
        "step": manifest.global_steps,
        "saved_at": manifest.saved_at,
        "versions": manifest.versions,
        "layout": manifest.layout,
        "counters": manifest.counters,
        "files": {"count": len(manifest.files) + 1, "bytes": nbytes_of(path, manifest), "problems": problems},
        "parameters": _parameters(manifest),
        "sets": [_set(kind, tensors, len(manifest.sets[kind])) for kind, tensors in headers.items()],
        "tensors": _tensors(manifest, headers),
        "aliases": manifest.aliases,
        "optimizer": _optimizer(manifest),
        "scheduler": readable(manifest.scheduler),
        "loss_scale": readable(manifest.loss_scale),
        "data": readable(manifest.data),
        "rng_ranks": len(manifest.rng) if manifest.rng is not None else 0,
        "client_state": sorted(readable(manifest.client_state) or {}),
        "extra_state": sorted(readable(manifest.extra_state) or {}),
        "frozen_base": sorted(manifest.frozen_base or {}),
        "adapters": _adapters(path, manifest, problems),
    }


def _parameters(manifest: Manifest) -> dict[str, int]:
    sizes = [(math.prod(entry["shape"]), entry["trainable"]) for entry in manifest.parameters.values()]
    return {
        "tensors": len(sizes),
        "elements": sum(numel for numel, _ in sizes),
        "trainable_elements": sum(numel for numel, trainable in sizes if trainable),
    }


def _adapters(path: Path, manifest: Manifest, problems: list[str]) -> dict[str, int]:
    """Return adapter -> number of its tensors, which is 0 if PEFT computes them; empty if the model has no adapters."""
    try:
        with Reader(path, manifest) as reader:
            found = stored_adapters(reader) if not any(p.startswith(ADAPTERS_FILE) for p in problems) else None
    except CheckpointError as error:
        problems.append(str(error).removeprefix(f"{path}/"))
        return {}
    if found is None:
        return {}
    sizes = dict.fromkeys(found.computed, 0) | {kind: len(names) for kind, names in found.names.items()}
    return {kind.rpartition("/")[0] or "default": size for kind, size in sizes.items()}


def _set(kind: str, tensors: Mapping[str, Located], files: int) -> dict[str, Any]:
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return {"name": kind, "tensors": len(tensors), "bytes": nbytes, "files": files}


def _headers(path: Path, manifest: Manifest, kind: str, problems: list[str]) -> dict[str, Located]:
    """The tensors of one set, from the headers of those files that can be read."""
    found: dict[str, Located] = {}
    for name in manifest.sets[kind]:
        if any(problem.startswith(f"{name} ") for problem in problems):
            continue
        try:
            with TensorFile(path / name, manifest.files.get(name), path) as file:
                found.update(file.tensors)
        except CheckpointError as error:
            problems.append(str(error).removeprefix(f"{path}/"))
    return found


def _tensors(manifest: Manifest, headers: Mapping[str, Mapping[str, Located]]) -> list[dict[str, Any]]:
    """Parameters and buffers, in the manifest's order, with what the files say of each, by set."""
    names = [*manifest.parameters, *headers.get(MODEL, {})]
    found = []
    for name in dict.fromkeys(names):
        parameter = manifest.parameters.get(name)
        own = {kind: tensors[name] for kind, tensors in headers.items() if kind != STATE and name in tensors}
        model = own.get(MODEL)
        found.append(
            {
                "name": name,
                "kind": "parameter" if parameter else "buffer",
                "shape": list(parameter["shape"] if parameter else model.shape if model else ()),
                "dtype": parameter["dtype"] if parameter else model.dtype if model else "",
                "trainable": bool(parameter and parameter["trainable"]),
                "group": parameter["group"] if parameter else None,
                "sets": {kind: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for kind, tensor in own.items()},
            }
        )
    return found


def _optimizer(manifest: Manifest) -> dict[str, Any] | None:
    if manifest.optimizer is None:
        return None
    groups = [entry["group"] for entry in manifest.parameters.values()]
    return {
        "type": manifest.optimizer["type"],
        "groups": [
            {"parameters": groups.count(index), "hyperparameters": readable(group)}
            for index, group in enumerate(manifest.optimizer["groups"])
        ],
        "scalars": {
            key: [{"value": readable(entry["value"]), "parameters": len(entry["names"])} for entry in entries]
            for key, entries in manifest.optimizer["scalars"].items()
        },
    }


def readable(value: Any) -> Any:
    """An encoded value (see json_values.py) in JSON's own terms, for people: tuples as lists, tensors by their names."""
    if isinstance(value, list):
        return [readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" not in value:
        return {key: readable(item) for key, item in value.items()}
    if value["$"] in ("dict", "Counter"):
        return {str(readable(key)): readable(item) for key, item in _pairs(value)}
    if "items" in value:
        return readable(value["items"])
    if "base64" in value:
        return f"<{3 * len(value['base64']) // 4 - value['base64'].count('=')} bytes>"
    return value["value"] if "value" in value else f"<{value['$']} {value.get('name', '')}>"


def _pairs(value: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The items of an encoded dict, or Counter, whose pairs are lists or encoded tuples."""
    for item in value["items"]:
        key, content = item["items"] if isinstance(item, dict) else item
        yield key, content


# -- the page ----------------------------------------------------------------------------------------------------


def _page(report: Mapping[str, Any], directory: Path) -> Iterator[str]:
    if len(report["checkpoints"]) > 1:
        yield f"Checkpoints in {directory}"
        yield from _listing(report["checkpoints"])
        yield ""
    yield from _head(report)
    sets = [
        (entry["name"], f"{entry['tensors']:,}", in_bytes(entry["bytes"]), str(entry["files"])) for entry in report["sets"]
    ]
    yield from ("", "Sets", *table([("name", "tensors", "bytes", "files"), *sets], right=(1, 2, 3)))
    yield from ("", "Tensors", *table([("name", "shape", "dtype", "trainable", "also"), *map(_row, report["tensors"])]))
    if report["aliases"]:
        yield from ("", "Tied", *table([(name, f"is {kept}") for name, kept in report["aliases"].items()]))
    if report["optimizer"]:
        yield from ("", "Optimizer", *_optimizer_lines(report["optimizer"]))
    yield from ("", "State", *table(list(_state_rows(report))))


def _folder_page(report: Mapping[str, Any]) -> Iterator[str]:
    yield report["path"]
    yield from table(list(head_of_folder(report)))
    yield from (f"    {problem}" for problem in report["files"]["problems"])
    rows = [(t["name"], str(t["shape"]), t["dtype"], in_bytes(t["bytes"]), t["file"]) for t in report["tensors"]]
    yield from ("", "Tensors", *table([("name", "shape", "dtype", "bytes", "file"), *rows], right=(3,)))


def _listing(checkpoints: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [("tag", "step", "saved", "size", "")]
    for entry in checkpoints:
        more = f" (and {len(entry['problems']) - 1} more)" if len(entry["problems"]) > 1 else ""
        state = "complete" if entry["complete"] else f"{entry['problems'][0]}{more}"
        step = "" if entry["step"] is None else str(entry["step"])
        rows.append((entry["tag"], step, _time(entry["saved_at"] or ""), in_bytes(entry["bytes"]) if step else "", state))
    yield from table(rows, right=(1, 3))


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    counters, files, parameters, layout = report["counters"], report["files"], report["parameters"], report["layout"]
    yield report["path"]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    whole = "all there, of the right sizes (verify checks their bytes)" if not files["problems"] else "NOT COMPLETE:"
    rows = [
        ("counters", ", ".join(f"{name} {value:,}" for name, value in counters.items())),
        ("saved", _time(report["saved_at"])),
        ("written by", versions),
        ("layout", ", ".join(f"{name} {value}" for name, value in layout.items()) or "not known"),
        ("parameters", f"{parameters['elements']:,} in {counted(parameters['tensors'], 'tensor')}, "
                       f"{parameters['trainable_elements']:,} of them trained"),
        ("files", f"{counted(files['count'], 'file')}, {in_bytes(files['bytes'])}, {whole}"),
    ]  # fmt: skip
    if report["frozen_base"]:
        what = counted(len(report["frozen_base"]), "frozen weight")
        rows.append(("left out", f"{what}: saved with exclude_frozen_parameters"))
    if report["adapters"]:
        sizes = report["adapters"].items()
        held = [f"{name} ({counted(size, 'tensor') if size else 'computed by PEFT'})" for name, size in sizes]
        rows.append(("adapters", ", ".join(held)))
    yield from table(rows)
    yield from (f"    {problem}" for problem in files["problems"])


def _row(tensor: Mapping[str, Any]) -> tuple[str, ...]:
    states = [
        kind.removeprefix(OPTIMIZER)
        + ("" if entry["shape"] == tensor["shape"] else f" {entry['shape']}")
        + f" {entry['dtype']}"
        for kind, entry in tensor["sets"].items()
        if kind != MODEL
    ]
    here = "" if MODEL in tensor["sets"] else "(not stored)"
    trainable = tensor["kind"] if tensor["kind"] == "buffer" else "yes" if tensor["trainable"] else "no"
    return tensor["name"], str(tensor["shape"]), tensor["dtype"], trainable, ", ".join(states) or here


def _optimizer_lines(optimizer: Mapping[str, Any]) -> Iterator[str]:
    yield f"  {optimizer['type'] or 'of a type that is not known'}"
    for index, group in enumerate(optimizer["groups"]):
        values = ", ".join(f"{key} {_short(value)}" for key, value in group["hyperparameters"].items())
        yield f"  group {index}, {counted(group['parameters'], 'parameter')}: {values}"
    for key, entries in optimizer["scalars"].items():
        values = ", ".join(f"{_short(e['value'])} ({counted(e['parameters'], 'parameter')})" for e in entries)
        yield f"  {key} {values}"


def _state_rows(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in ("scheduler", "loss_scale"):
        values = report[key]
        yield key.replace("_", " "), ", ".join(f"{k} {_short(v)}" for k, v in values.items()) if values else "none"
    data = report["data"]
    keys = ", ".join(data[0]) if data and isinstance(data[0], dict) else ""
    yield "data", f"positions of {counted(len(data), 'rank')}: {keys}" if data else "none"
    yield "random numbers", f"of {counted(report['rng_ranks'], 'rank')}" if report["rng_ranks"] else "none"
    yield "client state", ", ".join(report["client_state"]) or "none"
    if report["extra_state"]:
        yield "extra state", ", ".join(report["extra_state"])


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Iterator[str]:
    """Yield the lines of an indented table of ``rows``. The columns in ``right`` are aligned on the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = [cell.rjust(width) if column in right else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        yield ("  " + "  ".join(cells)).rstrip()


def _short(value: Any, most: int = 60) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def _time(saved_at: str) -> str:
    """ISO 8601 to the second, in UTC."""
    return saved_at[:19].replace("T", " ") + " UTC" if saved_at else ""
