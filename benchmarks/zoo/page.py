"""docs/zoo.md: the results of every network, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
TOLERANCE, COARSE = 1e-8, 1e-5  #: largest relative error: in float64, and where the network itself rounds to float32
COLUMNS = {"interpolation_sharpness": "S", "by_layer": "S of a layer", "ggn_trace": "GGN trace", "mls": "MLS",
           "hessian_product": "Hv"}  # fmt: skip


def verdict(row: dict[str, Any]) -> str:
    """Return "right", or what is wrong."""
    tolerance = COARSE if row.get("rounds") else TOLERANCE
    where = {"by_layer": f" ({row.get('worst_layer')})"}
    wrong = [
        column + where.get(name, "")
        for name, column in COLUMNS.items()
        if not row["errors"].get(name, 0.0) <= tolerance
    ]
    return "; ".join([*row["troubles"], *([f"wrong: {', '.join(wrong)}"] if wrong else [])]) or "right"


def write(rows: dict[str, Any]) -> Path:
    """Write the page."""
    PAGE.write_text(text(rows))
    return PAGE


def text(rows: dict[str, Any]) -> str:
    """Return the page of these results."""
    parts = [INTRODUCTION]
    for library, title in (("timm", "timm 1.0.31"), ("transformers", "transformers")):
        mine = {name.partition(":")[2]: row for name, row in rows.items() if name.startswith(library)}
        right = sum(verdict(row) == "right" for row in mine.values())
        parts += [f"\n## {title}\n\n{right} of {len(mine)} right.\n\n{table(mine)}\n"]
    return "".join(parts)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a table with a line for each network."""
    heads = ["network", "parameters", *COLUMNS.values(), "differences", "by autograd", "seconds", "brute force",
             "verdict"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) - 2)}---|"]
    lines += [f"| {' | '.join(cells(name, row))} |" for name, row in sorted(rows.items())]
    return "\n".join(lines)


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """Return the cells of one network."""
    errors = [small(row["errors"].get(column)) for column in COLUMNS]
    differences = row.get("differences", {})
    told = [small(differences.get("gradient")), small(differences.get("hessian_product"))]
    share = row.get("share_by_autograd")
    return [
        f"`{name}`{' (f32)' if row.get('rounds') else ''}",
        f"{row['parameters']:,}" if "parameters" in row else "",
        *errors,
        ", ".join(told) if differences else "",
        "" if share is None else f"{share:.1%}",
        *(f"{row[key]:.1f}" if key in row else "" for key in ("seconds_flatlens", "seconds_brute_force")),
        verdict(row).replace("|", "\\|"),
    ]


def small(error: float | None) -> str:
    """Return a relative error as text."""
    return "" if error is None else f"{error:.0e}" if error else "0"


INTRODUCTION = """# The zoo

Small networks of timm's families (all but eight, whose smallest network is too large) and tiny ones of transformers,
measured by flatlens and by brute force, in the environment of `.ci/timm`:

```sh
.venv-timm/bin/python -m benchmarks.zoo
```

Random weights, float64, three outputs, two samples: images, or texts of which the second is shorter and padded. Zero
biases, norms of one and layer scales of 1e-6 are moved, and BatchNorms have the statistics of sixteen samples, so that
no zero hides an error.

- S, GGN trace, MLS: relative errors of `interpolation_sharpness`, `ggn_trace` and `mls`, against one backward pass for
  each sample and output, to all trainable parameters and to the image (of texts, to the first embedding's output). Each
  must be `exact`.
- S of a layer: the largest error of a layer's or parameter's share of S, relative to that share plus 1e-9 of S.
- Hv: relative error of a product with `flatlens.curvature.Hessian`, against double backward, sample by sample.
- differences: distance of brute force's gradient and Hessian product along that vector from central finite differences
  of loss and gradient; less certain where steps cross kinks, or parts of the network work in float32 (f32).
- by autograd: the share of the parameters that no layer explains, and per-sample autograd measures.
- seconds of flatlens (checking the problem, all measures, one product), and of brute force.

A network is right if it errs by at most 1e-8 in the columns from S to Hv; by 1e-5 where it rounds to float32 (f32).
"""
