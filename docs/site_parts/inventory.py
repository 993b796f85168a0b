"""The inventory of torch's names that docstrings and signatures use; `python docs/site_parts/inventory.py` writes it.

Sphinx reads an inventory of another site from the network; this one lets the site be built without.
"""

from __future__ import annotations

import zlib
from pathlib import Path

INVENTORY = Path(__file__).parent / "torch.inv"
HEAD = """\
# Sphinx inventory version 2
# Project: torch
# Version: 2.13
# The remainder of this file is compressed using zlib.
"""
PAGES = {
    "torch.Tensor": "tensors.html",
    "torch.Generator": "generated/torch.Generator.html",
    "torch.device": "tensor_attributes.html",
    "torch.dtype": "tensor_attributes.html",
    "torch.nn.Module": "generated/torch.nn.Module.html",
    "torch.nn.Parameter": "generated/torch.nn.parameter.Parameter.html",
    "torch.nn.parameter.Parameter": "generated/torch.nn.parameter.Parameter.html",
    "torch.optim.Optimizer": "optim.html",
    "torch.optim.optimizer.Optimizer": "optim.html",
    "torch.utils.data.DataLoader": "data.html",
    "torch.utils.data.Dataset": "data.html",
    "torch.utils.data.dataloader.DataLoader": "data.html",
    "torch.utils.data.dataset.Dataset": "data.html",
}


def content() -> bytes:
    """Return the inventory in Sphinx's format: a head, then compressed lines of name, role, priority, place, title."""
    lines = "".join(f"{name} py:class 1 {page}#{name} -\n" for name, page in sorted(PAGES.items()))
    return HEAD.encode() + zlib.compress(lines.encode(), 9)


if __name__ == "__main__":
    INVENTORY.write_bytes(content())
