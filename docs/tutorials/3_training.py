"""
Following a training run
========================

Follow measures during training, in flatlens's loop or in your own. For Lightning and
for transformers there are callbacks: see :doc:`/training`.
"""

# %%
# A :py:class:`~flatlens.Tracker` measures every k steps. Here it follows the
# sharpness of full-batch gradient descent. Theory says that sharpness rises until
# about 2 / learning rate, the edge of stability.

import torch

import flatlens as fl
from flatlens.data import digits
from flatlens.models import MLP
from flatlens.training import SGD, Training, train

split = digits(train=100)
model = MLP(inputs=64, widths=(32, 32), outputs=10, activation="tanh").build()
problem = fl.Problem(model, "half_squared_error", split.train)
tracker = fl.Tracker(problem, ["sharpness", "mls"], every=50, live=False)
settings = Training(
    SGD(lr=0.4), batch_size=100, loss="half_squared_error", max_steps=1500
)
train(model, split.train, settings, watch=tracker)
tracker.history.tail()

# %%
# The history is a tidy table, and draws itself. The dashed line is the edge, 2 / 0.4 =
# 5: sharpness rises above it and then stays there, while training goes on.

chart = tracker.plot()
chart

# %%
# In a loop of your own, call ``tracker.step`` once before the first step of the
# optimiser and after each step. It measures at the steps that ``every`` names, and
# ``tracker.close`` after the last one.

model = MLP(inputs=64, widths=(32, 32), outputs=10).build()
problem = fl.Problem(model, "cross_entropy", split.train)
tracker = fl.Tracker(
    problem, ["relative_flatness", "jacobian_norm"], every=50, live=False
)
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = split.train
tracker.step(optimiser=optimiser)
for _ in range(220):
    optimiser.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimiser.step()
    tracker.step(optimiser=optimiser)
tracker.close()
tracker.history.tail(4)
