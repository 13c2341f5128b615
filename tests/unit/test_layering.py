"""The layers of the package: imports point downwards only, and some files need no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Module -> layer. A module may import from its own layer as long as there is no cycle, and from lower ones.
LAYERS = {
    "errors": 0,
    "log": 0,
    "waits": 0,
    "batch": 1,
    "config": 1,
    "config_fields": 1,
    "config_params": 1,
    "config_rules": 1,
    "config_schema": 1,
    "config_sections": 1,
    "config_source": 1,
    "config_walk": 1,
    "schedules": 1,
    "huge_pages": 1,
    "zero.layout": 1,
    "zero.order": 1,
    "zero.spread": 1,
    "zero.policy": 1,
    "arguments": 1,
    "wire": 1,
    "process_topology": 1,
    "topology_picture": 1,
    "topology": 2,
    "channel": 2,
    "mpu": 2,
    "comm": 2,
    "mapped_shards": 2,
    "open_shards": 2,
    "peer_memory": 2,
    "ops": 2,
    "ops.adam": 2,
    "ops.aio": 2,
    "ops.build": 1,
    "ops.token_loss": 2,
    "ops.lion": 2,
    "ops.native": 2,
    "ops.on_cuda": 2,
    "ops.operands": 2,
    "ops.single_pass": 2,
    "ops.torch_path": 2,
    "ops.triton_kernels": 2,
    "pipeline.build": 4,
    "pipeline.executor": 4,
    "pipeline.layers": 1,
    "pipeline.messages": 2,
    "pipeline.split_backward": 3,
    "pipeline.measure": 4,
    "pipeline.module": 4,
    "pipeline.observe": 4,
    "pipeline.partition": 1,
    "pipeline.pipelined": 4,
    "pipeline.pretrained": 4,
    "pipeline.probe": 4,
    "pipeline.stages": 2,
    "pipeline.views": 4,
    "precision": 3,
    "loss_given": 1,
    "same_data": 1,
    "tensor_parallel": 3,
    "tensor_parallel.__main__": 3,
    "tensor_parallel.axis": 3,
    "tensor_parallel.causal_loss": 3,
    "tensor_parallel.collectives": 3,
    "tensor_parallel.convert": 3,
    "tensor_parallel.describe": 3,
    "tensor_parallel.heads": 3,
    "tensor_parallel.hooks": 3,
    "tensor_parallel.infer": 3,
    "tensor_parallel.layers": 3,
    "tensor_parallel.loss": 3,
    "tensor_parallel.parallelized": 3,
    "tensor_parallel.pairs": 3,
    "tensor_parallel.plan": 3,
    "tensor_parallel.probe": 3,
    "tensor_parallel.random": 3,
    "tensor_parallel.sequence": 3,
    "tensor_parallel.share": 3,
    "tensor_parallel.styles": 3,
    "tensor_parallel.threads": 3,
    "zero": 3,
    "zero.access": 3,
    "zero.gradients": 3,
    "zero.host_memory": 3,
    "zero.init": 3,
    "zero.host_updates": 3,
    "zero.norm": 3,
    "zero.outside_step": 3,
    "zero.partition": 3,
    "zero.pieces": 3,
    "zero.placeholders": 3,
    "zero.placement": 3,
    "zero.report": 3,
    "zero.runtime": 3,
    "zero.same_request": 1,
    "zero.swap": 3,
    "zero.stepping": 3,
    "zero.unit": 3,
    "zero.weights": 3,
    "pipeline": 1,
    "pipeline.actions": 1,
    "pipeline.cli": 5,
    "pipeline.formulas": 1,
    "pipeline.schedules": 1,
    "pipeline.simulate": 1,
    "pipeline.timeline": 1,
    "pipeline.times": 1,
    "pipeline.trace": 1,
    "pipeline.zero_bubble": 1,
    "activations": 4,
    "activations.blocks": 4,
    "activations.host": 4,
    "activations.region": 4,
    "activations.selective": 4,
    "checkpointing": 4,
    "dataloader": 4,
    "optim": 4,
    "checkpoint": 4,
    "checkpoint.adapters": 4,
    "checkpoint.checkpointer": 4,
    "checkpoint.cli": 5,
    "checkpoint.cli_choose": 5,
    "checkpoint.cli_diff": 5,
    "checkpoint.cli_export": 5,
    "checkpoint.cli_folder": 5,
    "checkpoint.cli_import": 5,
    "checkpoint.cli_inspect": 5,
    "checkpoint.cli_salvage": 5,
    "checkpoint.cli_verify": 5,
    "checkpoint.collect": 4,
    "checkpoint.cuts": 4,
    "checkpoint.directory": 4,
    "checkpoint.files": 4,
    "checkpoint.foreign": 4,
    "checkpoint.from_dcp": 4,
    "checkpoint.from_deepspeed": 4,
    "checkpoint.given": 4,
    "checkpoint.inventory": 4,
    "checkpoint.load": 4,
    "checkpoint.manifest": 4,
    "checkpoint.merging": 4,
    "checkpoint.offline": 4,
    "checkpoint.pickles": 4,
    "checkpoint.plain": 4,
    "checkpoint.plan": 4,
    "checkpoint.pretrained": 4,
    "checkpoint.random_state": 4,
    "checkpoint.ranks": 4,
    "checkpoint.read": 4,
    "checkpoint.routine": 4,
    "checkpoint.save": 4,
    "checkpoint.stream": 4,
    "checkpoint.tensorfile": 4,
    "checkpoint.torch_files": 4,
    "checkpoint.write": 4,
    "disks": 4,
    "estimate": 4,
    "fitting": 4,
    "intake": 4,
    "limits": 1,
    "moments": 4,
    "parallel": 4,
    "parts": 4,
    "plan": 4,
    "receiving": 4,
    "sizing": 4,
    "engine": 5,
    "label_counts": 1,
    "loop_queries": 5,
    "pipeline_engine": 5,
    "assemble": 5,
    "report": 5,
    "report.checks": 5,
    "report.cli": 5,
    "report.collect": 5,
    "report.exchanges": 5,
    "report.finding": 5,
    "report.findings": 5,
    "report.findings_live": 5,
    "report.host": 5,
    "report.lines": 5,
    "report.live": 5,
    "report.machine": 5,
    "report.page": 5,
    "report.reporter": 5,
    "report.software": 5,
    "report.speed": 5,
    "launcher": 0,
    "launcher.bootstrap": 1,
    "launcher.plan": 3,
    "launcher.report": 3,
    "launcher.hosts": 2,
    "launcher.escapes": 2,
    "launcher.line": 2,
    "launcher.secret": 4,
    "launcher.loop": 2,
    "launcher.facts": 2,
    "launcher.screen": 2,
    "launcher.node": 4,
    "launcher.agent": 4,
    "launcher.carriers": 4,
    "launcher.remote": 4,
    "launcher.job": 4,
    "launcher.by_hand": 4,
    "launcher.sbatch": 4,
    "launcher.cli": 5,
}
NO_TORCH = {name for name, layer in LAYERS.items() if name.startswith(("launcher", "config", "zero.layout", "zero.order"))}
NO_TORCH |= {"errors", "limits", "log", "batch", "arguments", "zero.policy", "ops.build"}
NO_TORCH |= {"process_topology", "topology_picture"}
NO_TORCH |= {"pipeline", "pipeline.actions", "pipeline.cli", "pipeline.formulas", "pipeline.schedules", "pipeline.simulate"}
NO_TORCH |= {"pipeline.timeline", "pipeline.times", "pipeline.trace", "pipeline.zero_bubble"}
NO_TORCH |= {"pipeline", "pipeline.partition"}


def sources() -> dict[str, Path]:
    """Every module of the package, by its name after "zerorun."."""
    found = {}
    for folder, prefix in (("zerorun", ""), ("ops", "ops."), ("launcher", "launcher.")):
        for path in (ROOT / folder).rglob("*.py"):
            name = prefix + ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            found[name.removesuffix("__init__").removesuffix(".")] = path
    found.pop("", None)
    return found


def imports(name: str, path: Path) -> Iterator[str]:
    """Full names of what a file imports, function-local imports included; relative names resolved."""
    package = ["zerorun", *name.split(".")]
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def own_imports(name: str, path: Path) -> set[str]:
    known = sources()
    found = {full.removeprefix("zerorun.") for full in imports(name, path) if full.startswith("zerorun.")}
    return {target for target in found if target in known and target != name}


def test_every_module_has_a_layer() -> None:
    assert sorted(sources()) == sorted(LAYERS)


def test_imports_point_downwards() -> None:
    upward = [
        f"{name} (layer {LAYERS[name]}) imports {target} (layer {LAYERS[target]})"
        for name, path in sources().items()
        for target in own_imports(name, path)
        if LAYERS[target] > LAYERS[name]
    ]
    assert not upward


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
    known = sources()
    for name in NO_TORCH:
        assert not [full for full in imports(name, known[name]) if full.split(".")[0] == "torch"], name


def test_ops_and_launcher_keep_to_themselves() -> None:
    allowed = {"launcher": {"errors", "log", "config"}, "ops": set()}
    for name, path in sources().items():
        top = name.split(".")[0]
        if top in allowed:
            outside = {target.split(".")[0] for target in own_imports(name, path)} - {top} - allowed[top]
            assert not outside, f"{name} imports {outside}"


def test_nobody_imports_the_bare_roots() -> None:
    """``import ops`` works from a checkout's root by accident, and would be a second copy of zerorun.ops."""
    for path in [*ROOT.glob("*/**/*.py")]:
        if "build" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
        names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and not n.level]
        assert not [name for name in names if name.split(".")[0] in ("ops", "launcher")], path
