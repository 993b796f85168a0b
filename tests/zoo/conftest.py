"""The zoo's own modules importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
