"""Run DeepSpeed's examples on two ranks on the CPU, with no changed line, from a checkout of DeepSpeedExamples.

    python tests/clients/their_examples.py PATH/TO/CHECKOUT [cifar] [pipeline_parallelism] [HelloDeepSpeed]

They want GPUs, torchvision and a hub's data: on_cpu/ has what they find instead. HelloDeepSpeed needs fire, loguru, pytz
and sh, which the registry has. Each line that is printed is an example, its arguments, and "runs" or the end of its output.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PIPELINE = "--deepspeed_config=ds_config.json --steps=2"
BERT = "--max_seq_length=16 --num_layers=2 --num_heads=2 --ff_dim=32 --h_dim=16 --batch_size=4 --log_every=2"
# Example -> its script, and the arguments of each run. What a run leaves in its folder, the next finds.
RUNS: dict[str, tuple[str, list[str]]] = {
    "cifar": (
        "cifar10_deepspeed.py",
        [f"--deepspeed -e 2 --log-interval 2 --stage {stage} --dtype {dtype}" for stage in range(4)
         for dtype in ("fp32", "bf16", "fp16")] + ["--deepspeed -e 1 --dtype fp32 --moe-param-group"],
    ),
    "pipeline_parallelism": ("train.py", [f"{PIPELINE} -p {stages}" for stages in (0, 1, 2)]),
    "HelloDeepSpeed": (
        "train_bert_ds.py",
        [f"{BERT} --checkpoint_dir=out_{dtype} --num_iterations=6 --checkpoint_every=3 --dtype={dtype}"
         for dtype in ("bf16", "fp16")]
        + [f"{BERT} --load_checkpoint_dir=SAVED --num_iterations=8 --dtype=fp16"],
    ),
}  # fmt: skip


def run(folder: Path, script: str, arguments: str) -> str:
    """Run it there; return "runs", or how its output ends."""
    environment = {**os.environ, "ZERORUN_THEIR_EXAMPLE": folder.name, "ZERORUN_DEVICE": "cpu", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE / "on_cpu"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "zerorun.launcher.cli", "--as-deepspeed", "--nproc-per-node", "2", script]
    saved = next((str(path.relative_to(folder)) for path in folder.glob("out_fp16/*")), "")
    words = [word.replace("SAVED", saved) for word in arguments.split()]
    done = subprocess.run([*command, *words], cwd=folder, env=environment, capture_output=True, text=True)
    return "runs" if done.returncode == 0 else (done.stdout + done.stderr)[-4000:]


def main(checkout: str, *names: str) -> int:
    """Run the examples that are named, or all; return how many runs failed."""
    failed = 0
    for name in names or RUNS:
        script, runs = RUNS[name]
        with tempfile.TemporaryDirectory() as room:
            folder = Path(shutil.copytree(Path(checkout, "training", name), Path(room, name)))
            for arguments in runs:
                result = run(folder, script, arguments)
                failed += result != "runs"
                print(f"{name} {arguments}: {result}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 1))
