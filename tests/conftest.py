"""One thread, and the truths' helper modules importable."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "truths"))
torch.set_num_threads(1)
