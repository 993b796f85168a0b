"""devinterp's local learning coefficient beside flatlens's, on losses whose posterior is known.

    python -m benchmarks.peers.sgld  (`benchmarks/peers` says how to install devinterp)

Protocol, fixed before the first run. The losses, n = 10,000 and gamma = 1 are those of
`benchmarks.learning_coefficient`, and so is the truth: the mean of the localised posterior by quadrature. 32 seeds of
each loss. Every gradient is that of the full loss, so that no minibatch adds noise. All contestants are reported:

- flatlens, default options: 4 chains of 100 + 300 transitions of 5 leapfrog steps, 8,000 gradients;
- devinterp `sample` and `compute_llc`, "matched": the same posterior (n_beta = n / log n, localization = gamma), 4
  chains of 500 burn-in steps and 1,500 draws, 8,000 gradients, the sampler "sgmcmc_sgld", which is its default. The
  step `lr` has no default: 0.001, as in its README, 0.0001 and 0.00001;
- devinterp, defaults: 4 chains of 200 draws, no burn-in, localization 0, and lr = 0.001, n_beta = 30 of its README,
  because both are required. That is another posterior, and its truth is the learning coefficient: exactly its mean for
  sums of powers. For tanh and w1^2 w2^2 that posterior is improper.

devinterp returns a value by chain and their standard deviation, no interval. Counted is how often Student's interval of
its four chains' values, which a user can make, holds the truth. `compute_llc` averages over the burn-in too: `error` is
of its value, `error_after` of the mean that leaves the burn-in out. Reported are the mean error and the standard
deviation over seeds; refused (flatlens) or failed (devinterp warns "Chain failed") seeds are counted and left out.

Expected for a loss of curvature h, from the recursion of SGLD: its value is 1 / (1 - lr (n_beta h + gamma) / 4) of the
truth, so 2.19, 1.057 and 1.0055 for w^2 once the chains have converged.

The 32 seeds are rows of one batch (the default batch size): the mean over the batch divides every row's gradient by 32,
so n_beta is 32 times that of a row. Where a chain fails, the seeds run one by one. Ten minutes on one core.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.learning_coefficient import GAMMA, MODELS, Model, N, by_quadrature, estimates
from flatlens.curvature.probes import student
from flatlens.measures.learning_coefficient import disagreement

SEEDS = 32
STRENGTH = N / math.log(N)
MATCHED = {"n_beta": STRENGTH, "localization": GAMMA, "num_burnin_steps": 500, "num_draws": 1500}
DEFAULTS = {"n_beta": 30.0, "lr": 1e-3}
RATES = (1e-3, 1e-4, 1e-5)


class Rows(nn.Module):
    """A loss at rows of weights, one row for each seed."""

    def __init__(self, model: Model, rows: int) -> None:
        super().__init__()
        self.model, self.gradients = model, [0]
        self.w = nn.Parameter(torch.zeros(rows, model.parameters))

    def losses(self, ids: Tensor) -> Tensor:
        """Losses of the rows named by the first "token" of every sequence, (batch, 1)."""
        self.gradients[0] += torch.is_grad_enabled()
        return self.model.loss(self.w)[ids[:, 0]][:, None]

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        """Copy the weights; the count of gradients is shared by all chains."""
        copy = Rows(self.model, len(self.w))
        copy.gradients = self.gradients
        return copy


@dataclass
class Sampled:
    """Values of devinterp's chains, (seeds, chains)."""

    values: NDArray[np.float64]  #: as `compute_llc` returns them
    after: NDArray[np.float64]  #: without the burn-in
    failed: NDArray[np.bool_]  #: (seeds,)
    gradients: float  #: of one seed


def sampled(model: Model, seeds: int, setting: dict[str, float], seed: int = 100) -> Sampled:
    """Run devinterp for seeds that are rows of one batch; where a chain fails, one by one."""
    from datasets import Dataset
    from devinterp.slt.llc import compute_llc
    from devinterp.slt.sampling import sample

    net = Rows(model, seeds)
    data = Dataset.from_dict({"input_ids": [[row, 0] for row in range(seeds)]}).with_format("torch")
    options = {**setting, "n_beta": setting["n_beta"] * seeds, "batch_size": seeds, "init_seed": seed, "shuffle": False}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tree = sample(net, data, {}, loss_fn=Rows.losses, output_path=Path(folder) / "samples.zarr", **options)
        returned = compute_llc(tree)["llc_per_chain"].values
        losses = tree["sampling_loss_micro"].values[..., 0].astype(float)  # (chains, steps, seeds)
    failed = any("Chain failed" in str(one.message) for one in told)
    if failed and seeds > 1:
        alone = [sampled(model, 1, setting, seed + 1000 * (row + 1)) for row in range(seeds)]
        join = {name: np.concatenate([getattr(one, name) for one in alone]) for name in ("values", "after", "failed")}
        return Sampled(**join, gradients=float(np.mean([one.gradients for one in alone])))
    burnt = int(setting.get("num_burnin_steps", 0))
    values, after = (setting["n_beta"] * part.mean(1).T for part in (losses, losses[:, burnt:]))
    if not failed:  # the loss at w* is 0
        assert np.allclose(values.mean(0) * seeds, returned, rtol=1e-4)
    return Sampled(values, after, np.full(seeds, failed), net.gradients[0])


def row(truth: float, values: NDArray[np.float64], half: NDArray[np.float64]) -> dict[str, float]:
    """Mean error, spread over seeds, and how many intervals hold the truth."""
    return {
        "truth": truth, "mean": float(values.mean()), "error": float(values.mean() - truth),
        "error_stderr": float(values.std(ddof=1) / math.sqrt(len(values))), "spread": float(values.std(ddof=1)),
        "half_width": float(half.mean()), "held": int((np.abs(values - truth) <= half).sum()), "seeds": len(values),
    }  # fmt: skip


def ours(model: Model, seeds: int) -> dict[str, Any]:
    """The row of flatlens."""
    truth, means, gradients = estimates(model, seeds)
    kept = [mean for mean in means if not disagreement(mean)]
    values, half = np.array([mean.value for mean in kept]), 1.96 * np.array([mean.stderr for mean in kept])
    left = {"left_out": seeds - len(kept), "gradients": gradients, "stated_interval": True}
    return {"who": "flatlens", **row(truth, values, half), **left}


def theirs(model: Model, seeds: int, setting: dict[str, float], who: str, truth: float) -> dict[str, Any]:
    """A row of devinterp."""
    found = sampled(model, seeds, setting)
    kept = found.values[~found.failed]
    half = 1.96 * np.array([student(torch.from_numpy(chains))[1] for chains in kept])
    after = found.after[~found.failed].mean(1)
    left = {"left_out": int(found.failed.sum()), "gradients": found.gradients, "stated_interval": False}
    more = {"error_after": float(after.mean() - truth), "spread_after": float(after.std(ddof=1)), **setting}
    return {"who": who, **row(truth, kept.mean(1), half), **left, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", default=str(Path(__file__).parents[1] / "results" / "learning_coefficient_peers.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        truth = by_quadrature(model, STRENGTH, GAMMA)
        found = [ours(model, options.seeds)]
        settings = [{**MATCHED, "lr": rate} for rate in RATES]
        found += [theirs(model, options.seeds, setting, "devinterp, matched", truth) for setting in settings]
        found.append(theirs(model, options.seeds, DEFAULTS, "devinterp, defaults", model.coefficient))
        print(pd.DataFrame(found).round(4).to_string(index=False), flush=True)
        versions = {package: importlib.metadata.version(package) for package in ("devinterp", "torch")}
        rows += [{"loss": name, **one, **versions} for one in found]
        pd.DataFrame(rows).to_csv(options.out, index=False)


if __name__ == "__main__":
    main()
