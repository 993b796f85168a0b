"""A data set cut into what is trained on and what is held out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)  # eq would compare tensors
class Split:
    """Training and test data of one classification problem.

    `train` and `test` are the (inputs, labels) pairs that `flatlens.Problem` takes.
    """

    name: str
    x: Tensor  #: (n, ...) float32
    y: Tensor  #: (n,) int64 labels
    test_x: Tensor
    test_y: Tensor
    classes: int
    description: str = ""  #: what was done to the data, in a sentence

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the training data."""
        return self.x, self.y

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the held-out data."""
        return self.test_x, self.test_y
