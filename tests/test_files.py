"""No text in a CSV file of flatlens is a formula, every text comes back, and numbers stay numbers."""

import csv
import io
import math

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from flatlens.experiments.specification import _read
from flatlens.experiments.store import Store
from flatlens.files import csv_of, unescaped
from flatlens.tracking.history import TYPES, load_history, save_history

STARTS = [
    "",
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    "\n",
    "'",
    "''",
    "'=",
    "''=",
    "\uff1d",
    " =",
    "-1.5",
    "+2",
    "1e5",
    "nan",
    "-",
]
TEXT = st.builds(
    "{}{}".format,
    st.sampled_from(STARTS),
    st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\r"), max_size=6),
)
NUMBER = st.floats() | st.integers(-(2**53), 2**53)


def cells(text):
    return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]


def is_run(cell):
    """What OWASP lists as the beginning of a formula; numbers are none."""
    if not cell.startswith(tuple("=+-@\t\r\n\uff1d\uff0b\uff20")):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return cell != cell.strip()


@given(
    st.lists(st.tuples(TEXT, NUMBER, TEXT), min_size=1, max_size=5),
    TEXT.filter(lambda name: name not in ("x", "y", "")),
)
@settings(max_examples=80, deadline=None)
def test_text_comes_back_and_numbers_stay(rows, header):
    table = pd.DataFrame(rows, columns=["x", "y", header]).astype({"y": float})
    text = csv_of(table)
    assert not any(map(is_run, cells(text)))
    back = pd.read_csv(io.StringIO(text, newline=""), dtype=str, keep_default_na=False).rename(columns=unescaped)
    back = back.map(unescaped)
    assert list(back.columns) == list(table.columns)
    assert list(back["x"]) == list(table["x"])
    assert list(back[header]) == list(table[header])
    for one, other in zip(back["y"], table["y"], strict=True):
        assert (math.isnan(other) and one == "") or float(one) == other


@given(st.lists(st.lists(NUMBER, min_size=2, max_size=2), max_size=5))
@settings(max_examples=30, deadline=None)
def test_tables_without_such_text_are_as_pandas_writes_them(rows):
    table = pd.DataFrame(rows, columns=["a", "b"]).assign(c="fc1", d=True, e=None)
    assert csv_of(table) == table.to_csv(index=False, float_format="%.17g", lineterminator="\n")


@given(st.lists(TEXT, min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_a_history_comes_back(tmp_path_factory, names):
    file = tmp_path_factory.mktemp("h") / "history.csv"
    row = {name: 1 if kind == "int64" else -1.5 for name, kind in TYPES.items()}
    table = pd.DataFrame([{**row, "measure": "mls", "layer": name, "kind": "exact", "note": name} for name in names])
    save_history(table.astype(TYPES), file)
    assert not any(map(is_run, cells(file.read_bytes().decode())))
    back = load_history(file)
    assert list(back["layer"]) == list(back["note"]) == names
    assert list(back["value"]) == [-1.5] * len(names)


@given(st.lists(st.sampled_from(["=1+1", "+a", "-b", "@c", "'=d", "plain", "-0.5"]), min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_tables_of_studies_and_figures_are_escaped_and_checkpoints_read_them(tmp_path_factory, names):
    folder = tmp_path_factory.mktemp("s")
    table = pd.DataFrame({"weights": [f"{at}.pt" for at in range(len(names))], "=lr": -0.5, "act": names})
    categories = table.assign(act=pd.Categorical(names), n=np.arange(len(names)))
    Store(folder).write_table("table.csv", table)
    (folder / "figure.csv").write_text(csv_of(categories))
    for name in ("table.csv", "figure.csv"):
        assert not any(map(is_run, cells((folder / name).read_text())))
    back = _read(folder / "table.csv")
    assert list(back.columns) == ["weights", "=lr", "act"]
    assert [str(one) for one in back["act"]] == names
    assert list(back["=lr"]) == [-0.5] * len(names)
