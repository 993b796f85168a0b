"""`flatlens list`: the names of measures, transforms, bounds and experiments; `flatlens data`: the named data sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from flatlens.cli.studies import STUDIES
from flatlens.cli.terminal import Flag, Json, note, show, show_json, stdout_to_stderr
from flatlens.errors import BadInput
from flatlens.progress import Bar, count_of

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
    from flatlens.data.image_sets import IMAGE_SETS, default_root, find
    from flatlens.data.sources import MEANINGS

    folder = default_root() if root is None else root.expanduser()
    rows: list[dict[str, Any]] = []
    for name, meaning in MEANINGS.items():
        found = find(IMAGE_SETS[name], folder) if name in IMAGE_SETS else None
        row: dict[str, Any] = {"name": name, "meaning": meaning, "present": found is not None or name not in IMAGE_SETS}
        row["form"] = found.form if found else "none found" if name in IMAGE_SETS else "needs no files"
        row["place"] = (found.place if found else folder) if name in IMAGE_SETS else None
        rows.append(row)
    if as_json:
        show_json({"data": rows})
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("name", "description", "available", "read from"):
        table.add_column(column, overflow="fold")
    for row in rows:
        place = "" if row["place"] is None else f": {row['place']}"
        table.add_row(row["name"], row["meaning"], "yes" if row["present"] else "no", f"{row['form']}{place}")
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
    from flatlens.data.download import fetch as fetch_files

    with stdout_to_stderr(), Bar() as bar:
        fetched = fetch_files(name, root, progress=bar)
    if as_json:
        record = fetched.record.as_json()
        show_json({"folder": fetched.folder, "downloaded": fetched.downloaded, **record})
        return
    if not fetched.downloaded:
        note("all files were there already, and are unchanged since they were downloaded")
    size = sum(file.bytes for file in fetched.record.files) / 1e6
    show(f"{fetched.folder}: {count_of(len(fetched.record.files), 'file')}, {size:.1f} MB, checked")


KEY = (
    "\n# in the summary, the default of `flatlens measure` and `flatlens compare`."
    "\n* takes products, searches or random draws; where it takes none, it equals another measure. It runs by name, or "
    "with --measures all or family:NAME (local_learning_coefficient: by name alone). --measures pass runs the others, "
    "except sharpness and hessian_trace."
    "\ninvariant: layer: under layer-wise rescaling of the weights; neuron: under neuron-wise rescaling; order: under "
    "permutation of the neurons; head: under a change of basis of attention heads; all: under all four. None of them "
    "changes the network's function. An option may change the invariance."
    "\nMore about each measure: docs/measures.md, or --markdown."
)


def list_names(
    kind: Literal["measures", "transforms", "bounds", "experiments"],
    /,
    *,
    as_json: Json = False,
    as_markdown: Annotated[bool, Flag, Parameter(name="--markdown")] = False,
) -> None:
    """List the measures, transforms, bounds or experiments.

    For example:

        flatlens list measures

    Args:
        kind: What to list.
        as_json: Print JSON.
        as_markdown: For measures: print everything about each, as on the page docs/measures.md.
    """
    if as_markdown:
        if kind != "measures" or as_json:
            raise BadInput("--markdown works with `flatlens list measures` only")
        from flatlens.report.cards import page

        print(page(), end="")
        return
    # each kind imports its own package alone: a list is there at once
    rows: list[dict[str, Any]]
    if kind == "measures":
        from flatlens.measures import MEASURES
        from flatlens.report.cards import runs

        rows = [asdict(one.card) | {"run": runs(one)} for one in MEASURES.values()]
    elif kind == "bounds":
        from flatlens.bounds import BOUNDS

        keys = ("name", "id", "symbol", "meaning", "source", "cost", "on_request")
        rows = [{key: getattr(one, key) for key in keys} for one in BOUNDS.values()]
    elif kind == "transforms":
        from flatlens.transforms import TRANSFORMS

        keep = ("name", "id", "meaning", "source", "declared_as")
        rows = [{k: getattr(one, k) for k in keep} | {"on_request": not one.default} for one in TRANSFORMS.values()]
    else:
        from flatlens.papers import EXPERIMENTS

        rows = [{"name": name, "meaning": meaning} for name, meaning in STUDIES.items()]
        rows += [{"name": e.id, "meaning": e.title, "source": e.reproduces} for e in EXPERIMENTS.values()]
    # measures are a page by task; the others a table of names
    if as_json:
        show_json({kind: rows})
    elif kind == "measures":
        from flatlens.measures.definition import PAPERS

        show(*_measures(), KEY, "\nSources:\n" + "\n".join(f"  {key}: {paper}" for key, paper in PAPERS.items()))
    else:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("name", "meaning"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            source = f" ({row['source']})" if "source" in row else ""
            table.add_row(row["name"] + (" *" if row.get("on_request") else ""), row["meaning"] + source)
        show(table)


def _measures() -> Iterator[Any]:
    """Yield a table for each family; with room, two lines a measure: name, meaning; symbol, unit, cost, source."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from flatlens.report.cards import FAMILIES, MOVES, by_family, plain, runs

    for number, (family, members) in enumerate(by_family().items()):
        title = Text(f"\n{family}: {FAMILIES.get(family, '')}", style="bold")
        table = Table(box=None, pad_edge=False, title=title, title_justify="left", show_header=number == 0)
        table.add_column("measure", width=30, overflow="fold")
        table.add_column("invariant", width=12, overflow="fold")
        table.add_column("meaning; unit; cost; source", overflow="fold")
        for one in members:
            card, run = one.card, runs(one)
            mark = " #" if run.startswith("summary") else " *" if run.startswith("by name") else ""
            symbol = Padding(Text(plain(card.symbol), style="dim"), (0, 0, 0, 2))
            facts = Text(f"{card.unit}; {card.cost}; {card.source}", style="dim")
            moves = [short for move, short, _ in MOVES if move in card.invariant_under]
            invariant = "all" if len(moves) == len(MOVES) else ", ".join(moves) or "none"
            table.add_row(Group(Text(card.name + mark), symbol), invariant, Group(Text(card.meaning), facts))
        yield table
