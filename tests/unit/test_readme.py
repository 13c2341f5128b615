"""The README and the example configurations: what a user copies must work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zerorun.config.parse import load_config, resolve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.json"))
QUICK_START = [
    "pip install -e . && zerorun --nproc-per-node 2 examples/train_gpt.py --config examples/configs/zero3.json",
    "pip install -e '.[test]' && pytest",
]


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def default_steps(config: str) -> int:
    of_others = {
        "3d": ("train_3d.py", r'config="3d", steps=(\d+)'),
        "moe": ("train_moe.py", r'"--steps", type=int, default=(\d+)'),
    }
    script, pattern = of_others.get(config, ("train_gpt.py", r"steps: int = (\d+)"))
    found = re.search(pattern, (ROOT / "examples" / script).read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1])


def test_quick_start_has_exactly_the_two_blocks() -> None:
    section = README.split("\n## Quick start\n")[1].split("\n## ")[0]
    assert fenced_blocks(section) == [("bash", f"{command}\n") for command in QUICK_START]


def test_paths_in_the_readme_exist() -> None:
    paths = {path for path in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in path}
    paths |= set(re.findall(r"\bexamples/[\w/]+\.\w+", README))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_all_configurations_are_there() -> None:
    assert [path.stem for path in CONFIGS] == ["3d", "bf16", "fp16", "moe", "zero0", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_configuration_resolves(path: Path, ranks: int) -> None:
    config = resolve(load_config(path), data_parallel_size=ranks)
    assert config.train_batch_size == config.train_micro_batch_size_per_gpu * config.gradient_accumulation_steps * ranks
    assert config.notes == ()
    assert config.scheduler is not None
    assert config.scheduler.params["total_num_steps"] == default_steps(path.stem)
    if path.stem.startswith("zero"):
        assert config.zero_optimization.stage == int(path.stem[-1])
    elif path.stem == "3d":
        assert (config.tensor_parallel.size, config.pipeline.stages) == (2, 2)
    elif path.stem == "moe":
        assert config.expert_parallel.size == 2
    else:
        assert getattr(config, path.stem).enabled
