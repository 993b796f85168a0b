"""
A first measurement
===================

Train a small network, measure it, and read the result: values, kinds, errors and
costs.
"""

# %%
# You need three things: a network, a loss, and data. Here the network is an MLP that
# we train on scikit-learn's digits until it fits all of its 200 training samples.

import flatlens as fl
from flatlens.data import digits
from flatlens.models import MLP
from flatlens.training import SGD, Training, Until, train

split = digits(train=200)
model = MLP(inputs=64, widths=(32, 32), outputs=10).build()
settings = Training(
    SGD(lr=0.1),
    batch_size=8,
    until=Until(loss_below=0.01, accuracy=1.0),
    max_steps=10_000,
)
result = train(model, split.train, settings)
result.outcome, result.steps

# %%
# A :py:class:`~flatlens.Problem` puts the three together. It runs the network once and
# refuses what would make numbers wrong, such as a network that is random in evaluation
# mode, or labels out of range. Test data is optional; with it, the report has the
# generalisation gap.

problem = fl.Problem(model, "cross_entropy", split.train, test=split.test)
problem

# %%
# :py:func:`~flatlens.measure` without names computes 8 to 14 numbers. With "pass" it
# computes everything that one forward and N backward passes give, N being the number of
# outputs.

lens = fl.Lens(problem)
report = fl.measure(lens, "pass")
report.frame().query("layer == ''")[["measure", "value", "stderr", "kind"]].head(12)

# %%
# Each number has a kind. *exact* means exact up to rounding. An *estimate* has a
# standard error. *lower bound* and *upper bound* say on which side the true value is.
# *undefined* has no value, and its note says why.

for name in ("relative_flatness", "mls", "log_volume"):
    print(name, report[name].kind, report[name].value, report[name].note)

# %%
# The network-level value is that at its input (``mls``), that of its last linear layer
# (``relative_flatness``), or a sum over layers. Most measures have a number for each
# layer, too.

chart = report.plot()
chart

# %%
# Measures of the Hessian take more work. In the summary that work is limited; by name
# they run in full. A lens keeps the values of its passes, and eigenvectors to start
# later searches from.

more = fl.measure(lens, ["sharpness", "hessian_trace"])
for name in ("sharpness", "hessian_trace"):
    print(
        name,
        more[name].value,
        more[name].kind,
        more[name].products,
        "products with the Hessian",
    )

# %%
# ``hessian_trace`` took no product: for networks that are piecewise linear in each
# weight, such as this one, the Hessian's diagonal blocks follow from the pass.
# ``sharpness``, the largest eigenvalue, is a lower bound: the search can miss a
# larger one. Its note says how near an eigenvalue is.
