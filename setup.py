"""Packaging: ``ops/`` and ``launcher/`` are the packages ``zerorun.ops`` and ``zerorun.launcher``.

The native library is built into the package if the machine has a compiler; if not, zerorun builds it at first use, or does
without. Editable installations always build at first use, so that the library follows the source.
"""

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

# Read by Python at each start, if it lies where packages are installed: begins the DeepSpeed mode where it is asked for.
STARTUP = "zerorun/deepspeed/zerorun-as-deepspeed.pth"
ROOTS = {"zerorun": "zerorun", "zerorun.ops": "ops", "zerorun.launcher": "launcher"}


def packages(roots) -> list[str]:
    """Every package under the roots, by its import name."""
    found = []
    for name, folder in roots.items():
        found += [name] + [f"{name}.{sub}" for sub in find_packages(folder)]
    return found


def ops_build():
    """``ops/build.py`` as a module; zerorun itself cannot be imported before it is installed."""
    spec = importlib.util.spec_from_file_location("ops_build", Path(__file__).parent / "ops" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildNative(build_py):
    """Python files, STARTUP, and the native library; a library that cannot be built fails nothing."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        self.copy_file(STARTUP, os.path.join(self.build_lib, os.path.basename(STARTUP)))
        build, reasons = ops_build(), []
        for compiler in build.compilers(os.environ):
            try:
                build.build(compiler, Path(self.build_lib, "zerorun", "ops", *build.INSTALLED.parts[-2:]))
                return
            except build.BuildError as error:
                reasons.append(str(error))
        print("zerorun: no native library:", "; ".join(reasons) or "there is no C++ compiler", file=sys.stderr)


class NativeDistribution(Distribution):
    """With a compiler, the wheel is for this kind of machine only."""

    def has_ext_modules(self):
        return any(True for _ in ops_build().compilers(os.environ))

    def has_data(self):
        """An editable installation asks for this, and then installs ``data_files``."""
        return self.has_data_files()


if sys.platform != "linux":
    print(
        "zerorun needs Linux: on macOS one process may train on the CPU, which nobody has tried; the launcher, the memory "
        "that ranks share and offload to disks do not work there. On Windows use WSL 2.",
        file=sys.stderr,
    )

# An editable installation is a line in a .pth file, which type checkers follow, and not an import hook, which they do not.
# In a checkout zerorun/__init__.py finds ops/ and launcher/ by itself.
editable = bool({"editable_wheel", "develop"} & set(sys.argv))
packages_folder = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))

setup(
    distclass=NativeDistribution,
    cmdclass={"build_py": BuildNative},
    name="zerorun",
    version="0.1.0",
    description="Train models too large for one device from one JSON file: ZeRO stages 0-3 for unmodified PyTorch modules",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    package_dir={"": "."} if editable else ROOTS,
    packages=packages({"zerorun": "zerorun"} if editable else ROOTS),
    package_data={
        "zerorun": ["py.typed"],
        "zerorun.deepspeed": ["*.pth"],
        "zerorun.ops": ["csrc/*.cpp"],
        "zerorun.planner": ["*.json"],
    },
    data_files=[(packages_folder, [STARTUP])] if editable else [],
    scripts=[],
    setup_requires=["ninja"],  # for the native library
    install_requires=[
        "torch>=2.11,<2.15",
        "numpy>=1.24",
        "pydantic>=2.7",
        "psutil>=5.9",
        "py-cpuinfo",
        "ninja",
        "safetensors>=0.4",
        "tqdm",  # for the examples
        "matplotlib>=3.8",
    ],
    extras_require={
        "test": [
            "pytest",
            "pytest-xdist",
            "hypothesis",
            "transformers>=5,<5.23",  # from 5.23 on it needs peft 0.22, which is not out
            "peft",
            "accelerate",
            "torchdata",
            "bitsandbytes",
            "torchao",
            "schedulefree",
            "tensorboard",
            "ruff",
            "mypy",
            "triton; platform_system == 'Linux' and platform_machine == 'x86_64'",  # comes with PyTorch for CUDA only
        ],
        "clients": ["trl", "lightning"],  # trainers that tests of the night try
        "fp8": ["torchao"],
        "bench": ["deepspeed==0.19.8"],
        "docs": ["mkdocs-material", "mkdocstrings[python]"],
        "tensorboard": ["tensorboard"],
    },
    entry_points={
        "console_scripts": [
            "zerorun = zerorun.launcher.cli:main",
            "zerorun-checkpoint = zerorun.checkpoint.cli:main",
            "zerorun-plan = zerorun.planner.cli:main",
            "zerorun-report = zerorun.report.cli:main",
            "zerorun-schedule = zerorun.pipeline.cli:main",
        ],
    },
)
