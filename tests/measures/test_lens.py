"""The cache, its freshness, and what a report keeps."""

from __future__ import annotations

import pytest
import torch
from networks import network
from torch import nn

import flatlens as fl
from flatlens.errors import BadFolder, BadInput, StaleLens, UnknownName
from flatlens.measures.papers import paper


def lens(name: str = "mlp-relu", **options: object) -> fl.Lens:
    net, x, y = network(name)
    return fl.Lens(fl.Problem(net, "cross_entropy", (x, y), **options))


def test_one_pass_serves_all_measures_that_read_no_more() -> None:
    one = lens()
    fl.measure(one, ["mls"])
    fl.measure(one, ["nmls", "log_volume", "local_dimension"])  # all are about G
    assert one.passes == 1
    fl.measure(one)
    assert one.passes == 2
    fl.measure(one, ["kappa_trace"])
    report = fl.measure(one, ["local_volume(top_k=1)"])  # not planned for
    assert one.passes == 3
    assert report.about["passes"] == 3
    assert report["local_volume(top_k=1)"].value == pytest.approx(fl.measure(one)["mls"].value)


@pytest.mark.parametrize("change", ["in place", "replaced", "data", "in data", "buffer"])
def test_a_changed_model_is_stale(change: str) -> None:
    net, x, y = network("residual")
    one = fl.Lens(fl.Problem(net, "cross_entropy", (x, y)))
    fl.measure(one)
    with torch.no_grad():
        if change == "in place":
            net.head.weight.mul_(2)
        elif change == "replaced":
            net.head.weight = nn.Parameter(net.head.weight * 2)
        elif change == "in data":
            net.head.weight.data.copy_(net.head.weight.data.flip(0))  # bumps no version, keeps the norm
        elif change == "data":
            net.head.weight.data = net.head.weight.data * 2
        else:
            net.norm.running_mean.add_(1)
    name = "norm.running_mean" if change == "buffer" else "head.weight"
    with pytest.raises(StaleLens, match=f"'{name}' changed.*new Lens"):
        fl.measure(one)


def test_a_report_survives_its_file(tmp_path) -> None:
    report = fl.measure(lens("mlp-tanh"))
    report.save(tmp_path / "r.safetensors")
    back = fl.Report.load(tmp_path / "r.safetensors")
    assert back.about == report.about
    assert list(back) == list(report)
    for key in report:
        assert repr(back[key]) == repr(report[key])
        if report[key].samples is not None:
            assert torch.equal(back[key].samples, report[key].samples)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    with pytest.raises(BadFolder, match="cannot be written"):
        report.save(tmp_path / "no such folder" / "r.safetensors")
    (tmp_path / "r.safetensors").write_bytes(b"nonsense")
    with pytest.raises(BadInput, match="not a saved report"):
        fl.Report.load(tmp_path / "r.safetensors")


def test_names_and_options() -> None:
    one = lens()
    assert fl.measures.local_volume(top_k=3).key == "local_volume(top_k=3)"
    assert fl.measures.local_volume(top_k=None).key == "local_volume"
    assert fl.measure(one, ["local_volume(top_k=2)"]).measures() == ["local_volume(top_k=2)"]
    with pytest.raises(UnknownName, match="did you mean mls"):
        fl.measure(one, ["mlss"])
    with pytest.raises(UnknownName, match="did you mean top_k"):
        fl.measures.local_volume(topk=3)
    with pytest.raises(BadInput, match="takes no options"):
        fl.measures.nmls(top_k=3)
    with pytest.raises(BadInput, match="between 1 and the number of outputs, 3"):
        fl.measure(one, ["log_volume(top_k=4)"])
    with pytest.raises(BadInput, match="write a name"):
        fl.measure(one, ["local_volume(3)"])
    with pytest.raises(UnknownName, match="fc9"):
        fl.measure(one)["mls", "fc9"]


def test_the_catalogue_has_a_card_for_every_measure() -> None:
    for card in fl.catalogue():
        assert card.meaning.endswith((".", ":"))
        assert card.source
        assert card.unit
        assert card.name in fl.measures.MEASURES


def test_progress_is_told() -> None:
    seen = []
    fl.measure(lens(memory="8KB"), progress=lambda what, done, total: seen.append((what, done, total)))
    assert seen[-1] == ("one pass", 5, 5)
    assert len(seen) > 1


def test_degenerate_networks_give_numbers_or_reasons() -> None:
    """A dead layer, one output, one sample, more outputs than inputs: finite, or undefined with a reason."""
    dead = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        dead[0].bias.fill_(-100)
    wide = nn.Linear(2, 5).double()
    single = nn.Linear(3, 1).double()
    for net, inputs, loss in (
        (dead, 3, "cross_entropy"),
        (wide, 2, "cross_entropy"),
        (single, 3, "half_squared_error"),
    ):
        x = torch.randn(1, inputs, generator=torch.Generator().manual_seed(0)).double()
        y = torch.zeros(1, 1).double() if loss != "cross_entropy" else torch.zeros(1, dtype=torch.long)
        for (name, at), estimate in fl.measure(fl.Lens(fl.Problem(net, loss, (x, y)))).items():
            assert estimate.note or torch.isfinite(torch.tensor(estimate.value)), (name, at)
    report = fl.measure(fl.Lens(fl.Problem(dead, "cross_entropy", (x, torch.zeros(1, dtype=torch.long)))))
    assert report["mls"].value == 0
    assert report["local_volume"].value == 0
    assert report["log_volume"].kind == "undefined"
    assert "G = 0" in report["local_dimension"].note


def test_a_confident_network_keeps_its_digits() -> None:
    """Loss 1e-6 and below: ggn_trace against 60-digit-free float64 by the identity C = (p_a p_b) pairs."""
    net, x, y = network("mlp-tanh")
    with torch.no_grad():
        net[4].weight.mul_(0.1)
        net[4].bias.copy_(torch.tensor([40.0, 0.0, 0.0]))
    y = torch.zeros_like(y)
    report = fl.measure(fl.Lens(fl.Problem(net, "cross_entropy", (x, y))), ["ggn_trace", "relative_flatness"])
    assert 0 < report["ggn_trace"].value < 1e-12
    f = net(x).detach()
    p = f.softmax(1)
    h = net[:4](x).detach()
    pairs = sum(p[:, a] * p[:, b] for a in range(3) for b in range(3) if a != b)
    kappa = sum(
        p[:, a] * p[:, b] * 0.5 * (net[4].weight[a] - net[4].weight[b]).detach().square().sum()
        for a in range(3)
        for b in range(3)
    )
    assert report["ggn_trace", "4"].value == pytest.approx(float(((h.square().sum(1) + 1) * pairs).mean()), rel=1e-10)
    assert report["relative_flatness"].value == pytest.approx(float((h.square().sum(1) * kappa).mean()), rel=1e-10)


def test_curvature_products_are_counted() -> None:
    """min(d, m) of them for a dense layer below a tanh, none where the pass is exact."""
    report = fl.measure(lens("mlp-tanh"), "relative_flatness")
    assert [report["relative_flatness", at].products for at in ("0", "2", "4")] == [6, 5, 0]
    assert report["relative_flatness.sum"].products == 11
    assert report["relative_flatness"].products == 0
    assert fl.measure(lens("mlp-relu"), "relative_flatness")["relative_flatness.sum"].products == 0


def test_every_source_is_a_known_paper() -> None:
    for card in fl.catalogue():
        assert paper(card.source)
