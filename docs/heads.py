"""The page of heads: how far each measure of one trained ViT moves under the symmetries of attention.

`python docs/heads.py > docs/heads.md` trains the network and writes the page, in some two minutes.
"""

from __future__ import annotations

import torch

import flatlens as fl
from flatlens.data import digits
from flatlens.models import ViT
from flatlens.training import Adam, Training, train

MEASURES = (
    "interpolation_sharpness", "ggn_trace", "kappa_trace", "relative_flatness", "neuron_flatness_ggn",
    "adaptive_sharpness_ggn", "weight_norm", "mls",
    "head_flatness_ggn",
)  # fmt: skip
MOVES = ("query_key_basis", "value_output_basis", "head_permutation", "norm_folding", "norm_scale")
SAMPLES = 16

TEXT = """# Flatness of attention heads

An attention head acts through two products alone: W_q^T W_k, which makes the scores, and W_o W_v, which makes what is
added. The function stays the same if queries are multiplied by an invertible matrix M and keys by M^-T, or values by
B and the columns of W_o that read them by B^-1 (with rotary positions, M must commute with the rotations): h^2
directions for each of the two products of a head of size h. A number that changes along them says nothing about the
function. da Silva, Dangel and Oore (Hide & Seek, 2025) measure sharpness on the quotient, where all such weights are
one point.

## The measure

Change a weight W to W (I + A), with a small matrix A. Relative flatness is the trace of the second derivative of the
risk in the entries of A. Another basis M acts on W_q from the left, A from the right: (M W_q)(I + A) = M (W_q (I +
A)), so the trace is invariant; so it is for W_k and W_v. The basis of values stands to the right of W_o, so there A
stands on the left, (I + A) W_o. `head_flatness` is the sum of the four traces of every head, `head_flatness_ggn` their
Gauss-Newton part, which is exact without random probes:

    sum_{{s,s'}} <w_s, w_s'> Tr H_{{s,s'}},  w_s the rows of W_q, W_k, W_v, and the columns of W_o

This is the trace in the metric tr((W W^T)^-1 dW dW^T), for W_o tr(dW (W^T W)^-1 dW^T), which is invariant under
GL(h), as a metric of the quotient must be. A mere change of basis does not change the outputs, so these directions add
nothing to the Gauss-Newton part: its trace over all directions is that over the quotient's. Away from a critical point
the whole Hessian has values along them. Where a LayerNorm or RMSNorm feeds attention alone, its scale belongs to W:
features are taken before scale and shift, so a scale that moves out of the norm changes nothing.

`tests/measures/test_heads.py` compares the measure with explicit Jacobians, with that metric, and before and after
each transform.

## One trained network

A ViT ({settings}) was trained on {train} digits. On the first {n} of them its loss is {loss:.2g}. The table has the
factor by which each number changes on these {n} when the weights move and the outputs stay (they differ by
{difference:.0e} at most; `1` means: by less than 1e-6). The factors hold for one random draw: matrices with singular
values in [5, 25], or factors in [5, 25].

| measure | before | {heads} |
|---|---|{lines}|
"""


def trained() -> tuple[fl.Problem, ViT, int]:
    """Return the problem of measuring a trained ViT on some of its digits; the ViT's settings; the number of digits."""
    settings = ViT(channels=1, image=8, patch=2, width=16, depth=2, heads=2, mlp=2.0)
    split = digits(train=200)
    x, y = split.train
    images = x.reshape(-1, 1, 8, 8)
    network = settings.build()
    train(network, (images, y), Training(Adam(lr=3e-3), batch_size=50, max_steps=250))
    problem = fl.Problem(network.double(), "cross_entropy", (images[:SAMPLES].double(), y[:SAMPLES]))
    return problem, settings, len(x)


def factor(before: float, after: float) -> str:
    """Return the change in words: 1 within 1e-6."""
    ratio = after / before
    return "1" if abs(ratio - 1) <= 1e-6 else f"{ratio:.3g}"


def page() -> str:
    """Return the page."""
    torch.set_num_threads(1)
    problem, s, n = trained()
    report = fl.check_invariance(fl.Lens(problem), list(MEASURES), list(MOVES), anyway=True)
    loss = float(fl.measure(fl.Lens(problem), ["loss"])["loss"].value)
    text = TEXT.format(
        settings=f"{s.depth} blocks, {s.heads} heads, width {s.width}", train=n, loss=loss, n=SAMPLES,
        difference=max(one.difference for one in report.moved.values()),
        heads=" | ".join(f"`{move}`" for move in MOVES), lines="|".join("---" for _ in MOVES),
    )  # fmt: skip
    rows = []
    for name in MEASURES:
        cells = [report[name, move] for move in MOVES]
        changes = " | ".join(factor(cell.before, cell.after) for cell in cells)
        rows.append(f"| `{name}` | {cells[0].before:.4g} | {changes} |")
    return text + "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(page(), end="")
