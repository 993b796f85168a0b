"""Invariances measured on one network, as a terminal screen and as a page: which numbers stay, which change."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from flatlens.progress import by_key
from flatlens.report.blocks import by_reason, summed_up
from flatlens.report.cards import MOVES, spelling
from flatlens.report.measure import ANSWERS_DOWN
from flatlens.report.screen import Fitted, head_of_screen, remark
from flatlens.training.settings import RESULTS
from flatlens.transforms import OUTPUTS, TRANSFORMS, Cell, InvarianceReport

_MOST = 8  #: number of remarks on a transform that a screen shows
SHORT = {
    **{move: short for move, short, _ in MOVES},
    "batchnorm_folding": "bn fold",
    "batchnorm_scale": "bn scale",
    "feature_normalization": "std",
    "query_key_basis": "q k",
    "value_output_basis": "v o",
    "head_permutation": "heads",
    "norm_folding": "norm fold",
    "norm_scale": "norm scale",
    "gate_scale": "gate",
    "feature_normalization.published": "variance",
}
"""Column headings; a transform of the user's own has its name."""
CELLS = (
    "NO in capitals: it changes, although the measure is declared invariant; LOST: it is undefined before or after, "
    "although the measure is declared invariant. -: undefined before or after. ?: undecided after a search."
)
"""The meaning of a cell's other words."""


def invariance_screen(report: InvarianceReport) -> RenderableType:
    """Return the screen of `flatlens invariance`: a row for each measure, a column for each transform."""
    # a row for each measure; of many no parts, unless they change although they are declared to stay
    table = Fitted("Is the number invariant?", names=["measure"], values=["before"])
    for name in report.moved:
        table.column(SHORT.get(name, name), left=True)
    rows = _rows(report)
    for name, cells in rows.items():
        part = len(rows) > ANSWERS_DOWN and name != spelling(name)
        if name not in RESULTS and (not part or any(cell.agrees is False for cell in cells)):
            table.row(name, _before(cells[0]), *(_cell(cell) for cell in cells))

    # what each transform did, and those that do not apply
    text = Text("\nTransforms\n", style="bold")
    for name, done in report.moved.items():
        text.append(f"{SHORT.get(name, name)}: ", style="not bold italic")
        meaning = TRANSFORMS[name].meaning if name in TRANSFORMS else name
        proof = f"outputs differ by {done.difference:.1g} at most"
        text.append(f"{meaning} Moved: {summed_up(done.links, '; ')}. Proof: {proof}.", style="not bold")
        told = [summed_up(done.note.split("; "), "; ", _MOST)] if done.note else []
        told += [f"not {layers}: {why}" for why, layers in by_reason(done.left) if why != OUTPUTS]
        text.append(f" {'; '.join(told)}\n" if told else "\n", style="not bold dim")
    for why, names in by_reason(report.left_out):
        text.append(f"{names}: ", style="not bold italic")
        text.append(f"not applied here. {why}\n", style="not bold dim")
    key = remark(
        "yes, no: ",
        f"whether the number is invariant, within rounding and 4 standard errors, when the weights change and the "
        f"function does not; x: the factor by which it changes. {CELLS}",
    )
    return Group(*head_of_screen({"": report.about}, report.answer), *([table] if report.moved else []), text, key)


def write_invariance_page(report: InvarianceReport, path: Path) -> Path:
    """Write one HTML file that needs no network: the table, what each transform did, and the proof."""
    from flatlens.report.page import write_page  # not above: the screen draws nothing

    def kind(cell: Cell) -> str:
        return "wrong" if cell.agrees is False else {True: "stays", False: "moves", None: "open"}[cell.unchanged]

    return write_page(
        "invariance",
        path,
        {"": report.about},
        answer=report.answer,
        wrong=[f"{cell.measure} under {cell.transform}" for cell in report.disagreeing],
        transforms=list(report.moved),
        rows=[
            (name, _before(cells[0]).plain, [(str(_cell(cell)), kind(cell)) for cell in cells])
            for name, cells in _rows(report).items()
        ],
        applied=[
            (name, TRANSFORMS[name].meaning if name in TRANSFORMS else "", done) for name, done in report.moved.items()
        ],
        left_out=report.left_out,
        meaning=CELLS,
    )


def _rows(report: InvarianceReport) -> dict[str, list[Cell]]:
    return by_key((cell.measure, cell) for cell in report)


def _before(cell: Cell) -> Text:
    return Text(f"{cell.before:.4g}") if cell.before == cell.before else Text("undefined", style="dim")


def _cell(cell: Cell) -> Text:
    """Return a cell in words: yes or no, and by what factor; in capitals if it is not as declared."""
    if cell.unchanged is None:
        if cell.agrees is False:
            return Text("LOST", style="bold red")
        return Text("-" if cell.before != cell.before or cell.after != cell.after else "?", style="dim")
    if cell.unchanged:
        return Text("yes", style="green" if cell.declared else "dim green")
    # a change of less than a tenth as a share of the number, another one as a factor
    factor = cell.after / cell.before if cell.before else 1.0
    if not cell.before:
        change = ""
    elif abs(cell.change) < 0.1:
        change = f"{cell.change:+.2g}" if abs(cell.change) < 1e-3 else f"{cell.change:+.1%}"
    elif 0.1 <= abs(factor) < 100:
        change = f"x{factor:.2g}"
    else:
        digit, _, power = f"{factor:.0e}".partition("e")
        change = f"x{digit}e{int(power)}"
    told = f"{'NO' if cell.agrees is False else 'no'} {change}".rstrip()
    return Text(told, style="bold red" if cell.agrees is False else "yellow")
