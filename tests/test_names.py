"""One word, one meaning: public top-level names that two modules define are few, and each has a reason."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import flatlens

PACKAGE = Path(flatlens.__file__).parent

COMMAND = "the command of the same name, and the function that it calls"
STORED = "public in both; the names of settings are stored with studies"
SHARED = {
    "Cost": "of the networks of a study, and of one measurement",
    "Answer": "what a report says, and the layers that a measure is of",
    "compare": COMMAND,
    "fetch": COMMAND,
    "measure": COMMAND,
    "reproduce": COMMAND,
    "InputJacobian": STORED,
    "ParameterJacobian": STORED,
    "TrackerCallback": "one for Lightning, one for transformers, each where its users look",
    "accuracy": "the measure, and the number that training evaluates",
    "eigenspace": "the measure, and the function of an operator",
    "spectral_density": "the measure, and the function of an operator",
    "Activation": "the activation by name in a model's settings, and its table of slopes in operations",
    "Place": "a rank in a comparison, and a tensor of the graph",
    "Inputs": "the command line's arguments, and the samples that a search moves",
    "in_words": "seconds, and a column",
    "plain": "text without markup, in a terminal and on a page",
    "together": "processes, and experiments",
    "fitted": "networks of a study, and cases of a paper",
    "measured": "data sets in feature space, and coordinate networks",
    "printed": "a paper's protocol, and a report's text",
    "spelled": "options of a loss, and of a name in a registry",
}
"""Names with the reason why two modules have them."""


def names_of(module: Path) -> set[str]:
    """Return the public names that a module's top level defines."""
    found: set[str] = set()
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if not name.startswith("_")}


def test_names_that_two_modules_define_are_few_and_have_reasons() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in sorted(PACKAGE.rglob("*.py")):
        for name in names_of(module):
            homes[name].append(str(module.relative_to(PACKAGE)))
    twice = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: where for name, where in twice.items() if name not in SHARED} == {}
    assert SHARED.keys() - twice.keys() == set(), "no longer defined twice: take them off the list"
    assert len(SHARED) < 30
