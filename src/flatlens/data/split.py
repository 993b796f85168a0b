"""A data set divided into training and test data."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from flatlens.bounds import Target
from flatlens.distributions import Distribution


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Split:
    """Training and test data of one problem, classification or regression.

    `train` and `test` are the (inputs, targets) pairs that `flatlens.Problem` takes.
    """

    name: str
    x: Tensor  #: (n, ...) float32
    y: Tensor  #: (n,) int64 labels; (n, N) numbers, of the inputs' dtype, for a regression
    test_x: Tensor
    test_y: Tensor
    classes: int  #: labels are 0 to classes - 1; 0 says that this is a regression
    description: str = ""  #: preparation of the data, in a sentence
    distribution: Distribution | None = None  #: law from which the inputs were drawn independently, if it is known
    target: Target | None = None  #: the function that made the targets, where it is known

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the training data."""
        return self.x, self.y

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the held-out data."""
        return self.test_x, self.test_y

    @property
    def held_out(self) -> tuple[Tensor, Tensor] | None:
        """The held-out data; None if there is none."""
        return self.test if len(self.test_x) else None
