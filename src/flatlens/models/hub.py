"""Whether the Hugging Face hub can be reached: asked once, where each file would be tried six times, half a minute."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE = 5.0
"""Seconds."""


def reachable() -> bool:
    """Whether the hub answers; behind a proxy that is for the download to find out."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=PATIENCE):
            return True
    except OSError:
        return False


@contextmanager
def from_the_hub() -> Iterator[bool]:
    """Inside, files come from the hub where it is reachable, else at once from what was fetched before; which of the
    two, comes back."""
    from huggingface_hub import constants

    there, before = reachable(), constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = not there
    try:
        yield there
    finally:
        constants.HF_HUB_OFFLINE = before
