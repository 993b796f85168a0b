"""Writing the report's files, each whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd


def write_whole(path: Path, content: bytes) -> Path:
    """Replace `path` in one step: a reader, or a kill, never meets half a file."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def csv_bytes(frame: pd.DataFrame) -> bytes:
    """The table with all its digits."""
    text: str = frame.to_csv(index=False, float_format="%.17g", lineterminator="\n")
    return text.encode()
