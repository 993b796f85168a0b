"""
Reading a table of bounds
=========================

Check the theorems that relate flatness to compression and generalisation on your own
network.
"""

# %%
# A theorem says: if some assumptions hold, the left side is at most the right side.
# flatlens computes both sides and checks the assumptions.

import flatlens as fl
from flatlens.data import digits
from flatlens.models import MLP
from flatlens.training import SGD, Training, train

split = digits(train=100)
model = MLP(inputs=64, widths=(32, 32), outputs=10).build()
train(
    model,
    split.train,
    Training(SGD(lr=0.1), batch_size=10, loss="half_squared_error", max_steps=2000),
)
lens = fl.Lens(fl.Problem(model, "half_squared_error", split.train, test=split.test))

table = fl.check_bounds(lens)
frame = table.frame()
frame[["bound", "layer", "lhs", "rhs", "tightness", "status"]].head(10)

# %%
# *holds*: every assumption was checked, or you declared it, and the left side is at
# most the right side. *not applicable*: an assumption is false here, was neither
# checked nor declared, or a side is NaN or overflows. *undecided*: the standard error
# is larger than the slack. *violated*: the left side is larger.

frame["status"].value_counts()

# %%
# *tightness* is left over right. A bound of tightness 1e-18 holds, but its right side
# is far too large to be of use.
# Here are the tightest ones.

tightest = frame.sort_values("tightness", ascending=False).head(8)
tightest[["bound", "layer", "tightness", "status", "assumption"]]

# %%
# No bound may be violated where its assumptions hold. If you see one, a declared
# assumption is false, or flatlens or the theorem has an error: please report it.

table.violated
