"""Print the page."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from conventions.page import computed, page

    sys.stdout.write(page(*computed()))
