"""The answer to a training run, its screen and its page."""

import json

import pandas as pd
import pytest
import torch
from torch import nn

import flatlens as fl
from flatlens import cli
from flatlens.errors import BadFolder
from flatlens.tracking.history import TYPES, answer_of_run, save_history
from flatlens.training import ASAM, SAM, SGD, Training, train


def history(*rows):
    filled = {"lr": 0.1, "edge": float("nan"), "layer": "", "stderr": 0.0, "kind": "exact", "seconds": 0.0,
              "products": 0, "note": ""}  # fmt: skip
    return pd.DataFrame([{**filled, **row} for row in rows], columns=list(TYPES)).astype(TYPES)


def sharp(*ratios, name="sharpness"):
    return [{"step": 100 * at, "measure": name, "value": 20 * ratio, "edge": 20.0} for at, ratio in enumerate(ratios)]


@pytest.mark.parametrize(
    ("ratios", "says"),
    [
        ((0.2, 0.9, 1.05, 1.0, 0.98), "been at its edge of stability since step 200: since then sharpness is 1.00"),
        ((0.2, 0.4, 0.3), "not come to its edge of stability: sharpness is at most 0.40 times the edge, at step 100"),
        ((0.2, 2.0, 3.0), "has been above its edge of stability since step 100: since then sharpness is 2.50 times"),
        ((1.1, 0.9, 0.002), "began above its edge of stability, at 1.10 times the edge; sharpness is now 0.002 times"),
        ((0.2, 9.0, 9.0, 0.5), "came to its edge of stability at step 100; sharpness is now 0.50 times the edge"),
        ((0.2, 1.1, 1.0, 0.5), "came to its edge of stability at step 100; sharpness is now 0.50 times the edge"),
        ((56071.87, 1.2, 0.5), "began above its edge of stability, at 56,000 times the edge"),
    ],
)  # fmt: skip
def test_the_first_line_says_where_the_run_is_beside_its_edge(ratios, says):
    assert says in answer_of_run(history(*sharp(*ratios)))[0]


def test_the_edge_is_of_the_sharpness_before_other_measures_and_unknown_without_one():
    both = history(*sharp(0.5, 0.6), *sharp(1.5, 1.5, name="batch_sharpness(samples=8)"))
    assert "sharpness is at most 0.60" in answer_of_run(both)[0]
    only = history(*sharp(1.0, 1.1, name="batch_sharpness(samples=8)"))
    assert "since then batch_sharpness is 1.05 times" in answer_of_run(only)[0]
    for rows in (
        [],
        [{"step": 0, "measure": "sharpness", "value": 3.0}],
        [{"step": 0, "measure": "mls", "value": 3.0}],
    ):
        assert "No edge of stability is known" in answer_of_run(history(*rows))[0]
    undefined = {"step": 0, "measure": "sharpness", "value": float("nan"), "edge": 20.0, "kind": "undefined"}
    assert "No edge of stability is known" in answer_of_run(history(undefined))[0]


def test_the_loss_and_the_noise_have_a_sentence_where_they_were_tracked():
    losses = [{"step": step, "measure": "loss", "value": value} for step, value in ((0, 2.3), (1000, 0.05))]
    noise = {"step": 1000, "measure": "gradient_noise_scale(batches=8)", "value": 318.0, "kind": "lower bound"}
    part = {"step": 1000, "measure": "gradient_noise_scale(batches=8).covariance", "value": 9.0}
    _, loss, of_noise = answer_of_run(history(*losses, noise, part))
    assert loss == "The loss fell from 2.3 to 0.05 in 1,000 steps."
    assert "in batches of at least 320 samples" in of_noise
    assert len(answer_of_run(history(*losses[:1]))) == 1


def test_a_run_without_an_edge_says_why():
    rows = [{"step": at, "measure": "sharpness", "value": 1.0, "note": "no edge: Lion steps by signs"} for at in (0, 1)]
    assert answer_of_run(history(*rows)) == ["No edge of stability is known: Lion steps by signs."]


def test_a_lower_bound_of_zero_is_no_size_of_batches():
    bound = {"step": 5, "measure": "gradient_noise_scale", "value": 0.0, "kind": "lower bound", "note": "use more"}
    assert answer_of_run(history(bound))[-1] == "At step 5 the gradient's noise scale is not known (use more)."


def test_a_diverged_run_says_so_first_and_a_skipped_measurement_is_no_divergence():
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    problem = fl.Problem(net, "half_squared_error", (torch.randn(8, 3), torch.zeros(8, 1)))
    tracker = fl.Tracker(problem, ["sharpness", "loss"], every=2, live=False)
    for step in range(7):
        if step == 3:
            net.weight.data.fill_(torch.nan)
        tracker.step(step, optimiser=torch.optim.SGD(net.parameters(), lr=0.01))
    cause = "as training that diverged or weights that were never set leave them"
    assert tracker.answer[0] == (
        f"Nothing could be measured since step 4: 3 of 3 entries of 'weight' are NaN or inf, {cause}."
    )
    assert "not come to its edge" in tracker.answer[1]
    skipped = {"step": 300, "measure": "sharpness", "value": float("nan"), "kind": "undefined",
               "note": "skipped: measuring had taken 9% of the time, the budget is 5%"}  # fmt: skip
    assert answer_of_run(history(*sharp(0.2, 0.9, 1.05), skipped)) == answer_of_run(history(*sharp(0.2, 0.9, 1.05)))


def test_only_measures_with_an_edge_have_one_in_the_table(tmp_path, capsys):
    trace = {"step": 0, "measure": "hessian_trace", "value": 7.0, "edge": 20.0, "stderr": 0.5, "kind": "estimate"}
    rows = [*sharp(0.2, 0.4), {"step": 0, "measure": "loss", "value": 2.0, "edge": 20.0}, trace]
    save_history(history(*rows), tmp_path / "run.csv")
    assert cli.run(["track", str(tmp_path / "run.csv")]) == 0
    cells = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert cells["sharpness"] == ["4", "8", "20"]
    assert cells["loss"] == ["2", "2"]
    assert cells["hessian_trace"] == ["7", "±", "0.98", "7", "±", "0.98"]


@pytest.fixture
def tracker():
    torch.manual_seed(0)
    net = nn.Linear(3, 1, dtype=torch.float64)
    x = torch.randn(20, 3, dtype=torch.float64)
    problem = fl.Problem(net, "half_squared_error", (x, torch.zeros(20, 1, dtype=torch.float64)))
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    with fl.Tracker(problem, ["sharpness", "loss", "log_volume"], every=2, live=False) as tracker:
        for step in range(5):
            tracker.step(step, optimiser=optimiser)
    return tracker


def test_the_page_begins_with_the_answer_and_needs_no_network(tracker, tmp_path):
    page = tracker.page(tmp_path / "run.html").read_text()
    assert tracker.answer == answer_of_run(tracker.history)
    assert f'<p class="answer">{tracker.answer[0]}</p>' in page
    assert "<svg" in page
    assert "src=" not in page
    assert "3 measurements, steps 0 to 4" in page
    with pytest.raises(BadFolder, match="cannot be written"):
        tracker.page(tmp_path / "none" / "run.html")


def test_the_command_shows_the_answer_of_a_saved_history(tracker, tmp_path, capsys):
    saved, page = tmp_path / "run.csv", tmp_path / "run.html"
    tracker.save(saved)
    assert cli.run(["track", str(saved), "--page", str(page), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["answer"] == tracker.answer
    assert len(shown["rows"]) == len(tracker.history)
    assert page.read_text() == tracker.page(tmp_path / "other.html").read_text()
    assert cli.run(["track", str(saved)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(tracker.answer[0][:60])
    assert "sharpness" in text
    for wrong, says in ((tmp_path / "none.csv", "there is no such file"), (page, "damaged")):
        assert cli.run(["track", str(wrong)]) == 2
        assert says in capsys.readouterr().err


def test_the_page_has_the_batch_size_of_training_beside_the_noise_scale(tmp_path, capsys):
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    problem = fl.Problem(net, "half_squared_error", (x, y))
    tracker = fl.Tracker(problem, "gradient_noise_scale(batches=8)", every=2, live=False)
    train(net, (x, y), Training(SGD(0.01), batch_size=8, max_steps=4, loss="half_squared_error"), watch=tracker)
    assert tracker.batch_size == 8
    assert tracker.answer[-1].endswith("; training takes batches of 8.")
    # a saved history has no batch size: an option gives it
    saved, page = tmp_path / "run.csv", tmp_path / "run.html"
    tracker.save(saved)
    assert cli.run(["track", str(saved), "--page", str(page), "--json", "--batch-size", "8"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == tracker.answer
    assert "; training takes batches of 8." in page.read_text()
    assert cli.run(["track", str(saved), "--batch-size", "0"]) == 2
    assert "--batch-size 0: expected at least 1" in capsys.readouterr().err
    assert "training takes batches of 8." in tracker.page(tmp_path / "run.html").read_text()


@pytest.mark.parametrize(("ascent", "known"), [(SAM(0.05), True), (ASAM(0.5), False)])
def test_train_tells_the_tracker_sam_s_edge(ascent, known):
    torch.manual_seed(0)
    net = nn.Linear(3, 1, dtype=torch.float64)
    x, y = torch.randn(40, 3).double(), torch.randn(40, 1).double()
    tracker = fl.Tracker(fl.Problem(net, "half_squared_error", (x, y)), "sharpness", every=1, live=False)
    how = Training(SGD(0.1), batch_size=None, max_steps=2, loss="half_squared_error", ascent=ascent)
    start = [p.detach().clone() for p in net.parameters()]
    train(net, (x, y), how, watch=tracker)
    edge = tracker.history["edge"][0]
    if not known:
        assert "not for its adaptive form" in tracker.history["note"][0]
        return
    f = x @ start[0].T + start[1] - y
    norm = float(torch.cat([(f.T @ x).flatten() / 40, f.mean(0)]).norm())
    assert edge == pytest.approx(norm / 0.1 * ((1 + 4 * 0.05 * 20 / norm) ** 0.5 - 1), rel=1e-9)
    assert 0 < edge < 20


def test_a_rate_that_never_comes_to_its_edge_is_told_so_by_batch_sharpness():
    """The control: small steps on separable samples, by plain SGD in batches of 4."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(64, 8, generator=draw), torch.arange(64) % 3
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=draw))
    measure = "batch_sharpness(samples=4, batches=8)"
    tracker = fl.Tracker(fl.Problem(model, "cross_entropy", (x, y)), measure, every=100, live=False)
    train(model, (x, y), Training(SGD(0.01), batch_size=4, max_steps=300), watch=tracker)
    found = tracker.history
    ratios = found["value"] / found["edge"]
    assert found["edge"].tolist() == pytest.approx([200.0] * len(found))
    assert len(ratios) == 4
    assert ratios.max() < 0.1
    assert answer_of_run(found)[0].startswith("Training has not come to its edge of stability: batch_sharpness")
