import json
from dataclasses import dataclass

import pytest

from flatlens.errors import BadInput, UnknownName
from flatlens.settings_json import as_plain, canonical, digest, from_plain
from flatlens.training import SAM, SETTINGS, SGD, RelativeFlatness, Steps, Training, Until

KNOWN = {kind.__name__: kind for kind in SETTINGS}
HOW = Training(
    SGD(0.1, momentum=0.9),
    schedule=Steps(at=(50, 80)),
    ascent=SAM(0.05),
    penalties=(RelativeFlatness(0.1, ("fc1", "fc2")),),
    until=Until(loss_below=0.1),
    max_epochs=90,
)


def test_settings_survive_json():
    plain = json.loads(json.dumps(as_plain(HOW)))
    assert from_plain(plain, KNOWN) == HOW
    assert canonical(as_plain(from_plain(plain, KNOWN))) == canonical(plain)


def test_types_are_told_apart_and_every_field_counts():
    @dataclass(frozen=True)
    class Twin:
        rho: float = 0.05

    assert digest(SAM()) != digest(Twin())
    assert digest(SAM()) != digest(SAM(0.06))
    assert digest(SAM()) == digest(SAM(0.05))


def test_what_does_not_fit_is_refused_in_a_line():
    with pytest.raises(BadInput, match="unknown settings type 'Adagrad'"):
        from_plain({"type": "Adagrad"}, KNOWN)
    with pytest.raises(UnknownName, match="unknown setting 'radius' of SAM: choose from rho"):
        from_plain({"type": "SAM", "radius": 1.0}, KNOWN)
    with pytest.raises(UnknownName, match="did you mean momentum"):
        from_plain({"type": "SGD", "momentun": 0.9}, KNOWN)
    with pytest.raises(BadInput, match=r"^SGD needs lr: write SGD\(lr=\.\.\.\)$"):
        from_plain({"type": "SGD", "momentum": 0.9}, KNOWN)
    with pytest.raises(BadInput, match="settings contain a set"):
        as_plain({1, 2})
