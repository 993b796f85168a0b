"""
Which of your checkpoints?
==========================

Compare checkpoints by each measure, and see which measures can be compared at all.
"""

# %%
# Two networks were trained with different learning rates. Their weights are in files,
# as yours are. flatlens reads safetensors and files of ``torch.save``, and never
# unpickles objects.

import tempfile
from pathlib import Path

import torch

import flatlens as fl
from flatlens.data import digits
from flatlens.models import MLP
from flatlens.training import SGD, Training, train

split = digits(train=200)
folder = Path(tempfile.mkdtemp())
architecture = MLP(inputs=64, widths=(32, 32), outputs=10)
for lr in (0.01, 0.2):
    model = architecture.build()
    train(model, split.train, Training(SGD(lr=lr), batch_size=8, max_steps=2000))
    torch.save(model.state_dict(), folder / f"lr{lr}.pt")

# %%
# On the command line this would be ``flatlens compare net.py:build --weights lr0.01.pt
# --weights lr0.2.pt --data net.py:samples --loss cross_entropy``. In Python:

lenses = {}
for path in sorted(folder.glob("*.pt")):
    model = architecture.build()
    model.load_state_dict(torch.load(path, weights_only=True))
    lenses[path.stem] = fl.Lens(
        fl.Problem(model, "cross_entropy", split.train, test=split.test)
    )

comparison = fl.compare(
    lenses,
    ["relative_flatness", "mls", "fisher_rao", "weight_norm", "generalisation_gap"],
)
comparison.frame()[["measure", "model", "value", "kind", "rank"]]

# %%
# Do not trust every row equally. Multiply a layer of a ReLU network by 10 and divide
# the next by 10: the network computes the same function, and generalises alike. A
# measure that moves under this change can rank your checkpoints by scale alone.
# :py:func:`~flatlens.check_invariance` makes such changes to your network and measures
# before and after.

table = fl.check_invariance(
    lenses["lr0.2"], ["relative_flatness", "mls", "fisher_rao", "weight_norm"]
)
table.frame()[["measure", "transform", "before", "after", "unchanged", "declared"]]

# %%
# So compare by invariant measures. The columns ``layer``, ``neuron``, ``order`` and
# ``head`` of ``flatlens measure`` say the same for every measure, without computing.
