"""What ZeRO++'s keys save between hosts: seconds and bytes of a step, over a slow link between two hosts of two ranks.

    python tests/perf/two_hosts.py [--megabits 200] [--steps 4]

It needs root: a host is a network namespace, and the link between them a pair of interfaces with a limited rate (tc tbf).
Ranks send messages through gloo, also within a host. The model has 8.4M parameters in 8 blocks, in bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerorun

HOSTS, RANKS = ("zerorun-one", "zerorun-two"), 2  # of each host
INTERFACES, PORT = ("zrwire0", "zrwire1"), 29617
QUANTISED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain stage 3": {},
    "second copy": {"zero_hpz_partition_size": RANKS},
    "weights in int8": {"zero_quantized_weights": True},
    "gradients in 4 bits": {"zero_quantized_gradients": True},
    "both in codes": QUANTISED,
    "all three": {"zero_hpz_partition_size": RANKS, **QUANTISED},
    "all, with feedback": {"zero_hpz_partition_size": RANKS, **QUANTISED, "zeropp_loco_param": {}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return found


def measure(steps: int, accumulation: int) -> dict[str, tuple[float, float]]:
    """Of each setting: (seconds of a step, the fastest; megabytes that this host sends in it)."""
    sent = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes")
    found = {}
    for name, zero in SETTINGS.items():
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": accumulation,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, **zero},
        }
        engine = zerorun.initialize(nn.Sequential(*(Block() for _ in range(8))), config)
        times, before = [], 0
        for step in range(steps + 2):
            before = int(sent.read_text()) if step == 2 else before
            begun = time.perf_counter()
            for _ in range(accumulation):
                engine.backward(engine(torch.randn(4, 512, dtype=torch.bfloat16)).float().square().mean())
                engine.step()
            times.append(time.perf_counter() - begun)
        found[name] = min(times[2:]), (int(sent.read_text()) - before) / steps / 1e6
        engine.destroy()
    return found


def run(*command: str) -> None:
    subprocess.run(command, check=True)


@contextmanager
def hosts(megabits: int) -> Iterator[None]:
    """Two namespaces with a link between them."""
    try:
        for host in HOSTS:
            run("ip", "netns", "add", host)
        one, two = INTERFACES
        run("ip", "link", "add", one, "netns", HOSTS[0], "type", "veth", "peer", "name", two, "netns", HOSTS[1])
        for number, (host, interface) in enumerate(zip(HOSTS, INTERFACES, strict=True)):
            inside = ("ip", "netns", "exec", host)
            run(*inside, "ip", "address", "add", f"10.77.0.{number + 1}/24", "dev", interface)
            for each in (interface, "lo"):
                run(*inside, "ip", "link", "set", each, "up")
            rate = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "500ms")
            run(*inside, "tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate)
        yield
    finally:
        for host in HOSTS:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "delete", host)


def start(rank: int, steps: int, accumulation: int) -> subprocess.Popen[str]:
    host, local = divmod(rank, RANKS)
    ranks = {"RANK": rank, "WORLD_SIZE": 2 * RANKS, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": RANKS}
    near = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACES[host]}
    more = {"ZERORUN_PEER_MEMORY": 0, "ZERORUN_DEVICE": "cpu", "OMP_NUM_THREADS": 1}
    environment = os.environ | {key: str(value) for key, value in (ranks | near | more).items()}
    command = ["ip", "netns", "exec", HOSTS[host], sys.executable, __file__, "--rank", "--steps", str(steps)]
    command += ["--accumulation", str(accumulation)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, default=200, help="of the link, per second and direction")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        found = measure(options.steps, options.accumulation)
        print(json.dumps(found) if os.environ["RANK"] == "0" else "")
        return
    with hosts(options.megabits):
        ranks = [start(rank, options.steps, options.accumulation) for rank in range(2 * RANKS)]
        answers = [rank.communicate()[0] for rank in ranks]
    table = json.loads(answers[0].splitlines()[-1])
    plain = table["plain stage 3"][0]
    print(f"{options.megabits} Mbit/s, {options.accumulation} micro-batches\n")
    print("| setting | s | MB that a host sends | times as fast |\n|---|---:|---:|---:|")
    for name, (seconds, megabytes) in table.items():
        print(f"| {name} | {seconds:.2f} | {megabytes:.1f} | {plain / seconds:.1f} |")


if __name__ == "__main__":
    main()
