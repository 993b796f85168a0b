"""Versions and machine that computed a result: the facts that can change its digits."""

from __future__ import annotations

import platform

import numpy as np
import torch

from flatlens.version import __version__


def versions() -> dict[str, str]:
    """Return versions, device, instruction set and threads as text; networks are computed on one thread of the CPU.

    >>> sorted(versions())
    ['device', 'flatlens', 'instructions', 'numpy', 'python', 'threads', 'torch']
    """
    return {
        "flatlens": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "device": "cpu",
        "instructions": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": "1",
    }


def difference(recorded: dict[str, str], now: dict[str, str]) -> str:
    """Return the differences in words; empty if there are none.

    >>> difference({"torch": "2.6.0", "device": "cpu"}, {"torch": "2.13.0", "device": "cpu"})
    'torch 2.6.0 there, 2.13.0 here'
    """
    names = [name for name in {**recorded, **now} if recorded.get(name) != now.get(name)]
    return "; ".join(f"{name} {recorded.get(name, 'unknown')} there, {now.get(name, 'unknown')} here" for name in names)
