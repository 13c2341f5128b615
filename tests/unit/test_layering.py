"""The house: each folder has its place, imports point downwards only, and some files need no torch."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The folders (and the files at the top) from the ground up. Each may import from those before it. A row is a floor: the
# folders of one floor know nothing of each other.
FLOORS = (
    ("errors",),
    ("log", "import_paths", "ops"),
    ("config", "watch"),
    ("distributed", "launcher"),
    ("distributed.transport",),
    ("data", "optim", "zero.offload", "pipeline.schedule"),
    ("plan",),
    ("zero", "activations"),
    ("pipeline", "tensor_parallel"),
    ("context_parallel", "expert_parallel"),
    ("model_setup",),
    ("checkpoint", "memory", "monitors"),
    ("planner", "verify"),
    ("checkpoint.importers", "engine"),
    ("checkpoint.cli", "report", "__main__"),
    ("deepspeed",),
    ("integrations",),
)
FLOOR_OF = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
MOST_AT_THE_TOP = 5  # modules beside __init__.py
# Folders, and modules of others, that import no torch: they are needed where there is none, or before it is imported.
NO_TORCH = ("launcher", "config", "watch", "errors", "log", "import_paths", "pipeline.schedule", "ops.build")
NO_TORCH += ("distributed.layout", "distributed.process_topology", "distributed.topology_picture", "memory.limits")
NO_TORCH += ("plan.stage_policy", "plan.placement")
NO_TORCH += tuple(f"planner.{name}" for name in ["answer", "calibration", "candidate", "cli", "footprint", "hardware"])
NO_TORCH += tuple(f"planner.{name}" for name in ["kernels", "links", "model_configs", "model_shape"])
NO_TORCH += tuple(
    f"planner.{name}"
    for name in ["memory_picture", "published_runs", "search", "states_at_rest", "step_time", "block_time"]
)
NO_TORCH += ("deepspeed.activation", "deepspeed.arguments", "deepspeed.launcher_names", "deepspeed.name_table")
NO_TORCH += ("pipeline.partition", "pipeline.cli")
# Names of files that mean the same wherever they are.
USUAL = {"__init__", "__main__", "cli"}


# Who may speak of devices, and who of torch's collectives. The kernels of ops choose by the type of a tensor's device.
KNOW_DEVICES, KNOW_COLLECTIVES = ("distributed.device", "ops"), ("distributed.transport",)
COLLECTIVES = {
    *("P2POp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier"),
    *("all_to_all_single", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv", "isend", "recv"),
    *("reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send"),
}
OF_GROUPS = {"_allgather_base", "_reduce_scatter_base", "allgather", "allreduce", "alltoall"}


@cache
def parsed(path: Path) -> ast.Module:
    """What is in a file. Nobody changes it."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All of it, in the order of ``ast.walk``, which takes as long as to parse it."""
    return [*ast.walk(parsed(path))]


@pytest.fixture(scope="module", autouse=True)
def _forgotten() -> Iterator[None]:
    """Half a million objects would be looked through by every collection of garbage that follows."""
    yield
    parsed.cache_clear()
    nodes.cache_clear()


@cache
def sources() -> dict[str, Path]:
    """Every module of the package, by its name after "zerorun."."""
    found = {}
    for folder, prefix in (("zerorun", ""), ("ops", "ops."), ("launcher", "launcher.")):
        for path in (ROOT / folder).rglob("*.py"):
            name = prefix + ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            found[name.removesuffix("__init__").removesuffix(".")] = path
    found.pop("", None)
    return found


def folder_of(name: str, path: Path) -> str:
    """The folder of a module; a file at the top is one by itself."""
    if path.name == "__init__.py" or "." not in name:
        return name
    return name.rpartition(".")[0]


def imports(name: str, path: Path) -> Iterator[str]:
    """Full names of what a file imports, function-local imports included; relative names resolved."""
    package = ["zerorun", *name.split(".")]
    if path.name != "__init__.py":
        package.pop()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@cache
def own_imports(name: str, path: Path) -> set[str]:
    known = sources()
    found = {full.removeprefix("zerorun.") for full in imports(name, path) if full.startswith("zerorun.")}
    return {target for target in found if target in known and target != name}


def test_every_folder_has_a_place() -> None:
    assert sorted({folder_of(name, path) for name, path in sources().items()}) == sorted(FLOOR_OF)


def test_imports_point_downwards() -> None:
    known = sources()
    upward = []
    for name, path in known.items():
        for target in own_imports(name, path):
            here, there = folder_of(name, path), folder_of(target, known[target])
            # A package that is imported only on the way to a module in it does nothing. Nobody imports a __main__.
            inside = here == there or here.startswith(f"{there}.") or name.endswith("__main__")
            if not inside and FLOOR_OF[there] >= FLOOR_OF[here]:
                upward.append(f"{name} (floor {FLOOR_OF[here]}) imports {target} (floor {FLOOR_OF[there]})")
    assert not upward


def test_few_modules_lie_at_the_top() -> None:
    at_the_top = [name for name, path in sources().items() if path.parent == ROOT / "zerorun" and path.suffix == ".py"]
    assert len(at_the_top) <= MOST_AT_THE_TOP, at_the_top


def test_a_name_means_one_thing() -> None:
    files = Counter(path.stem for path in sources().values())
    assert not [name for name, count in files.items() if count > 1 and name not in USUAL]
    classes: Counter[str] = Counter()
    for path in sources().values():
        classes.update(node.name for node in parsed(path).body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in classes.items() if count > 1]


def test_no_import_cycles() -> None:
    graph = {name: own_imports(name, path) for name, path in sources().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_configuration_and_launcher_import_no_torch() -> None:
    for name, path in sources().items():
        if name in NO_TORCH or folder_of(name, path) in NO_TORCH:
            assert not [full for full in imports(name, path) if full.split(".")[0] == "torch"], name


def test_ops_and_launcher_keep_to_themselves() -> None:
    allowed = {"launcher": {"errors", "log", "config", "watch"}, "ops": set()}
    for name, path in sources().items():
        top = name.split(".")[0]
        if top in allowed:
            outside = {target.split(".")[0] for target in own_imports(name, path)} - {top} - allowed[top]
            assert not outside, f"{name} imports {outside}"


def devices(path: Path) -> Iterator[str]:
    """What a file says of CUDA and of types of devices."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            if node.attr == "is_cuda" or (node.attr == "cuda" and ast.unparse(node) == "torch.cuda"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            constants = [side.value for side in node.comparators if isinstance(side, ast.Constant)]
            if isinstance(node.left, ast.Attribute) and node.left.attr == "type" and {"cpu", "cuda"} & {*constants}:
                yield ast.unparse(node)


def collectives(path: Path) -> Iterator[str]:
    """Those of torch that a file calls."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute):
            of_torch = node.attr in COLLECTIVES and ast.unparse(node.value) in ("dist", "torch.distributed")
            if of_torch or node.attr in OF_GROUPS:
                yield ast.unparse(node)


def test_devices_and_collectives_have_one_place() -> None:
    for what, places, one in (
        (devices, KNOW_DEVICES, "distributed.device"),
        (collectives, KNOW_COLLECTIVES, "distributed.transport.world"),
    ):
        found = {name: [*what(path)] for name, path in sources().items()}
        inside = {name for name in found if any(f"{name}.".startswith(f"{place}.") for place in places)}
        assert not {name: said for name, said in found.items() if said and name not in inside}
        assert found[one]


def test_nobody_imports_the_bare_roots() -> None:
    """``import ops`` works from a checkout's root by accident, and would be a second copy of zerorun.ops."""
    for path in [*ROOT.glob("*/**/*.py")]:
        if "build" in path.parts or not re.search(
            r"^\s*(?:import|from) .*\b(?:ops|launcher)\b", path.read_text(), re.MULTILINE
        ):
            continue
        names = [a.name for n in nodes(path) if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in nodes(path) if isinstance(n, ast.ImportFrom) and not n.level]
        assert not [name for name in names if name.split(".")[0] in ("ops", "launcher")], path
