"""Every page on the reproductions, from their stored tables: `python docs/reproductions.py`, without any training.

docs/tables/ has an archive for each experiment and scale. `python docs/reproductions.py runs/atlas` first makes those
of the experiments in `runs/atlas`, a folder of `flatlens reproduce`, which have run to the end (twice at laptop
scale). It writes atlas.md with its pictures, claims/*.csv, the results in papers/*.md, changed.md and changed.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atlas
import changed

import papers


def main(*runs: str) -> None:
    """Keep the tables of these runs; weigh all that are kept, and write pictures and pages."""
    for folder in runs:
        atlas.keep(Path(folder), atlas.HERE / atlas.TABLES)
    stored = atlas.load_all()
    found, _ = atlas.apart(stored)
    atlas.draw(found, atlas.HERE / atlas.PICTURES)
    atlas.write_claims(stored, atlas.HERE / atlas.CLAIMS)
    (atlas.HERE / "atlas.md").write_text(atlas.page(stored))
    papers.write(found)
    changed.write(stored)


if __name__ == "__main__":
    main(*sys.argv[1:])
