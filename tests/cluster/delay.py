"""A cable that takes its time: relays frames between two network interfaces, each later by some milliseconds.

    python delay.py INTERFACE INTERFACE MILLISECONDS

Not every kernel can delay packets (tc netem), so this does it from outside. Frames travel with the kernel's own note about
unfinished checksums and segments (PACKET_VNET_HDR), so that large ones cross whole.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import time
from collections import deque

_ALL_PROTOCOLS = 3
_SOL_PACKET, _ADD_MEMBERSHIP, _VNET_HDR, _PROMISCUOUS = 263, 1, 15, 1
_OUTGOING = 4


def attach(interface: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    end.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    end.bind((interface, _ALL_PROTOCOLS))
    request = struct.pack("IHH8s", socket.if_nametoindex(interface), _PROMISCUOUS, 0, b"")
    end.setsockopt(_SOL_PACKET, _ADD_MEMBERSHIP, request)
    return end


def relay(names: list[str], delay_s: float) -> None:
    ends = [attach(name) for name in names]
    waiting: deque[tuple[float, socket.socket, bytes]] = deque()
    print("ready", flush=True)
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for end in select.select(ends, [], [], patience)[0]:
            frame, address = end.recvfrom(1 << 17)
            if address[2] != _OUTGOING:
                waiting.append((time.monotonic() + delay_s, ends[1 - ends.index(end)], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            try:
                end.send(frame)
            except OSError:  # the other side is down: the frame is lost, as on a cable
                continue


if __name__ == "__main__":
    relay(sys.argv[1:3], float(sys.argv[3]) / 1000)
