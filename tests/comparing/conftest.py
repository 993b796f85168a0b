"""The helper module beside the tests, and three networks compared."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def three():
    """a and b differ; c is b with its layers rescaled."""
    from checkpoints import TEST, lens, network, rescaled

    import flatlens as fl

    nets = {"a": network(0), "b": network(1), "c": rescaled(network(1))}
    return fl.compare({name: lens(net, test=TEST) for name, net in nets.items()}, "pass")
