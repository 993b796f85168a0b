"""
Data larger than memory, and many outputs
=========================================

Limit the memory, read data in batches, and use random combinations of the outputs
where there are many.
"""

# %%
# A ``DataLoader`` or a ``Dataset`` is read in batches and never held as a whole. It is
# read more than once, always in the order of its samples, even with ``shuffle=True``.
# ``memory=`` limits what a measurement takes besides the network, the data and the
# results.

import torch
from torch.utils.data import DataLoader, TensorDataset

import flatlens as fl
from flatlens.models import MLP

torch.manual_seed(0)
samples = TensorDataset(torch.randn(2000, 64), torch.randint(200, (2000,)))
loader = DataLoader(samples, batch_size=100)
model = MLP(inputs=64, widths=(64, 64), outputs=200).build()
problem = fl.Problem(model, "cross_entropy", loader, memory="64MiB")
problem

# %%
# The network has 200 outputs. Beyond 128, a lens takes 16 random combinations of them
# instead of all. Traces are then estimates with a standard error, spectral norms are
# lower bounds, and volumes are undefined.

few = fl.measure(fl.Lens(problem), ["interpolation_sharpness", "mls", "log_volume"])
for name in ("interpolation_sharpness", "mls", "log_volume"):
    print(name, few[name].kind, few[name].value, few[name].stderr, few[name].note)

# %%
# ``outputs="exact"`` takes a backward pass for every output. On a part of the samples
# this is cheap, and tells how good the estimate is.

part = problem.subset(50, torch.Generator().manual_seed(0))
name = "interpolation_sharpness"
sketch, exact = (
    fl.measure(fl.Lens(part, outputs=outputs), [name])[name]
    for outputs in (16, "exact")
)
sketch.value, sketch.stderr, exact.value
