"""Experiments as data: `<paper>.toml` says how each is called, how it differs from the paper, and what it claims.

    [words]
    GRANZIOL = "networks trained with weight decay generalised better than those trained without"

    [X7]
    title = "Weight decay: sharper minima that generalise better"
    reproduces = "Fig. 2"
    differs.smoke = ["<SMOKE_ONLY>"]

    [[X7.protocol]]
    what = "epochs"
    printed = "90 (Fig. 2)"
    ours = "30"

    [X7.claims.ends]
    each = [{what = "gap", sign = "<"}, {what = "sharpness", sign = ">"}]
    source = "section 6"
    quote = "<GRANZIOL>"
    [X7.claims.ends.rows."<what>"]
    says = "Networks trained with weight decay end at another <what>."
    statistic = "with_over_without(trained_in('resnet'), DECAY, '<what>', ['lr', 'seed']) <sign> 0"

An entry under `protocol` is a row of the table that compares the paper's text, the authors' code (`coded`, where it has
the experiment; `code` says where it is) and the experiment at desk scale: every setting that differs between two.

An entry under `claims` is a prediction of this name (blanks become underscores), once for every row of `each`. `<word>`
stands for a value of that row, or one of `[words]`. An entry with `rows` is a group: what it gives holds for all of
these. What a row gives takes the place of what its entry gives; a row that contradicts the row of a group around it is
left out.

`statistic` is an expression in the functions of `evidence` and `contrasts`, the constants of
`experiment`, and the names of the experiment's module; then the side of the number where the claim has it. An entry
with a `reason` is a reading, another one a claim, unless `kind` says that it is a theorem or a number.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from flatlens.experiments.settings import Study
from flatlens.papers import contrasts, evidence
from flatlens.papers import experiment as constants
from flatlens.papers.experiment import SHARED_WORDS, Experiment, Plot, Prediction, Results, Scale, Setting, Side

_GIVEN = {field.name for field in fields(Prediction)} - {"side", "than"}
"""What an entry can give of a prediction; its side and number stand in the statistic."""
_NAMES = {**vars(constants), **vars(evidence), **vars(contrasts)}
_SIDES: Mapping[str, Side] = {">": "above", "<": "below"}


def experiment(
    paper: str,
    id: str,
    studies: Callable[[Scale], Mapping[str, Study]],
    plots: Callable[[Results], list[Plot]],
    names: Mapping[str, Any],
) -> Experiment:
    """Return the experiment that the paper's file describes; `names` are those that its statistics use."""
    words, own = SHARED_WORDS | _file(paper)["words"], _file(paper)[id]
    differs = {scale: tuple(_filled(one, words) for one in several) for scale, several in own["differs"].items()}
    rows = _rows(own["claims"], words, {})
    predictions = tuple(_prediction(paper, row, {**_NAMES, **names}) for row in rows)
    settings = [{name: _filled(text, words) for name, text in row.items()} for row in own.get("protocol", [])]
    protocol, code = tuple(Setting(**row) for row in settings), _file(paper)["code"]
    reproduces = f"{paper} {own['reproduces']}"
    return Experiment(id, own["title"], reproduces, studies, predictions, plots, differs, protocol, code)


@cache
def _file(paper: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / f"{paper}.toml").read_text(encoding="utf-8"))


def _rows(
    entries: Mapping[str, Mapping[str, Any]], words: Mapping[str, Any], outer: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield what is given of each prediction, with its words in place; `outer` is given by the groups around it."""
    for name, entry in entries.items():
        for row in entry.get("each", [{}]):
            if any(words.get(word, value) != value for word, value in row.items() if word not in _GIVEN):
                continue
            known = {**words, **row}
            given = {"name": name, **outer, **{key: of[key] for of in (entry, row) for key in _GIVEN if key in of}}
            if "rows" in entry:
                yield from _rows(entry["rows"], known, {key: one for key, one in given.items() if key != "name"})
            else:
                yield {key: _filled(one, known) if isinstance(one, str) else one for key, one in given.items()}


def _filled(text: str, words: Mapping[str, Any]) -> str:
    while (filled := re.sub(r"<(\w+)>", lambda word: str(words[word[1]]), text)) != text:
        text = filled  # words may hold words
    return text.strip()


def _prediction(paper: str, row: dict[str, Any], names: dict[str, Any]) -> Prediction:
    def evaluated(text: str) -> Any:
        return eval(text, {"__builtins__": {}}, names)  # of a file of this package, trusted as its code is

    statistic, sign, than = re.split(r" ([<>]) (?=[^<>]*$)", row["statistic"])
    return Prediction(**{
        "kind": "reading" if row.get("reason") else "claim", **row, "name": row["name"].replace(" ", "_"),
        "source": f"{paper} {row['source']}", "statistic": evaluated(statistic), "side": _SIDES[sign],
        "than": float(evaluated(than)),
    })  # fmt: skip
