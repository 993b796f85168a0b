"""A check that the Hugging Face hub can be reached: once, not six times (half a minute) for each file."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

_PATIENCE = 5.0
"""Seconds to wait for a connection."""


def reachable() -> bool:
    """Return whether the hub answers; behind a proxy the download finds out."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=_PATIENCE):
            return True
    except OSError:
        return False


@contextmanager
def from_the_hub() -> Iterator[bool]:
    """Yield whether the hub can be reached; inside, files come from it, or from the local cache if it cannot be."""
    from huggingface_hub import constants

    there, before = reachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = not there
    try:
        yield there
    finally:
        constants.HF_HUB_OFFLINE = before
