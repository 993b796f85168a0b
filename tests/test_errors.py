"""An error holds its argument and its remedy in parts; Python and the command line each write their own text."""

import ast
import copy
import pickle
from pathlib import Path

import pytest
import torch

import flatlens
from flatlens import errors
from flatlens.cli import in_options
from flatlens.errors import FORWARD, BadData, BadInput, BadLoss, BadModel, BadWeights, Code, Give, UnknownName

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BadInput)]
SOURCE = Path(flatlens.__file__).parent


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_stays_what_it_is_in_another_process(kind, again):
    remedy = "give ", Give("dtype", torch.float64)
    error = kind("it is off", argument="dtype", value=Code("half"), remedy=remedy, call="Problem")
    error = error.but(where="(sample 3)")
    assert str(again(error)) == str(error) == "Problem(dtype=half): it is off: give dtype=torch.float64 (sample 3)"
    assert type(again(error)) is kind


@pytest.mark.parametrize(
    ("error", "python", "options"),
    [
        (BadModel("it is empty"), "Problem(model=...): it is empty", "MODEL: it is empty"),
        (BadLoss("no", value="mse"), "Problem(loss=mse): no", "--loss mse: no"),
        (BadWeights("no file"), "weights: no file", "--weights: no file"),
        (BadInput("no", argument="ghost_batch", value=1), "Problem(ghost_batch=1): no", "--ghost-batch 1: no"),
        (BadInput("no", argument="outputs", value="x", call="Lens"), "Lens(outputs='x'): no", "--outputs 'x': no"),
        (BadInput("no", value="a", call="Searches.load"), "Searches.load('a'): no", "--after a: no"),
        (BadData("no", argument="data", call="train"), "train(data=...): no", "data: no"),
        (BadInput("two at least", call="compare"), "compare(...): two at least", "compare(...): two at least"),
        (BadInput("no", argument="memory", call="Other"), "Other(memory=...): no", "Other(memory=...): no"),
        (BadInput("no such file"), "no such file", "no such file"),
        (
            BadData("no", argument="test", remedy=(Give("dtype", torch.float64), " or ", Give("anyway", True))),
            "Problem(test=...): no: dtype=torch.float64 or anyway=True",
            "--test: no: --dtype float64 or --anyway",
        ),
        (
            BadInput((Give("arithmetic"), " or ", Give("batchnorm", "train"), Give("ghost_batch", Code("k")))),
            "arithmetic=... or batchnorm='train'ghost_batch=k",
            "--arithmetic or --batchnorm train--ghost-batch k",
        ),
        (
            UnknownName.among("layer", "fc", ["fc1"], argument="parameters"),
            "Problem(parameters=...): unknown layer 'fc': did you mean fc1?",
            "--parameters: unknown layer 'fc': did you mean fc1?",
        ),
    ],
)  # fmt: skip
def test_python_names_the_argument_and_the_command_line_the_option(error, python, options):
    assert str(error) == python
    assert in_options(error) == options


def test_what_only_python_has_is_said_so_on_the_command_line():
    error = BadModel("it returns a dict", remedy=("choose through ", FORWARD))
    assert str(error).endswith("choose through forward=(model, batch) -> (outputs, targets)")
    assert "in Python: Problem(forward=...)" in in_options(error)


def test_no_error_is_written_with_its_argument_in_the_text():
    names = {kind.__name__ for kind in KINDS}
    by_hand = []
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
                text = ast.unparse(node.args[0]).lstrip("f'\"")
                if text.startswith(("Problem(", "Lens(", "weights: ", "MODEL: ")) and "...)" not in text[:10]:
                    by_hand.append(f"{file.relative_to(SOURCE)}:{node.lineno}")
    assert not by_hand
