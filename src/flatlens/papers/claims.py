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
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from flatlens.papers import contrasts, evidence
from flatlens.papers import experiment as constants
from flatlens.papers.experiment import SHARED_WORDS, Experiment, Prediction, Setting, Side

_GIVEN = {field.name for field in fields(Prediction)} - {"side", "than"}
"""What an entry can give of a prediction; its side and number stand in the statistic."""
_NAMES = {**vars(constants), **vars(evidence), **vars(contrasts)}
_SIDES: Mapping[str, Side] = {">": "above", "<": "below"}


def experiment(paper: str, id: str, names: Mapping[str, Any]) -> Experiment:
    """Return the experiment that the paper's file describes; `names` are those of its module, which claims may use."""
    of_paper, known = _file(paper), {**_NAMES, **names}
    own, words = of_paper[id], SHARED_WORDS | of_paper["words"]
    differs = {scale: tuple(_filled(one, words) for one in several) for scale, several in own["differs"].items()}
    settings = [{name: _filled(text, words) for name, text in row.items()} for row in own.get("protocol", [])]

    def evaluated(text: str) -> Any:
        return eval(text, {"__builtins__": {}}, known)  # of a file of this package, trusted as its code is

    predictions = []
    for row in _rows(own["claims"], words, {}):
        statistic, sign, than = re.split(r" ([<>]) (?=[^<>]*$)", row["statistic"])
        predictions.append(Prediction(**{
            "kind": "reading" if row.get("reason") else "claim", **row, "name": row["name"].replace(" ", "_"),
            "source": f"{paper} {row['source']}", "statistic": evaluated(statistic), "side": _SIDES[sign],
            "than": float(evaluated(than)),
        }))  # fmt: skip
    return Experiment(
        id,
        own["title"],
        f"{paper} {own['reproduces']}",
        studies=names[f"_{id.lower()}"],
        predictions=tuple(predictions),
        plots=names[f"_{id.lower()}_plots"],
        differs=differs,
        protocol=tuple(Setting(**row) for row in settings),
        code=of_paper["code"],
    )


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
