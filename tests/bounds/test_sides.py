"""Both sides of Chen et al.'s bounds beside their literal definitions, and beside wrong ones."""

import math
from collections.abc import Callable

import pytest
import torch
from builders import chain, lens_on, normal
from literal_bounds import adaptive, layers, sharpness, slopes
from torch import Tensor

from flatlens import Lens
from flatlens.bounds import BOUNDS, Claim, check_bounds
from flatlens.bounds.context import Context
from flatlens.bounds.definition import read_bound
from flatlens.errors import BadOption, UnknownName

NAMES = [name for name, one in BOUNDS.items() if one.id in {f"B{k}" for k in range(1, 9)}]
POWERS = [f"{name}(k={k})" for name in ("linear_stability", "volume_bound", "network_volume_bound") for k in (1, 2.5)]
FROBENIUS = [f"{name}(norm='frobenius')" for name in ("mls_chain", "nmls_bound")]
Formula = Callable[[], Tensor]


def claims(lens: Lens, name: str) -> dict[tuple[str, str | None], Claim]:
    """By part and layer."""
    context = Context(lens, frozenset(), None, torch.Generator().manual_seed(0))
    return {(claim.part, claim.layer): claim for claim in read_bound(name).claims(context)}


NET, X = chain([4, 5, 4, 3], 1), normal(6, 4, seed=2)
SEEN, S, ADAPTIVE = layers(NET, X), sharpness(NET, X), adaptive(NET, X)
FIRST, N, n = SEEN["0"], 3, 6
F2 = {name: seen.W.norm() for name, seen in SEEN.items()}  # ||W||_F


def total(of: Callable[..., Tensor]) -> Tensor:
    """Over layers."""
    return torch.stack([of(seen) for seen in SEEN.values()]).sum(0)


def inverse_square(seen) -> Tensor:
    return (1 / seen.norm**2).mean()


def volumes(factor: Callable[..., Tensor]) -> Tensor:
    """Proposition 3.6's right side, as printed."""
    inside = total(lambda s: (factor(s) ** (2 * N)).sum())
    return inside.sqrt() / n * (n * S.mean() / N) ** (N / 2)


# (bound, part, layer) -> left, right, as printed; of volumes the exponentials of what the claims hold
LITERAL: dict[tuple[str, str, str | None], tuple[Formula, Formula]] = {
    ("linear_stability", "", "2"): (
        lambda: SEEN["2"].spectral,
        lambda: SEEN["2"].W2 * SEEN["2"].slope / SEEN["2"].norm,
    ),
    ("linear_stability", "frobenius", "2"): (
        lambda: SEEN["2"].frobenius,
        lambda: SEEN["2"].W2 * SEEN["2"].slope / SEEN["2"].norm,
    ),
    ("linear_stability", "middle", "0"): (lambda: FIRST.spectral, lambda: FIRST.slope),
    ("linear_stability", "sound", "2"): (
        lambda: SEEN["2"].spectral,
        lambda: SEEN["2"].W2 * SEEN["2"].J.flatten(1).norm(dim=1),
    ),
    ("linear_stability", "mean", "0"): (
        lambda: (FIRST.spectral**2).mean(),
        lambda: FIRST.W2**2 / FIRST.norm.min() ** 2 * S.mean(),
    ),
    ("linear_stability", "mean_1", "0"): (
        lambda: FIRST.spectral.mean(),
        lambda: FIRST.W2 / FIRST.norm.min() * S.sqrt().mean(),
    ),
    ("linear_stability", "mean_4", "0"): (
        lambda: (FIRST.spectral**4).mean(),
        lambda: FIRST.W2**4 / FIRST.norm.min() ** 4 * (S**2).mean(),
    ),
    ("volume_bound", "lemma", "0"): (lambda: FIRST.volume, lambda: (FIRST.frobenius**2 / N) ** (N / 2)),
    ("volume_bound", "published", "0"): (lambda: FIRST.volume, lambda: (FIRST.frobenius**2 / N) ** (N / 2)),
    ("volume_bound", "mean", "0"): (
        lambda: FIRST.volume.mean(),
        lambda: N ** (-N / 2) * (FIRST.frobenius**N).mean(),
    ),
    ("volume_bound", "", "0"): (
        lambda: FIRST.volume.mean(),
        lambda: (FIRST.W2 ** (2 * N) / FIRST.norm ** (2 * N)).sum().sqrt() / n * (n * S.mean() / N) ** (N / 2),
    ),
    ("volume_bound", "second", "0"): (
        lambda: N ** (-N / 2) / n * (FIRST.frobenius**N).sum(),
        lambda: (FIRST.W2 ** (2 * N) / FIRST.norm ** (2 * N)).sum().sqrt() / n * (n * S.mean() / N) ** (N / 2),
    ),
    ("network_volume_bound", "mean", None): (
        lambda: total(lambda s: s.volume.mean()),
        lambda: N ** (-N / 2) / n * total(lambda s: (s.frobenius**N).sum()),
    ),
    ("network_volume_bound", "second", None): (
        lambda: N ** (-N / 2) / n * total(lambda s: (s.frobenius**N).sum()),
        lambda: volumes(lambda s: s.W2 / s.norm),
    ),
    ("network_volume_bound", "", None): (
        lambda: total(lambda s: s.volume.mean()),
        lambda: volumes(lambda s: s.W2 / s.norm),
    ),
    ("mls_chain", "", "0"): (
        lambda: FIRST.spectral.mean(),
        lambda: FIRST.W2 * inverse_square(FIRST).sqrt() * S.mean().sqrt(),
    ),
    ("mls_chain", "A_B", "0"): (
        lambda: FIRST.spectral.mean(),
        lambda: FIRST.W2 / n * (FIRST.slope / FIRST.norm).sum(),
    ),
    ("mls_chain", "A_B.aligned", "0"): (
        lambda: FIRST.spectral.mean(),
        lambda: FIRST.W2 * torch.linalg.matrix_norm(FIRST.J, 2).mean(),
    ),
    ("mls_chain", "A_B.rank", "0"): (
        lambda: FIRST.W2 * torch.linalg.matrix_norm(FIRST.J, 2).mean(),
        lambda: FIRST.W2 * FIRST.J.flatten(1).norm(dim=1).mean(),
    ),
    ("mls_chain", "B_C", "0"): (
        lambda: FIRST.W2 / n * (FIRST.slope / FIRST.norm).sum(),
        lambda: FIRST.W2 * inverse_square(FIRST).sqrt() * (FIRST.slope**2).mean().sqrt(),
    ),
    ("mls_chain", "B_C.variation", "0"): (
        lambda: FIRST.W2 / n * (FIRST.slope / FIRST.norm).sum(),
        lambda: FIRST.W2 * ((FIRST.slope / FIRST.norm) ** 2).mean().sqrt(),
    ),
    ("mls_chain", "C_D", "0"): (
        lambda: FIRST.W2 * inverse_square(FIRST).sqrt() * (FIRST.slope**2).mean().sqrt(),
        lambda: FIRST.W2 * inverse_square(FIRST).sqrt() * S.mean().sqrt(),
    ),
    ("nmls_bound", "", None): (
        lambda: total(lambda s: s.spectral.mean()),
        lambda: total(lambda s: (s.W2**2 / s.norm**2).mean()).sqrt() * S.mean().sqrt(),
    ),
    ("matrix_normalized_bound", "", "2"): (
        lambda: inverse_square(SEEN["2"]) ** -0.5 * SEEN["2"].spectral.mean(),
        lambda: SEEN["2"].W2 * (SEEN["2"].slope ** 2).mean().sqrt(),
    ),
    ("matrix_normalized_bound", "", None): (
        lambda: total(lambda s: inverse_square(s) ** -0.5 * s.spectral.mean()),
        lambda: total(lambda s: s.W2 * (s.slope**2).mean().sqrt()),
    ),
    ("matrix_normalized_bound", "frobenius", None): (
        lambda: total(lambda s: inverse_square(s) ** -0.5 * s.spectral.mean()),
        lambda: total(lambda s: s.W.norm() * (s.slope**2).mean().sqrt()),
    ),
    ("adaptive_bound", "", "2"): (
        lambda: ((SEEN["2"].dx ** 2).sum(1) * SEEN["2"].x ** 2).sum(1) / len(SEEN["2"].W),
        lambda: (SEEN["2"].W ** 2 * (SEEN["2"].dw ** 2).sum(1)).sum((1, 2)),
    ),
    ("adaptive_bound", "mean", "0"): (
        lambda: ((FIRST.dx**2).sum(1) * FIRST.x**2).sum() / n / len(FIRST.W),
        lambda: ADAPTIVE.mean(),
    ),
    ("normalized_mls_bound", "", "0"): (
        lambda: (FIRST.norm**2 * FIRST.spectral**2).mean(),
        lambda: torch.einsum("im,jm,nkip,nkjp->n", FIRST.W, FIRST.W, FIRST.dw, FIRST.dw).mean(),
    ),
    ("normalized_mls_bound", "sample", "2"): (
        lambda: SEEN["2"].norm ** 2 * SEEN["2"].spectral ** 2,
        lambda: torch.einsum("im,jm,nkip,nkjp->n", SEEN["2"].W, SEEN["2"].W, SEEN["2"].dw, SEEN["2"].dw),
    ),
}
for part in ("", "A_B", "A_B.aligned", "A_B.rank", "B_C", "B_C.variation", "C_D"):  # ||W||_F in place of ||W||_2
    left, right = LITERAL["mls_chain", part, "0"]
    LITERAL[FROBENIUS[0], part, "0"] = (
        left if part in ("", "A_B", "A_B.aligned") else lambda left=left: left() * F2["0"] / FIRST.W2,
        lambda right=right: right() * F2["0"] / FIRST.W2,
    )
LITERAL[FROBENIUS[1], "", None] = (
    lambda: total(lambda s: s.spectral.mean()),
    lambda: total(lambda s: (s.W**2).sum() * (1 / s.norm**2).mean()).sqrt() * S.mean().sqrt(),
)
for k in (1, 2.5):  # Eq. 6, 20 to 23 and 25 to 27
    LITERAL |= {
        (f"linear_stability(k={k})", "mean_k", "0"): (
            lambda k=k: (FIRST.spectral**k).mean(),
            lambda k=k: FIRST.W2**k / FIRST.norm.min() ** k * (S ** (k / 2)).mean(),
        ),
        (f"volume_bound(k={k})", "power", "0"): (
            lambda k=k: (FIRST.frobenius**k).mean(),
            lambda k=k: n ** (k / 2 - 1) * FIRST.W2**k * (1 / FIRST.norm ** (2 * k)).sum().sqrt() * S.mean() ** (k / 2),
        ),
        (f"volume_bound(k={k})", "power.stability", "0"): (
            lambda k=k: (FIRST.frobenius**k).mean(),
            lambda k=k: FIRST.W2**k * (FIRST.slope**k / FIRST.norm**k).mean(),
        ),
        (f"volume_bound(k={k})", "power.cauchy", "0"): (
            lambda k=k: FIRST.W2**k * (FIRST.slope**k / FIRST.norm**k).mean(),
            lambda k=k: (
                FIRST.W2**k / n * (1 / FIRST.norm ** (2 * k)).sum().sqrt() * (FIRST.slope ** (2 * k)).sum().sqrt()
            ),
        ),
        (f"volume_bound(k={k})", "power.norms", "0"): (
            lambda k=k: (
                FIRST.W2**k / n * (1 / FIRST.norm ** (2 * k)).sum().sqrt() * (FIRST.slope ** (2 * k)).sum().sqrt()
            ),
            lambda k=k: n ** (k / 2 - 1) * FIRST.W2**k * (1 / FIRST.norm ** (2 * k)).sum().sqrt() * S.mean() ** (k / 2),
        ),
        (f"network_volume_bound(k={k})", "power", None): (
            lambda k=k: total(lambda s: (s.frobenius**k).mean()),
            lambda k=k: (
                (total(lambda s: (s.W2 ** (2 * k) / s.norm ** (2 * k)).sum()) / n).sqrt()
                * (n ** (k - 1) * S.mean() ** k).sqrt()
            ),
        ),
        (f"network_volume_bound(k={k})", "power.stability", None): (
            lambda k=k: total(lambda s: (s.frobenius**k).mean()),
            lambda k=k: total(lambda s: (s.W2**k * s.slope**k / s.norm**k).mean()),
        ),
        (f"network_volume_bound(k={k})", "power.cauchy", None): (
            lambda k=k: total(lambda s: (s.W2**k * s.slope**k / s.norm**k).mean()),
            lambda k=k: (
                (total(lambda s: (s.W2 ** (2 * k) / s.norm ** (2 * k)).sum()) / n).sqrt()
                * (total(lambda s: (s.slope ** (2 * k)).sum()) / n).sqrt()
            ),
        ),
        (f"network_volume_bound(k={k})", "power.norms", None): (
            lambda k=k: (
                (total(lambda s: (s.W2 ** (2 * k) / s.norm ** (2 * k)).sum()) / n).sqrt()
                * (total(lambda s: (s.slope ** (2 * k)).sum()) / n).sqrt()
            ),
            lambda k=k: (
                (total(lambda s: (s.W2 ** (2 * k) / s.norm ** (2 * k)).sum()) / n).sqrt()
                * (n ** (k - 1) * S.mean() ** k).sqrt()
            ),
        ),
    }

# what a slip of the pen would make of a side: 0 the left, 1 the right
MUTANTS: list[tuple[tuple[str, str, str | None], int, Formula]] = [
    (("linear_stability", "", "2"), 0, lambda: SEEN["2"].frobenius),
    (("linear_stability", "", "2"), 0, lambda: -SEEN["2"].spectral),
    (("linear_stability", "", "2"), 1, lambda: F2["2"] * SEEN["2"].slope / SEEN["2"].norm),
    (("linear_stability", "", "2"), 1, lambda: SEEN["2"].W2 * SEEN["2"].slope ** 2 / SEEN["2"].norm),
    (("linear_stability", "", "2"), 1, lambda: SEEN["2"].W2 * SEEN["2"].slope / SEEN["2"].norm ** 2),
    (("linear_stability", "", "2"), 1, lambda: SEEN["2"].W2 * SEEN["2"].slope / SEEN["2"].norm.mean()),
    (("linear_stability", "", "2"), 1, lambda: SEEN["2"].W2 * SEEN["2"].slope),
    (("linear_stability", "frobenius", "2"), 0, lambda: SEEN["2"].spectral),
    (("linear_stability", "middle", "0"), 1, lambda: FIRST.slope**2),
    (("linear_stability", "sound", "2"), 1, lambda: SEEN["2"].W2 * torch.linalg.matrix_norm(SEEN["2"].J, 2)),
    (("linear_stability", "mean", "0"), 0, lambda: FIRST.spectral.mean() ** 2),
    (("linear_stability", "mean", "0"), 0, lambda: (FIRST.spectral**2).sum()),
    (("linear_stability", "mean", "0"), 1, lambda: FIRST.W2 / FIRST.norm.min() ** 2 * S.mean()),
    (("linear_stability", "mean", "0"), 1, lambda: FIRST.W2**2 / FIRST.norm.max() ** 2 * S.mean()),
    (("linear_stability", "mean", "0"), 1, lambda: FIRST.W2**2 / FIRST.norm.min() ** 2 * S.sum()),
    (("linear_stability", "mean_1", "0"), 1, lambda: FIRST.W2 / FIRST.norm.min() * S.mean().sqrt()),
    (("linear_stability", "mean_4", "0"), 0, lambda: FIRST.spectral.mean() ** 4),
    (("linear_stability", "mean_4", "0"), 1, lambda: FIRST.W2**4 / FIRST.norm.min() ** 4 * S.mean() ** 2),
    (("volume_bound", "lemma", "0"), 0, lambda: FIRST.volume**2),
    (("volume_bound", "lemma", "0"), 1, lambda: (FIRST.frobenius**2) ** (N / 2)),
    (("volume_bound", "lemma", "0"), 1, lambda: (FIRST.spectral**2 / N) ** (N / 2)),
    (("volume_bound", "mean", "0"), 0, lambda: FIRST.volume.sum()),
    (("volume_bound", "mean", "0"), 1, lambda: N ** (-N / 2) * FIRST.frobenius.mean() ** N),
    (
        ("volume_bound", "", "0"),
        1,
        lambda: (FIRST.W2**N / FIRST.norm**N).sum().sqrt() / n * (n * S.mean() / N) ** (N / 2),
    ),
    (
        ("volume_bound", "", "0"),
        1,
        lambda: (FIRST.W2 ** (2 * N) / FIRST.norm ** (2 * N)).mean().sqrt() / n * (n * S.mean() / N) ** (N / 2),
    ),
    (
        ("volume_bound", "", "0"),
        1,
        lambda: (FIRST.W2 ** (2 * N) / FIRST.norm ** (2 * N)).sum().sqrt() / n * (S.mean() / N) ** (N / 2),
    ),
    (("volume_bound", "second", "0"), 0, lambda: N ** (-N / 2) * FIRST.frobenius.mean() ** N),
    (("network_volume_bound", "mean", None), 1, lambda: N ** (-N / 2) * (FIRST.frobenius**N).mean()),
    (("network_volume_bound", "second", None), 0, lambda: total(lambda s: s.volume.mean())),
    (("network_volume_bound", "", None), 0, lambda: FIRST.volume.mean()),
    (("network_volume_bound", "", None), 1, lambda: volumes(lambda s: s.W.norm() / s.norm)),
    (("mls_chain", "", "0"), 1, lambda: FIRST.W2 * inverse_square(FIRST) * S.mean().sqrt()),
    (("mls_chain", "", "0"), 1, lambda: FIRST.W2 * inverse_square(FIRST).sqrt() * S.mean()),
    (("mls_chain", "", "0"), 1, lambda: FIRST.W2 / FIRST.norm.mean() * S.mean().sqrt()),
    (("mls_chain", "A_B", "0"), 0, lambda: FIRST.frobenius.mean()),
    (("mls_chain", "A_B", "0"), 1, lambda: FIRST.W2 * FIRST.slope.mean() / FIRST.norm.mean()),
    (("mls_chain", "A_B.aligned", "0"), 1, lambda: F2["0"] * torch.linalg.matrix_norm(FIRST.J, 2).mean()),
    (("mls_chain", "A_B.rank", "0"), 0, lambda: FIRST.W2 * FIRST.J.flatten(1).norm(dim=1).mean()),
    (("mls_chain", "B_C", "0"), 1, lambda: FIRST.W2 * inverse_square(FIRST).sqrt() * FIRST.slope.mean()),
    (("mls_chain", "B_C.variation", "0"), 1, lambda: FIRST.W2 * ((FIRST.slope * FIRST.norm) ** 2).mean().sqrt()),
    (("mls_chain", "C_D", "0"), 0, lambda: F2["0"] * inverse_square(FIRST).sqrt() * (FIRST.slope**2).mean().sqrt()),
    (("nmls_bound", "", None), 0, lambda: total(lambda s: s.spectral.mean()) / len(SEEN)),
    (("nmls_bound", "", None), 1, lambda: total(lambda s: (s.W2 / s.norm).mean()).sqrt() * S.mean().sqrt()),
    (("nmls_bound", "", None), 1, lambda: total(lambda s: (s.W2**2 / s.norm**2).sum()).sqrt() * S.mean().sqrt()),
    (("nmls_bound", "", None), 1, lambda: total(lambda s: (s.W2**2 / s.norm**2).mean().sqrt()) * S.mean().sqrt()),
    (("matrix_normalized_bound", "", None), 0, lambda: total(lambda s: inverse_square(s) ** 0.5 * s.spectral.mean())),
    (("matrix_normalized_bound", "", None), 0, lambda: total(lambda s: s.norm.mean() * s.spectral.mean())),
    (("matrix_normalized_bound", "", None), 1, lambda: total(lambda s: s.W.norm() * (s.slope**2).mean().sqrt())),
    (("matrix_normalized_bound", "", None), 1, lambda: total(lambda s: s.W2 * s.slope.mean())),
    (("matrix_normalized_bound", "frobenius", None), 1, lambda: total(lambda s: s.W2 * (s.slope**2).mean().sqrt())),
    (
        ("adaptive_bound", "", "2"),
        0,
        lambda: ((SEEN["2"].dx ** 2).sum(1) * SEEN["2"].x ** 2).sum(1) / SEEN["2"].W.shape[1],
    ),
    (("adaptive_bound", "", "2"), 0, lambda: ((SEEN["2"].dx ** 2).sum(1) * SEEN["2"].x ** 2).sum(1) / N),
    (("adaptive_bound", "", "2"), 1, lambda: (SEEN["2"].W.abs() * (SEEN["2"].dw ** 2).sum(1)).sum((1, 2))),
    (("adaptive_bound", "", "2"), 1, lambda: (SEEN["2"].W ** 2 * SEEN["2"].dw.sum(1) ** 2).sum((1, 2))),
    (("adaptive_bound", "mean", "0"), 1, lambda: (FIRST.W**2 * (FIRST.dw**2).sum(1)).sum((1, 2)).mean()),
    (("adaptive_bound", "mean", "0"), 1, lambda: ADAPTIVE.sum()),
    (("normalized_mls_bound", "", "0"), 0, lambda: (FIRST.norm * FIRST.spectral**2).mean()),
    (("normalized_mls_bound", "", "0"), 0, lambda: (FIRST.norm**2 * FIRST.frobenius**2).mean()),
    (("normalized_mls_bound", "", "0"), 1, lambda: (FIRST.W.norm() ** 2 * FIRST.slope**2).mean()),
    (("normalized_mls_bound", "sample", "2"), 1, lambda: F2["2"] ** 2 * SEEN["2"].slope ** 2),
]  # fmt: skip


@pytest.fixture(scope="module")
def made():
    lens = lens_on(NET, X)
    return {name: claims(lens, name) for name in (*NAMES, *POWERS, *FROBENIUS)}


def side(made, row, number: int) -> Tensor:
    """A side of a claim, out of its logarithm."""
    name, part, layer = row
    claim = made[name][part, layer]
    value = torch.as_tensor((claim.lhs, claim.rhs)[number], dtype=torch.float64)
    return value.exp() if claim.logs else value


def agree(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= 1e-9 * other.abs()).all())


@pytest.mark.parametrize("row", LITERAL, ids=lambda row: ".".join(str(part) for part in row if part))
def test_both_sides_are_the_literal_definitions(made, row):
    for number, formula in enumerate(LITERAL[row]):
        assert agree(side(made, row, number), formula())


@pytest.mark.parametrize(("row", "number", "wrong"), MUTANTS)
def test_a_slip_of_the_pen_would_be_caught(made, row, number, wrong):
    assert not agree(side(made, row, number), wrong())


def test_every_part_of_these_bounds_is_compared_or_tested_elsewhere(made):
    elsewhere = {("linear_stability", "published"), ("matrix_normalized_bound", "inner")}
    told = {(name, part) for name, part, _ in LITERAL} | elsewhere
    assert {(name, part) for name, found in made.items() for part, _ in found if name in NAMES} - {
        ("residual_bound", "")
    } <= told
    assert {(name, part) for (name, part, _), _, _ in MUTANTS} | {("volume_bound", "published")} >= {
        (name, part) for name, part in told - elsewhere if name in NAMES
    }


def test_the_power_n_is_the_volumes_second_step(made):
    """Eq. 23 and 27 with k = N are the last steps of Propositions 3.4 and 3.6, without their factor N^(-N/2)."""
    lens = lens_on(NET, X)
    for name, layer in (("volume_bound", "0"), ("network_volume_bound", None)):
        power, second = claims(lens, f"{name}(k={N})")["power", layer], made[name]["second", layer]
        for one, other in ((power.lhs, second.lhs), (power.rhs, second.rhs)):
            assert float(one - other) == pytest.approx(N / 2 * math.log(N), rel=1e-9)


def test_a_convolution_has_the_norm_of_the_authors_code():
    """||K||_F^2 times its positions; without padding that is ||T||_F^2, T the convolution as a matrix."""
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    x = normal(4, 2, 3, 3, seed=1)
    T = torch.autograd.functional.jacobian(lambda one: net[0](one[None]).flatten(), x[0]).flatten(1)
    spectral, frobenius = (claims(lens_on(net, x), f"mls_chain{option}") for option in ("", "(norm='frobenius')"))
    ratio = float(frobenius["", "0"].rhs / spectral["", "0"].rhs)
    assert ratio == pytest.approx(2 * float(net[0].weight.detach().norm() / torch.linalg.matrix_norm(T, 2)), rel=1e-7)
    assert ratio == pytest.approx(float(T.norm() / torch.linalg.matrix_norm(T, 2)), rel=1e-7)


def test_an_unknown_norm_is_refused():
    with pytest.raises(BadOption, match=r"norm='nuclear'.*'spectral', 'frobenius'"):
        check_bounds(lens_on(NET, X), "nmls_bound(norm='nuclear')")


def test_a_power_below_one_has_no_lemma_and_is_refused():
    """Lemma C.1 fails there: (sum a^k)^(1/k) > sum a for k < 1."""
    lens = lens_on(NET, X)
    for name in ("volume_bound", "network_volume_bound"):
        with pytest.raises(BadOption, match=r"k=0\.5: expected a finite number of at least 1"):
            check_bounds(lens, f"{name}(k=0.5)")
    assert check_bounds(lens, "linear_stability(k=0.5)").of("linear_stability(k=0.5).mean_k", "0").status == "holds"
    with pytest.raises(UnknownName, match="unknown option 'k' of mls_chain"):
        check_bounds(lens, "mls_chain(k=2)")


def test_shared_sharpness_needs_every_slope():
    """S of the literal definition, from the blocks that `slopes` gives."""
    assert S.mean() == pytest.approx(float(sum((v**2).sum() for v in slopes(NET, X).values()) / n))
