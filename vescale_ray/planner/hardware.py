"""Devices and the links between them, and the time of a collective over these links.

The constants of :data:`HARDWARE` are the vendors' figures, not measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Devices and the links between them.

    Attributes:
        memory: bytes of one device.
        flops: dense BF16 operations per second of one device.
        memory_bandwidth: bytes per second of device memory.
        link: bytes per second, one way, from one device to the others of its node.
        network: bytes per second, one way, of one device's share of the network between nodes.
        node: devices of a node.
        efficiency: fraction of ``flops`` that matrix products reach.
        bus_efficiency: fraction of the links' bandwidth that collectives reach.
        latency: seconds that a collective takes for each doubling of the group, within a node and between nodes.
    """

    name: str
    memory: int
    flops: float
    memory_bandwidth: float
    link: float
    network: float
    node: int = 8
    efficiency: float = 0.5
    bus_efficiency: float = 0.8
    latency: tuple[float, float] = (3e-6, 1.2e-5)


_GB = 1_000_000_000
# Sources are the vendors' data sheets: dense BF16 without sparsity. NVLink is quoted for both directions, so half of it counts. Each
# device has one network adapter of 400 Gb/s (A100: 200 Gb/s), as in the vendors' eight-device systems.
HARDWARE: dict[str, Hardware] = {
    "a100": Hardware("a100", 80 << 30, 312e12, 2.0e12, 300 * _GB, 25 * _GB),  # NVIDIA A100 data sheet; DGX A100
    "h100": Hardware("h100", 80 << 30, 989e12, 3.35e12, 450 * _GB, 50 * _GB),  # NVIDIA H100 data sheet; DGX H100
    "h800": Hardware("h800", 80 << 30, 989e12, 3.35e12, 200 * _GB, 50 * _GB),  # DeepSeek-V3 report: NVLink 400 GB/s both ways
    "h200": Hardware("h200", 141 * _GB, 989e12, 4.8e12, 450 * _GB, 50 * _GB),  # NVIDIA H200 data sheet
    "b200": Hardware("b200", 180 * _GB, 2250e12, 8.0e12, 900 * _GB, 50 * _GB),  # NVIDIA DGX B200 data sheet
}

MISALIGNED = 12.0
"""Slowdown of an all-gather whose buffers are not a multiple of 16 bytes ([veScale-FSDP]; NVIDIA/nccl#413)."""


def collective_time(size: float, group: int, hardware: Hardware, *, rank_bytes: int | None = None, stride: int = 1) -> float:
    """Return the seconds of an all-gather or reduce-scatter of ``size`` bytes in total over ``group`` ranks that are ``stride`` devices
    apart.

    Latency grows with the logarithm of the group. The narrower link sets the bandwidth: the link inside a node, or the node's network
    adapters together. If ``rank_bytes`` is not a multiple of 16, the collective is :data:`MISALIGNED` times slower.
    """
    if group <= 1 or size <= 0:
        return 0.0
    inside = max(1, min(group, hardware.node // stride))
    nodes = -(-group // inside)
    links = size * (group - 1) / group / (hardware.link * hardware.bus_efficiency)
    if inside == 1:
        links = 0.0
    network = size * (nodes - 1) / nodes / (inside * hardware.network * hardware.bus_efficiency)
    latency = hardware.latency[0] * math.log2(inside) + hardware.latency[1] * math.log2(max(nodes, 1))
    slow = MISALIGNED if rank_bytes is not None and rank_bytes % 16 else 1.0
    return latency + max(links, network) * slow


def exchange_time(size: float, group: int, hardware: Hardware) -> float:
    """Return the seconds of an all-to-all in which each of ``group`` neighbouring ranks sends ``size`` bytes in equal parts, one of them to
    itself."""
    if group <= 1 or size <= 0:
        return 0.0
    inside = min(group, hardware.node)
    links = size * (inside - 1) / group / (hardware.link * hardware.bus_efficiency)
    network = size * (group - inside) / group / (hardware.network * hardware.bus_efficiency)
    return hardware.latency[0] * math.log2(inside) + hardware.latency[1] * math.log2(-(-group // inside)) + max(links, network)
