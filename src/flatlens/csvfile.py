"""Tables as CSV files, in which no text of a user's is run as a formula when a spreadsheet opens them.

>>> import pandas as pd
>>> table = pd.DataFrame({"layer": ["fc1", "=1+1", "'=1"], "value": [-1.5, 2.0, 3.0]})
>>> print(csv_of(table), end="")
layer,value
fc1,-1.5
'=1+1,2
''=1,3
"""

from __future__ import annotations

import csv
import re
from typing import Literal

import pandas as pd

_RUN = re.compile("'*[=+\\-@\t\r\n\N{FULLWIDTH EQUALS SIGN}\N{FULLWIDTH PLUS SIGN}\N{FULLWIDTH COMMERCIAL AT}]")
"""The beginning of text that is escaped: what a spreadsheet takes for a formula, or what is escaped already."""


def csv_of(table: pd.DataFrame) -> str:
    """Return a table as CSV with all digits: 17 identify a float64.

    Text that a spreadsheet would run has an apostrophe in front.
    """
    shown = table.rename(columns=_escaped)
    for at, kind in enumerate(table.dtypes):
        if not pd.api.types.is_numeric_dtype(kind):
            shown.isetitem(at, [_escaped(cell) for cell in table.iloc[:, at]])
    text = _written(shown, csv.QUOTE_MINIMAL)
    return _written(shown, csv.QUOTE_NONNUMERIC) if "\r" in text else text  # outside quotes it would end a row


def _written(table: pd.DataFrame, quoting: Literal[0, 2]) -> str:
    text: str = table.to_csv(index=False, float_format="%.17g", lineterminator="\n", quoting=quoting)
    return text


def unescaped(cell: object) -> object:
    """Return a cell or a name of a column as it was before `csv_of`.

    >>> unescaped("'=1+1"), unescaped("''=1"), unescaped("'tis"), unescaped("-1.5")
    ('=1+1', "'=1", "'tis", '-1.5')
    """
    return cell[1:] if isinstance(cell, str) and cell[:1] == "'" and _RUN.match(cell) else cell


def _escaped(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and _RUN.match(cell) and not _is_number(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
