"""Settings of the wrong kind: one line that says which, before anything is trained."""

import pytest

from flatlens.errors import BadInput
from flatlens.experiments.specification import study_of

ODD = """
lr=abc lr=nan lr=1,abc lr=True lr=None lr=() lr=(1,2) lr='x' lr=1j lr=b'x' lr={} lr=[] lr=SGD lr=1e400
seed=nan seed=1.5 seed=999999999999999999999999 seed=0,999999999999999999999999 seed=0:10:0 seed=0:9999999999
batch_size=abc batch_size=99999999999999999999999999 widths=abc widths=(1,'a') activation=5 activation=rely
model=5 data=5 data=digits training=5 optimiser=abc optimiser=SGD optimiser=SGD('a') optimiser=SGD(0.1,lr=1)
ascent=5 ascent=SAM('x') loss=5 until=5 momentum=abc weight_decay=nan label_smoothing=abc train=abc lr+seed=(1,2),(3,)
"""
LONG = [f"lr={'(' * 300}1{')' * 300}", f"lr={'-' * 5000}1", f"lr=1{'0' * 5000}", f"lr={'[' * 100_000}", "lr=\x00"]


def refused(data, *settings):
    with pytest.raises(BadInput) as caught:
        study_of(data, settings=settings, scale="smoke").networks()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 800
    return message


@pytest.mark.parametrize("setting", [*ODD.split(), *LONG], ids=lambda text: text[:30])
def test_a_setting_of_the_wrong_kind_is_refused(setting):
    refused("digits", setting)


def test_the_line_says_what_is_needed():
    assert refused("digits", "lr=abc") == "SGD(lr='abc'): expected a number"
    assert refused("digits", "momentum=True") == "SGD(momentum=True): expected a number"
    assert refused("digits", "widths=5") == "MLP(widths=5): expected several values in brackets, such as (1, 2),"
    assert refused("digits", "seed=1.5") == "MLP(seed=1.5): expected a whole number of at most 64 bits"
    assert "expected" in refused("digits", "ascent=5")


FILES = [
    "", "5", "[", "[" * 5000, "data: 5", "data: null", "data: []", "data: {name: 5}", "data: {type: 5}", "1: 2",
    "data: digits\nset: 5", "data: digits\nset: {lr: {}}", "data: digits\nset: {lr: }", "data: digits\nset: {lr: []}",
    "data: digits\nset: {5: 5}", "data: digits\nset: {lr: [[]]}", "data: digits\nset: {lr: 2001-01-01}",
    "data: digits\nmodel: 5", "data: digits\nmodel: []", "data: digits\nmodel: {type: SGD, lr: 1}", "data: 2001-13-45",
    "data: digits\nmodel: {type: MLP, widths: abc}", "data: digits\ntraining: 5", "data: digits\ntraining: [1]",
    "data: digits\ntraining: {optimiser: 5}", "data: digits\ntraining: {max_steps: {}}", "data: digits\nmeasures: 5",
    "data: digits\nmeasures: [5]", "data: digits\nmeasures: {mls: 1}", "data: digits\nmeasures: [[mls]]",
    "data: &a [*a]", "data: digits\nset: &a {lr: *a}", "data: !!python/object/apply:os.getcwd []", "data: \x00",
    "data: digits\ntraining: {batch_size: .nan}", "data: digits\nset: {lr: .inf}", "? [1]\n: 2",
]  # fmt: skip


@pytest.mark.parametrize("text", FILES, ids=lambda text: text[:40])
def test_a_file_of_the_wrong_kind_is_refused(tmp_path, text):
    (tmp_path / "study.yaml").write_text(text)
    refused(str(tmp_path / "study.yaml"))
