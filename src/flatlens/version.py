"""The version of flatlens, which every saved result names."""

from __future__ import annotations

__version__ = "0.3.0"
