"""What the engine's limits leave for rows and codes, by its defaults.

The engine's own definitions are `DefaultMemoryLimit` (services/config/settings.cc),
`MemoryBudget::MessageShare` and `Home::Open` for host memory, `CudaDevice::Create` and
`WorkspaceShares::Of` for GPU memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from spillway_kv.lab.size.layout import SLAB_BYTES

_MIB, _GIB = 2**20, 2**30


@dataclass(frozen=True)
class HostLimits:
    """Host memory of an engine, bytes.

    Attributes:
        limit: The setting memory.limit.
        arena: The part of it that rows may take, with the codes on a CPU device. The rest is for
            messages, page tables and workspaces.
    """

    limit: int
    arena: int


@dataclass(frozen=True)
class GpuLimits:
    """GPU memory of an engine, bytes.

    Attributes:
        limit: The setting device.gpu_memory_limit.
        workspaces: The part of it that is left to workspaces.
        step_workspace: Most of it that the sparse attends of a decode step take.
        arena: The part of it that codes, resident rows and tables may take.
    """

    limit: int
    workspaces: int
    step_workspace: int
    arena: int


def host_limit(memory_bytes: int) -> int:
    """Returns the engine's default of memory.limit on a host with so much memory, bytes."""
    return memory_bytes // 4 * 3 // _MIB * _MIB


def host_limits(limit: int) -> HostLimits:
    """Returns what a memory.limit leaves for rows."""
    messages = min(max(min(limit // 8, _GIB), 16 * _MIB), limit // 2)
    return HostLimits(limit, _slabs(limit - messages - limit // 32))


def gpu_limit(free_bytes: int) -> int:
    """Returns the engine's default of device.gpu_memory_limit on a GPU with so much free, bytes."""
    return max(free_bytes, 0) // 10 * 9


def gpu_limits(limit: int, *, copies: bool = False) -> GpuLimits:
    """Returns what a device.gpu_memory_limit leaves for codes.

    Args:
        limit: The setting.
        copies: Whether there may be copies of rows: device.gpu_resident_limit is not 0. They make
            room for codes.
    """
    if limit < 4 * _GIB:
        # A slot of each of two kinds of jobs, and a step.
        step = limit // 8
        workspaces = 2 * (limit // 64) + step + (step // 2 if copies else 0)
    else:
        wave = min(limit // 24, _GIB)
        step = max(2 * wave, _GIB // 2)
        workspaces = 4 * wave
    return GpuLimits(limit, workspaces, step, _slabs(limit - workspaces))


def _slabs(size: int) -> int:
    return max(size, 0) // SLAB_BYTES * SLAB_BYTES
