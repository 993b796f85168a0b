"""The memory in use, its peak and what is free: of this process, within its container, or on a CUDA device."""

from __future__ import annotations

import ctypes
import gc
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, final

if TYPE_CHECKING:
    import torch


GROUP = Path("/sys/fs/cgroup")


Meter: TypeAlias = "OfProcess | OfCuda"
"""Bytes on one device: `used` now, at the `peak` since `begin`, and `left`; None where they cannot be read."""


def meter(device: torch.device) -> Meter:
    """Return the meter of a device."""
    return OfCuda(device) if device.type == "cuda" else OfProcess()


@final
class OfProcess:
    """Resident memory as Linux counts it; None on other systems."""

    def used(self) -> int | None:
        """Return VmRSS."""
        return _field("/proc/self/status", "VmRSS")

    def peak(self) -> int | None:
        """Return VmHWM, which `begin` resets."""
        return _field("/proc/self/status", "VmHWM")

    def begin(self) -> bool:
        """Reset the peak and give freed memory back; return whether the kernel lets a process do so."""
        # The C library uses freed memory that it keeps for the next allocations, which would then not be counted
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            return True
        return False

    def left(self) -> int | None:
        """Return the free memory of the machine, or of the container if that is less."""
        free = [_field("/proc/meminfo", "MemAvailable"), _of_group()]
        return min((one for one in free if one is not None), default=None)


@final
class OfCuda:
    """Memory of one CUDA device, as torch allocates it."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device, self._cuda = device, torch.cuda

    def used(self) -> int | None:
        """Return the memory in tensors."""
        return self._cuda.memory_allocated(self._device)

    def peak(self) -> int | None:
        """Return the largest memory in tensors."""
        return self._cuda.max_memory_allocated(self._device)

    def begin(self) -> bool:
        """Reset the peak, after freeing tensors that only a reference cycle keeps."""
        gc.collect()
        self._cuda.reset_peak_memory_stats(self._device)
        return True

    def left(self) -> int | None:
        """Return the free memory of the device plus what torch has reserved and does not use."""
        free, _ = self._cuda.mem_get_info(self._device)
        return int(free) + self._cuda.memory_reserved(self._device) - self._cuda.memory_allocated(self._device)


def warn_of(needed: int, device: torch.device, call: str) -> None:
    """Warn that work may take more memory than is free, before it begins."""
    left = meter(device).left()
    if left is not None and needed > left:
        warnings.warn(f"{call} may take {in_gib(needed)} of memory, and {in_gib(left)} is free", stacklevel=3)


def _field(file: str, name: str) -> int | None:
    """Return the number of a line such as `VmRSS:   1234 kB`, in bytes."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _of_group() -> int | None:
    """Return the memory that a container (cgroup v2) may still take; cached file pages count as free."""
    with suppress(OSError, ValueError):
        most = int((GROUP / "memory.max").read_text())  # "max" is not a number: no limit
        now = int((GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        return most - now + int(stat.get("inactive_file", 0))
    return None


def in_gib(size: float) -> str:
    """Return a size in GiB, in words.

    >>> in_gib(3 * 2**30), in_gib(50 * 2**20)
    ('3 GiB', '0.049 GiB')
    """
    return f"{size / 2**30:.2g} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"
