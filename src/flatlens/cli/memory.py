"""How much memory this process takes and may take: of the machine, of the container, or of the CUDA device."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    import torch

GROUP = Path("/sys/fs/cgroup")


class Meter(Protocol):
    """Bytes, of one place where tensors lie; None for what cannot be told there."""

    def used(self) -> int | None:
        """Now."""

    def peak(self) -> int | None:
        """Return the most since `begin`, or since the process began."""

    def begin(self) -> bool:
        """Forget the peak, and hand back what was freed; return whether that can be done here."""

    def left(self) -> int | None:
        """What may be taken besides."""


def meter(device: torch.device) -> Meter:
    """Of the device that a network is on."""
    return OfCuda(device) if device.type == "cuda" else OfProcess()


@final
class OfProcess:
    """Resident memory as Linux counts it; elsewhere all is None."""

    def used(self) -> int | None:
        """VmRSS."""
        return _field("/proc/self/status", "VmRSS")

    def peak(self) -> int | None:
        """VmHWM, which `begin` sets back."""
        return _field("/proc/self/status", "VmHWM")

    def begin(self) -> bool:
        """Return whether the kernel lets a process set its peak back.

        The C library keeps what was freed, and would serve what comes next from it: nobody would see how much that
        takes.
        """
        gc.collect()
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            return True
        return False

    def left(self) -> int | None:
        """What the machine has, and at most what the container still may take."""
        free = [_field("/proc/meminfo", "MemAvailable"), _of_group()]
        return min((one for one in free if one is not None), default=None)


@final
class OfCuda:
    """Memory of one CUDA device, as torch allocates it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def used(self) -> int | None:
        """In tensors."""
        import torch

        return torch.cuda.memory_allocated(self._device)

    def peak(self) -> int | None:
        """In tensors."""
        import torch

        return torch.cuda.max_memory_allocated(self._device)

    def begin(self) -> bool:
        """Tensors that only a cycle holds are freed first."""
        import torch

        gc.collect()
        torch.cuda.reset_peak_memory_stats(self._device)
        return True

    def left(self) -> int | None:
        """Free on the device, and what torch holds without using it."""
        import torch

        free, _ = torch.cuda.mem_get_info(self._device)
        held = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free) + held


def _field(file: str, name: str) -> int | None:
    """A line such as `VmRSS:   1234 kB`, in bytes."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _of_group() -> int | None:
    """What a container (cgroup v2) may take besides; pages of files it has read do not count, they can go."""
    with suppress(OSError, ValueError):
        most = int((GROUP / "memory.max").read_text())  # "max" is no number: no limit
        now = int((GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (GROUP / "memory.stat").read_text().splitlines())
        return most - now + int(stat.get("inactive_file", 0))
    return None


def in_gib(size: float) -> str:
    """For reading.

    >>> in_gib(3 * 2**30), in_gib(50 * 2**20)
    ('3 GiB', '0.049 GiB')
    """
    return f"{size / 2**30:.2g} GiB" if size < 100 * 2**30 else f"{size / 2**30:.0f} GiB"
