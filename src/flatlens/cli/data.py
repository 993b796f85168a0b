"""`flatlens data`: the named data sets, and downloading their files."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from flatlens.cli.bar import Bar
from flatlens.cli.output import Json, note, show, show_json, stdout_to_stderr

data = App(
    name="data",
    help="Data sets: list them, and download those that come as files.\n\n"
    "For example:\n\n    flatlens data list\n    flatlens data fetch cifar10",
    help_format="markdown",
)


@data.command(name="list")
def list_data(*, root: Path | None = None, as_json: Json = False) -> None:
    """List the data sets that `--data` knows by name, the place each is read from, and whether it is there.

    For example:

        flatlens data list --root /data/sets

    Args:
        root: The folder of the data sets; without it $FLATLENS_DATA, or ~/.cache/flatlens.
        as_json: Print JSON.
    """
    from flatlens.data.imagesets import IMAGE_SETS
    from flatlens.data.local import default_root, find
    from flatlens.data.sources import MEANINGS

    folder = default_root() if root is None else root.expanduser()
    rows = []
    for name, meaning in MEANINGS.items():
        found = find(IMAGE_SETS[name], folder) if name in IMAGE_SETS else None
        rows.append(
            {
                "name": name,
                "meaning": meaning,
                "present": found is not None or name not in IMAGE_SETS,
                "form": found.form if found else ("none found" if name in IMAGE_SETS else "needs no files"),
                "place": (found.place if found else folder) if name in IMAGE_SETS else None,
            }
        )
    if as_json:
        show_json({"data": rows})
        return
    _show(rows)


def _show(rows: list[dict[str, object]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("name", "what it is", "there", "read from"):
        table.add_column(column, overflow="fold")
    for row in rows:
        place = "" if row["place"] is None else f": {row['place']}"
        table.add_row(str(row["name"]), str(row["meaning"]), "yes" if row["present"] else "no", f"{row['form']}{place}")
    show(table)


@data.command
def fetch(name: str, /, *, root: Path | None = None, as_json: Json = False) -> None:
    """Download a data set from the Hugging Face hub; copy its folder to machines without internet.

    Files appear complete and checked, or not at all. After an interruption the same command continues; run again, it
    checks the files and downloads nothing. For example:

        flatlens data fetch cifar10 --root /data/sets

    Args:
        name: `mnist`, `fashion_mnist`, `cifar10` or `cifar100`.
        root: The folder of the data sets; without it $FLATLENS_DATA, or ~/.cache/flatlens.
        as_json: Print JSON.
    """
    from flatlens.data.fetch import fetch as fetch_files

    with stdout_to_stderr(), Bar() as bar:
        fetched = fetch_files(name, root, progress=bar)
    if as_json:
        record = fetched.record.as_json()
        show_json({"folder": fetched.folder, "downloaded": fetched.downloaded, **record})
        return
    if not fetched.downloaded:
        note("all files were there already, and are unchanged since they were downloaded")
    size = sum(file.bytes for file in fetched.record.files) / 1e6
    show(f"{fetched.folder}: {len(fetched.record.files)} files, {size:.1f} MB, checked")
