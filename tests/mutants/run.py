"""Applies the planted bugs of table.py, one at a time, to a copy of the tree, and runs the tests that shall catch each.

    python tests/mutants/run.py [NAME ...] [--kind KIND] [--whole] [--limit SECONDS] [--results FILE]

The copy has the tracked files as they are now, and an environment of its own, in which child processes find it before any
other zerorun. Rows whose tests are in the same files are taken together, some 25 at a time. Their tests are run on the
unchanged copy first, where they must pass; otherwise these rows are not tried. Each must be one that the default run runs.

With --results, what was told of each row is added to FILE. A run that was interrupted goes on from there, as long as no
file of the tree has changed.

Exit status: 0 if every bug was caught, 1 if one survived, 2 if some could not be tried. Nothing else stays behind: no
process, no file, no library in the user's cache.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from table import KINDS, MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0  # for the tests of one bug; what takes longer hangs
BASELINE_S = 1800.0  # for the tests of one chunk, without any bug
CHUNK = 25  # rows
WHOLE_S = 7200.0
_WIDTH = max(len(mutant.name) for mutant in MUTANTS)
_END_S = 20.0  # for pytest to take down what it has started, before it is killed
_PR_SET_CHILD_SUBREAPER = 36
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.*?)(?: - .*)?$", re.MULTILINE)
_IMPORTED = "import zerorun as a, zerorun.ops as b, zerorun.launcher as c; print(a.__file__, b.__file__, c.__file__)"


class Unusable(Exception):
    """Nothing can be told; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """How a run of pytest ended. ``failed``: the first test that did; empty if none could be told."""

    status: int | None  # None: it hung
    failed: str
    seconds: float
    output: str

    @property
    def caught(self) -> bool:
        return self.status is None or (self.status == 1 and bool(self.failed))

    @property
    def how(self) -> str:
        """In words, for the table."""
        if self.status is None:
            return f"hang in {self.failed}" if self.failed else "hang"
        if self.caught:
            return self.failed
        return "SURVIVED" if self.status == 0 else f"UNCLEAR: pytest ended with status {self.status}"


# -- the copy ------------------------------------------------------------------------------------------------------


@dataclass
class Copy:
    """A copy of the tree, and the Python that imports it."""

    root: Path
    python: Path
    environment: dict[str, str]
    changes: int = field(default=0)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Inside the block the copy has the bug."""
        path = self.root / mutant.file
        before = path.read_text()
        self._write(path, mutant.applied(before))
        try:
            yield
        finally:
            self._write(path, before)

    def _write(self, path: Path, text: str) -> None:
        """Bytecode is taken for up to date by the seconds of a file's time and its size: each version gets its own time."""
        path.write_text(text)
        self.changes += 1
        when = time.time() - 100_000 + self.changes
        os.utime(path, (when, when))


def tracked(root: Path) -> list[str]:
    """The files that git knows and that are there."""
    told = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], capture_output=True, check=True).stdout
    names = [os.fsdecode(name) for name in told.split(b"\0") if name]
    return [name for name in names if (root / name).is_file()]


def make_copy(folder: Path) -> Copy:
    """Copy the tree into ``folder`` and install it there. Raises Unusable if something else is imported after that."""
    root, place = folder / "tree", folder / "venv"
    for name in tracked(ROOT):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    site = next(place.glob("lib/python*/site-packages"))
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "packages.pth").write_text("\n".join(packages) + "\n")
    temporary = folder / "t"
    temporary.mkdir()
    # Not ZERORUN_CACHE_DIR, which the ranks of tests do not inherit.
    own = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(folder / "cache"), "VIRTUAL_ENV": str(place)}
    path = os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)])
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {**own, "PATH": path}
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(root)]
    done = subprocess.run(install, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise Unusable(f"the copy cannot be installed:\n{done.stdout}")
    for directory in (folder, root):
        found = subprocess.run([python, "-c", _IMPORTED], env=environment, cwd=directory, capture_output=True, text=True)
        files = found.stdout.split()
        if len(files) != 3 or not all(Path(file).is_relative_to(root) for file in files):
            raise Unusable(f"in {directory} another zerorun than the copy is imported: {found.stdout}{found.stderr}")
    return Copy(root, python, environment)


# -- running -------------------------------------------------------------------------------------------------------


def run_tests(copy: Copy, tests: Sequence[str], limit_s: float, *, stop: bool = True) -> Outcome:
    """Run pytest with these arguments in a session of its own, of which nothing is left afterwards."""
    folder = copy.root.parent
    # A place of their own for the tests' files, with a name that is no longer than usual: some bind sockets there.
    options = ["-q", "--tb=short", "-p", "no:cacheprovider", f"--basetemp={folder / 'b'}", *(["-x"] if stop else [])]
    command = [str(copy.python), "-m", "pytest", *options, *tests]
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+", dir=folder) as file:
        process = subprocess.Popen(
            command, cwd=copy.root, env=copy.environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            in_time = _has_ended(process.pid, limit_s)
            if not in_time:
                os.killpg(process.pid, signal.SIGTERM)
                _has_ended(process.pid, _END_S)
        finally:
            status = _end(process)
        seconds = time.monotonic() - begun
        file.seek(0)
        output = file.read()
    found = _FAILED.search(output)
    return Outcome(status if in_time else None, found[1] if found else "", seconds, output)


def _has_ended(process: int, seconds: float) -> bool:
    """Whether it ends within ``seconds``. It is not waited for: until then, its id is nobody else's."""
    handle = os.pidfd_open(process)
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Kill what is left of its group, and what this process has adopted of it. Its exit status."""
    os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    while left := _children():
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)
    return status


def _children() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def adopt_orphans() -> None:
    """Let what tests leave behind become children of this process, so that it can be found and ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def check_day(copy: Copy, mutants: Iterable[Mutant]) -> None:
    """Raise Unusable for tests that are not of the default run: pytest runs any row of a matrix that is asked for."""
    named = {test: mutant.name for mutant in mutants for test in mutant.tests if ".py" in test}
    collected = run_tests(copy, ["--collect-only", *sorted({test.split("::")[0] for test in named})], BASELINE_S)
    by_day: set[str] = set()
    for test in collected.output.splitlines():
        by_day |= {test, test.split("[")[0], test.split("::")[0]}
    if missing := [f"{name}: {test}" for test, name in named.items() if test not in by_day]:
        why = [collected.output[-2000:]] if collected.status else []
        raise Unusable("\n".join(["these tests are not of the default run:", *missing, *why]))


def check_baseline(copy: Copy, mutants: Iterable[Mutant]) -> None:
    """Raise Unusable unless the tests pass without any bug. Those that are picked by -k are run by themselves."""
    named: list[str] = []
    picked: dict[tuple[str, ...], None] = {}
    for mutant in mutants:
        if any(part.startswith("-") for part in mutant.tests):
            picked[mutant.tests] = None
        else:
            named += mutant.tests
    for tests in [tuple(dict.fromkeys(named)), *picked]:
        outcome = run_tests(copy, tests, BASELINE_S, stop=False) if tests else None
        if outcome is not None and outcome.status != 0:
            raise Unusable(f"these tests do not pass without any bug: {' '.join(tests)}\n{outcome.output[-4000:]}")


# -- the table -----------------------------------------------------------------------------------------------------


def chosen(names: Sequence[str], kind: str | None) -> list[Mutant]:
    """The rows that are asked for. Raises Unusable for names that there are not."""
    unknown = sorted(set(names) - {mutant.name for mutant in MUTANTS})
    if unknown:
        raise Unusable(f"there is no {', '.join(unknown)} in table.py")
    found = [m for m in MUTANTS if (not names or m.name in names) and kind in (None, m.kind)]
    if not found:
        raise Unusable("no row of table.py is meant")
    return found


def chunks(mutants: Iterable[Mutant]) -> list[list[Mutant]]:
    """``mutants`` by the file of their first test: those of one file are in one chunk, with others up to CHUNK."""
    by_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.tests[0].split("::")[0], []).append(mutant)
    found: list[list[Mutant]] = []
    for _, rows in sorted(by_file.items()):
        if found and len(found[-1]) + len(rows) <= CHUNK:
            found[-1] += rows
        else:
            found.append(rows)
    return found


def summary(caught: dict[Mutant, bool]) -> str:
    """How many bugs of each folder and kind were caught, and of how many if not of all."""
    cells: Counter[tuple[str, str]] = Counter()
    survived: Counter[tuple[str, str]] = Counter()
    for mutant, is_caught in caught.items():
        for folder in (str(Path(mutant.file).parent), "all"):
            for kind in (mutant.kind, "all"):
                cells[folder, kind] += 1
                survived[folder, kind] += not is_caught
    folders = [*sorted({folder for folder, _ in cells} - {"all"}), "all"]
    kinds = [kind for kind in (*KINDS, "all") if any((folder, kind) in cells for folder in folders)]
    lines = [["folder", *kinds]]
    for folder in folders:
        line = [folder]
        for kind in kinds:
            tried, missed = cells[folder, kind], survived[folder, kind]
            line.append(f"{tried - missed}/{tried}" if missed else str(tried or "."))
        lines.append(line)
    first, *others = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ([cell.rjust(width) for cell, width in zip(line[1:], others, strict=True)] for line in lines)
    return "\n".join("  ".join([line[0].ljust(first), *row]) for line, row in zip(lines, rows, strict=True))


class Results:
    """What was told of each row of the tree as it is, in a file from which a later run goes on."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._tree = self._digest() if path else ""
        self.caught: dict[str, bool] = {}
        for line in path.read_text().splitlines() if path and path.exists() else ():
            told = json.loads(line)
            if told["tree"] == self._tree:
                self.caught[told["name"]] = told["caught"]

    def add(self, mutant: Mutant, outcome: Outcome) -> None:
        self.caught[mutant.name] = outcome.caught
        if self._path:
            told = {"name": mutant.name, "caught": outcome.caught, "how": outcome.how, "seconds": round(outcome.seconds, 1)}
            with self._path.open("a") as file:
                file.write(json.dumps(told | {"tree": self._tree}) + "\n")

    @staticmethod
    def _digest() -> str:
        """Of all files that are copied."""
        digest = hashlib.sha256()
        for name in tracked(ROOT):
            digest.update(f"{name} {hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\n".encode())
        return digest.hexdigest()


# -- the command ---------------------------------------------------------------------------------------------------


def run(mutants: Sequence[Mutant], results: Results, *, whole: bool, limit_s: float) -> int:
    """Run ``mutants`` and print the table. Returns the exit status."""
    for mutant in mutants:
        mutant.applied((ROOT / mutant.file).read_text())  # raises what is wrong with the row, before anything is copied
    begun = time.monotonic()
    left = [mutant for mutant in mutants if mutant.name not in results.caught]
    if len(left) < len(mutants):
        print(f"{len(mutants) - len(left)} of {len(mutants)} rows were tried before", flush=True)
    with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as folder:
        copy = make_copy(Path(folder).resolve())
        if whole:
            print("the whole default run is taken for each; it is not run without a bug first", flush=True)
        elif left:
            check_day(copy, left)
        for rows in chunks(left):
            try_rows(copy, rows, results, whole=whole, limit_s=limit_s)
    caught = {mutant: results.caught[mutant.name] for mutant in mutants if mutant.name in results.caught}
    survived = [mutant.name for mutant, is_caught in caught.items() if not is_caught]
    not_tried = [mutant.name for mutant in mutants if mutant.name not in results.caught]
    print(summary(caught))
    print(f"{len(caught) - len(survived)} of {len(mutants)} caught in {time.monotonic() - begun:.0f} s")
    for names, what in ((survived, "not caught"), (not_tried, "not tried")):
        if names:
            print(f"{what}: {' '.join(names)}")
    return 1 if survived else 2 if not_tried else 0


def try_rows(copy: Copy, mutants: Sequence[Mutant], results: Results, *, whole: bool, limit_s: float) -> None:
    """Run the tests of ``mutants`` without and with the bugs, and add what is told. Nothing is if they fail without."""
    begun = time.monotonic()
    if not whole:
        try:
            check_baseline(copy, mutants)
        except Unusable as error:
            print(error, flush=True)
            return
        print(f"the unchanged copy passes the tests of {len(mutants)} rows in {time.monotonic() - begun:.0f} s", flush=True)
    for mutant in mutants:
        with copy.changed(mutant):
            outcome = run_tests(copy, () if whole else mutant.tests, WHOLE_S if whole else limit_s)
        results.add(mutant, outcome)
        print(f"{mutant.name:{_WIDTH}}  {mutant.kind:9}  {outcome.seconds:6.1f} s  {outcome.how}", flush=True)
        if outcome.status not in (None, 0, 1):
            print(outcome.output[-2000:], flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows of table.py; default: all")
    parser.add_argument("--kind", help="only rows of this kind")
    parser.add_argument("--whole", action="store_true", help="run the whole default run, not only the tests of the row")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="after which tests hang")
    parser.add_argument("--results", type=Path, metavar="FILE", help="to add what is told to, and to go on from")
    args = parser.parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # so that everything is put away
    adopt_orphans()
    try:
        return run(chosen(args.names, args.kind), Results(args.results), whole=args.whole, limit_s=args.limit)
    except (Unusable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
