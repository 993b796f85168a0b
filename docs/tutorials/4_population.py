"""
A population of your own
========================

One network says little. Train a population, and see which measures correlate
with the generalisation gap.
"""

# %%
# A study trains one network for each combination of its axes, measures each, and
# relates every measure to the gap. This small one has two learning rates, two widths
# and six seeds on digits, 24 networks. The command line takes the same settings:
# ``flatlens study digits --out runs/mine --set lr=0.05,0.2 --set seed=0:6 --set ...``.
# ``flatlens study net.py:samples --model net.py:build --out runs/mine`` takes data and
# networks of yours.

import tempfile

from flatlens.experiments import run_study
from flatlens.experiments.specification import study_of

study = study_of(
    "digits",
    model="MLP",
    settings=[
        "train=100",
        "lr=0.05,0.2",
        "widths=(16,),(32,32)",
        "seed=0:6",
        "batch_size=10",
        "max_epochs=40",
    ],
)
result = run_study(study, tempfile.mkdtemp(), workers=2)
result.networks.shape, result.unfinished

# %%
# ``networks`` has a row for each network: its settings, how training ended, and every
# measure.

columns = ["lr", "widths", "seed", "relative_flatness", "mls", "generalisation_gap"]
result.networks[columns].head()

# %%
# The answer, in at most three sentences. Intervals are over seeds, because networks of
# one seed resemble each other.

print(*result.answer, sep="\n")

# %%
# ``gap_correlations`` has each measure's correlation with the gap, by several
# coefficients, with 95% intervals. Here is Kendall's tau-b; ``n`` counts networks,
# ``units`` seeds:

tau = result.gap_correlations.query("coefficient == 'Kendall tau-b'")
tau[["quantity", "value", "low", "high", "n", "units"]].head(8)
