"""The native library: found, built, and done without, in processes of their own with compilers that work, fail or lack."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from covering import by_day
from forked_scripts import ForkedScripts, RunningScript

from zerorun.ops import build, native
from zerorun.report import software

COMPILERS = list(build.compilers(os.environ))
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="there is no C++ compiler")

# Three updates by threads at once and one later; prints what is in force and whether the numbers are right.
SCRIPT = """
import json, threading, torch
from zerorun.ops import native
from zerorun.ops.single_pass import adam
weights = [torch.zeros(3) for _ in range(4)]
def step(weight):
    adam(weight, torch.ones(3), torch.zeros(3), torch.zeros(3), step=1, lr=0.5)
threads = [threading.Thread(target=step, args=(weight,)) for weight in weights[:3]]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
step(weights[3])
right = all(torch.allclose(weight, torch.full((3,), -0.5)) for weight in weights)
print(json.dumps({**native.status().__dict__, "right": right}))
"""


# Compiles as COMPILERS[0] does, but in an eighth of the time, and each command line once, whatever file it is to write.
ONCE = """
for word in "$@"; do [ "$last" = -o ] && out=$word; last=$word; done
case "$*" in *" -o "*) ;; *) exec {real} "$@" ;; esac
kept={folder}/$(printf '%s' "${{*%"$out"}}" | sha256sum | cut -c1-32)
if [ ! -e "$kept" ]; then {real} "$@" -O0 || exit; cp "$out" "$kept.$$" && mv "$kept.$$" "$kept"; else cp "$kept" "$out"; fi
"""


def environment(cache: Path | None, **changed: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("ZERORUN_ISA", "XDG_CACHE_HOME")}
    kept.pop("ZERORUN_CACHE_DIR", None)
    return {**kept, **({} if cache is None else {"ZERORUN_CACHE_DIR": str(cache)}), **changed}


_scripts: list[ForkedScripts] = []  # at most one


@pytest.fixture(scope="module", autouse=True)
def _forks_scripts() -> Iterator[None]:
    _scripts.append(ForkedScripts("torch", "zerorun.ops.native", "zerorun.ops.single_pass"))
    yield
    _scripts.pop().close()


def start(env: dict[str, str]) -> RunningScript:
    return _scripts[0].start(SCRIPT, env)


def finish(script: RunningScript) -> dict[str, Any]:
    """What the script printed, with ``warnings``: the lines on its stderr."""
    code, out, err = script.finish()
    assert code == 0, err
    return {**json.loads(out), "warnings": err.splitlines()}


def run(env: dict[str, str]) -> dict[str, Any]:
    return finish(start(env))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def compiler_that(path: Path, condition: str, words: str) -> str:
    """A compiler that fails with ``words`` where the shell's ``condition`` on "$*" holds, and else is a real one."""
    real = os.environ["CXX"]
    return script(path, f'case "$*" in {condition}) echo "error: {words}"; exit 1;; esac\nexec {real} "$@"')


def compile_library(text: str, path: Path) -> None:
    command = [*COMPILERS[0], "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=text, text=True, check=True)


@pytest.fixture(autouse=True)
def _nothing_installed() -> None:
    if build.INSTALLED.exists():
        pytest.skip("zerorun was installed with its library, which is always taken")


@pytest.fixture(scope="module", autouse=True)
def _compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The tests differ in what they do with the library, not in the library."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        if COMPILERS:
            patch.setenv("CXX", script(folder / "c++", ONCE.format(real=" ".join(COMPILERS[0]), folder=folder)))
        yield


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@needs_compiler
def test_built_once_and_found_again(cache: Path) -> None:
    first, second = run(environment(cache)), run(environment(cache))
    for found, words in ((first, "built into"), (second, "found in")):
        assert found["source"] == "cached" and found["right"] and not found["warnings"]
        assert found["reason"].startswith(f"{words} {cache}") and found["isa"] in native.ISAS
    assert len(list(cache.iterdir())) == 1  # and nothing temporary


@needs_compiler
def test_two_builders_at_once(cache: Path) -> None:
    processes = [start(environment(cache)) for _ in range(3)]
    assert all(found["right"] and found["source"] == "cached" for found in map(finish, processes))
    assert len(list(cache.iterdir())) == 1


def test_no_compiler(cache: Path, tmp_path: Path) -> None:
    found = run(environment(cache, PATH=str(tmp_path), CXX="no-such-compiler"))
    assert found["source"] == "torch" and found["right"] and found["isa"] is None
    assert "there is no C++ compiler" in found["reason"]
    assert len(found["warnings"]) == 1 and "torch's kernels are used instead" in found["warnings"][0]


@needs_compiler
def test_a_cache_serves_machines_without_compiler(cache: Path, tmp_path: Path) -> None:
    run(environment(cache))
    found = run(environment(cache, PATH=str(tmp_path), CXX=""))
    assert found["source"] == "cached" and found["right"] and not found["warnings"]


def test_failing_compiler(cache: Path, tmp_path: Path) -> None:
    broken = script(tmp_path / "c++", 'echo "fatal error: no such header"; exit 1')
    found = run(environment(cache, PATH=str(tmp_path), CXX=""))
    assert found["source"] == "torch" and found["right"] and len(found["warnings"]) == 1
    assert f"{broken} failed: fatal error: no such header" in found["reason"]


@needs_compiler
def test_the_next_compiler_is_tried(cache: Path, tmp_path: Path) -> None:
    broken = script(tmp_path / "mine", "exit 1")
    works = Path(os.environ["CXX"]).parent  # and is called c++
    found = run(environment(cache, CXX=f"{broken} -O0", PATH=f"{works}:{os.environ['PATH']}"))
    assert found["source"] == "cached" and found["right"] and not found["warnings"]


def test_a_compiler_that_makes_nonsense(cache: Path, tmp_path: Path) -> None:
    for name in ("c++", "g++", "clang++"):
        script(tmp_path / name, 'for last; do :; done; [ "$last" = --version ] || echo nonsense > "$last"')
    found = run(environment(cache, PATH=f"{tmp_path}:{os.environ['PATH']}", CXX=""))
    assert found["source"] == "torch" and found["right"] and len(found["warnings"]) == 1
    assert "cannot be loaded" in found["reason"]


@needs_compiler
@pytest.mark.parametrize("kind", ["read-only", "a file is in the way", "full", "no home"])
def test_without_a_cache(kind: str, tmp_path: Path) -> None:
    """The library is built for this process alone, and nothing is left behind."""
    temporary, cache = tmp_path / "tmp", tmp_path / "cache"
    temporary.mkdir()
    env = environment(cache, TMPDIR=str(temporary))
    if kind == "read-only":
        if os.geteuid() == 0:
            pytest.skip("root writes everywhere")
        cache.mkdir(mode=0o555)
    elif kind == "a file is in the way":
        cache.write_text("")
    elif kind == "full":
        for name in ("c++", "g++", "clang++"):
            compiler_that(tmp_path / name, f"*{cache}/*", "No space left on device")
        env |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CXX": ""}
    else:
        env.pop("ZERORUN_CACHE_DIR")
        env["HOME"] = "/dev/null/nowhere"
    found = run(env)
    assert found["right"] and found["source"] == "cached" and not found["warnings"]
    assert "built for this process alone, because" in found["reason"]
    assert not list(temporary.iterdir())


@needs_compiler
def test_home_unset(tmp_path: Path) -> None:
    env = environment(None, XDG_CACHE_HOME=str(tmp_path))
    env.pop("HOME", None)
    assert str(tmp_path / "zerorun") in run(env)["reason"]


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert build.cache_folder({"ZERORUN_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path
    assert build.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/zerorun")
    assert build.cache_folder({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "zerorun"


@pytest.mark.nightly  # by day: test_built_once_and_found_again
@needs_compiler
def test_compiler_without_openmp(cache: Path, tmp_path: Path) -> None:
    env = environment(cache, CXX=compiler_that(tmp_path / "mine", "*-fopenmp*", "unsupported option -fopenmp"))
    found = run(env)
    assert found["right"] and found["source"] == "cached" and "no OpenMP" in found["reason"]


@needs_compiler
def test_library_of_another_version(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version has another name; one under a wrong name is recognised, and so is what is no library at all."""
    compiler = [os.environ["CXX"]]
    name = build.cached_name(compiler)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    assert build.cached_name(compiler) != name
    other = build.source_key()
    monkeypatch.undo()
    assert build.source_key() != other
    cache.mkdir(mode=0o700)
    compile_library('extern "C" const char* zerorun_source() { return "' + other + '"; }', cache / name)
    found = run(environment(cache))
    assert found["right"] and found["source"] == "cached" and not found["warnings"]
    (cache / name).write_text("not a library")
    assert run(environment(cache))["reason"].startswith("built into")
    assert run(environment(cache))["reason"].startswith("found in")


@needs_compiler
def test_instruction_set_by_name(cache: Path) -> None:
    assert run(environment(cache, ZERORUN_ISA="scalar"))["isa"] == "scalar"
    code, _, err = start(environment(cache, ZERORUN_ISA="sse9")).finish()
    assert "ZERORUN_ISA is 'sse9'; on this machine it can be scalar" in err
    assert code


def test_compilers_are_found_once_each(tmp_path: Path) -> None:
    script(tmp_path / "c++", "")
    (tmp_path / "g++").symlink_to(tmp_path / "c++")
    script(tmp_path / "clang++", "")
    found = list(build.compilers({"PATH": str(tmp_path), "CXX": "clang++ -O1"}))
    assert [" ".join([Path(command[0]).name, *command[1:]]) for command in found] == ["clang++ -O1", "c++", "clang++"]


@pytest.mark.nightly
@needs_compiler
def test_setup_builds_it_and_never_fails(tmp_path: Path) -> None:
    """``build_py``, which wheels are made of; in a copy of the tree, with a compiler and without."""
    root = Path(__file__).parents[2]
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(root / name, tree)
    for name in ("zerorun", "ops", "launcher"):
        shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, env in (("with", {}), ("without", {"PATH": str(tmp_path), "CXX": ""})):
        command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", f"../{folder}"]  # as pip: a relative path
        done = subprocess.run(command, cwd=tree, env={**os.environ, **env}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        built = tmp_path / folder / "zerorun" / "ops"
        assert {path.name for path in (built / "csrc").iterdir()} == {path.name for path in build.SOURCES}
        assert (built / "lib" / "native.so").exists() == (folder == "with")
        assert ("no native library: there is no C++ compiler" in done.stderr) == (folder == "without")
    assert native.Library(tmp_path / "with" / "zerorun" / "ops" / "lib" / "native.so").isa in native.ISAS


def test_the_report_shows_it() -> None:
    (entry,) = (op for op in software.describe_software()["native_ops"] if op["name"] == "native optimizer")
    status = native.status()
    assert entry["in_force"] == (status.source != "torch") and status.reason in entry["why"]


# -- what others could have put there ----------------------------------------------------------------------------

# Tells that it was loaded, and pretends to be zerorun's.
ATTACK = """
#include <cstdio>
#include <cstdlib>
__attribute__((constructor)) static void attack() { fclose(fopen(getenv("ATTACKED"), "w")); }
extern "C" const char* zerorun_source() { return KEY; }
"""
OTHER_USER = 65534


def plant(library: Path, tmp_path: Path) -> None:
    """What an attacker puts in place of the library."""
    made = tmp_path / "attack.so"
    compile_library(ATTACK.replace("KEY", f'"{build.source_key()}"'), made)
    library.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(made, library)


def a_file_of_another_user(library: Path, tmp_path: Path) -> None:
    os.chown(library, OTHER_USER, OTHER_USER)


def a_folder_of_another_user(library: Path, tmp_path: Path) -> None:
    os.chown(library.parent, OTHER_USER, OTHER_USER)


def a_file_for_all(library: Path, tmp_path: Path) -> None:
    library.chmod(0o666)


def a_folder_for_all(library: Path, tmp_path: Path) -> None:
    library.parent.chmod(0o777)


def a_folder_for_a_group(library: Path, tmp_path: Path) -> None:
    os.chown(library.parent, -1, OTHER_USER)
    library.parent.chmod(0o770)


def a_folder_above_for_all(library: Path, tmp_path: Path) -> None:
    library.parent.parent.chmod(0o777)


def a_link(library: Path, tmp_path: Path) -> None:
    library.unlink()
    library.symlink_to(tmp_path / "attack.so")


def a_folder_behind_a_link(library: Path, tmp_path: Path) -> None:
    moved = tmp_path / "shared"
    library.parent.rename(moved)
    moved.chmod(0o777)
    library.parent.symlink_to(moved)


ATTACKS = {
    a_file_of_another_user: "belongs to",
    a_folder_of_another_user: "belongs to",
    a_file_for_all: "by all users",
    a_folder_for_all: "by all users",
    a_folder_for_a_group: "by group",
    a_folder_above_for_all: "by all users",
    a_link: "symbolic link",
    a_folder_behind_a_link: "by all users",
}


@needs_compiler
@pytest.mark.parametrize(
    "attack", by_day(ATTACKS, a_file_of_another_user, a_folder_for_a_group, a_folder_above_for_all, a_link)
)
def test_code_of_others_is_not_loaded(attack: Any, tmp_path: Path) -> None:
    if ("another" in attack.__name__ or "group" in attack.__name__) and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    cache, witness = tmp_path / "above" / "cache", tmp_path / "attacked"
    library = cache / build.cached_name(COMPILERS[0])
    plant(library, tmp_path)
    attack(library, tmp_path)
    found = run(environment(cache, ATTACKED=str(witness)))
    assert not witness.exists(), "another user's code ran"
    assert found["right"] and found["source"] == "cached"
    if "for this process alone" in found["reason"] or found["warnings"]:
        assert ATTACKS[attack] in found["warnings"][0] and "Remedy" in found["warnings"][0]


@needs_compiler
def test_what_is_made_is_for_this_user_alone(cache: Path) -> None:
    before = os.umask(0)
    try:
        run(environment(cache))
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700
    assert run(environment(cache))["reason"].startswith("found in")
