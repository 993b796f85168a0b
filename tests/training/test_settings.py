import pytest

from flatlens.errors import UnknownName
from flatlens.settings_json import as_plain, from_plain
from flatlens.training import SETTINGS, TrainedElsewhere

KNOWN = {kind.__name__: kind for kind in SETTINGS}


def test_settings_and_results_are_told_apart_and_survive_json():
    one = TrainedElsewhere("/a/b.pt", "0" * 12, "mse", {"lr": 0.1, "generalisation_gap": 0.3}, seed=2)
    assert (one.settings, one.results) == ({"lr": 0.1}, {"generalisation_gap": 0.3})
    assert from_plain(as_plain(one), KNOWN) == one
    assert one.objective.name == "mse"
    assert len({one, from_plain(as_plain(one), KNOWN)}) == 1


def test_an_unknown_loss_is_refused():
    with pytest.raises(UnknownName, match="did you mean mse"):
        TrainedElsewhere("a.pt", "0", "msee")
