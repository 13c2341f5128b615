"""Packaging: ``ops/`` and ``launcher/`` are the packages ``zerorun.ops`` and ``zerorun.launcher``."""

from setuptools import find_packages, setup

ROOTS = {"zerorun": "zerorun", "zerorun.ops": "ops", "zerorun.launcher": "launcher"}


def packages() -> list[str]:
    """Every package under the three roots, by its import name."""
    found = []
    for name, folder in ROOTS.items():
        found += [name] + [f"{name}.{sub}" for sub in find_packages(folder)]
    return found


setup(
    name="zerorun",
    version="0.1.0",
    description="Train models too large for one device from one JSON file: ZeRO stages 0-3 for unmodified PyTorch modules",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir=ROOTS,
    packages=packages(),
    package_data={"zerorun": ["py.typed"]},
    scripts=[],
    install_requires=[
        "torch>=2.11,<2.14",
        "numpy",
        "pydantic>=2.7",
        "psutil",
        "py-cpuinfo",
        "ninja",
        "safetensors",
        "tqdm",
        "matplotlib",
    ],
    extras_require={
        "test": ["pytest", "hypothesis", "transformers>=5,<6", "peft", "accelerate", "torchdata", "ruff", "mypy"],
        "bench": ["deepspeed==0.19.8"],
        "tensorboard": ["tensorboard"],
    },
    entry_points={
        "console_scripts": [
            "zerorun = zerorun.launcher.cli:main",
            "zerorun-checkpoint = zerorun.checkpoint.cli:main",
            "zerorun-report = zerorun.report.cli:main",
        ],
    },
)
