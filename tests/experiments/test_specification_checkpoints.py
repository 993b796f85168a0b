"""Networks trained elsewhere: read from a table or a folder, measured, and related like those of any study."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy
from user_study import NET, checkpoints

from flatlens.errors import BadFolder, BadInput, BadWeights
from flatlens.experiments import load_study, run_study
from flatlens.experiments.network import compute
from flatlens.experiments.specification import study_of


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with net.py, checkpoints in ck/, and their table runs.csv."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "net.py").write_text(NET)
    rows = checkpoints(folder / "ck")
    table = pd.DataFrame(rows, columns=["checkpoint", "lr", "width", "seed", "loss"]).assign(gap=range(8), note="plain")
    table["checkpoint"] = [str(file.relative_to(folder)) for file in table["checkpoint"]]
    table.to_csv(folder / "runs.csv", index=False)
    return folder


def study(place, where="runs.csv", **more):
    options = {"measures": ["mls", "relative_flatness", "loss", "generalisation_gap"], **more}
    return study_of(f"{place}/net.py:samples", model=f"{place}/net.py:build", checkpoints=f"{place}/{where}", **options)


def run(study, out):
    with ThreadPoolExecutor(1) as executor:
        return run_study(study, out, executor=executor)


@pytest.fixture(scope="module")
def finished(place, tmp_path_factory):
    out = tmp_path_factory.mktemp("study") / "out"
    return out, run(study(place), out)


def test_columns_are_settings_results_and_arguments(finished, place):
    _, result = finished
    networks = result.networks
    assert list(networks.columns[:7]) == ["key", "lr", "batch_size", "seed", "weights", "width", "outcome"]
    assert set(networks["outcome"]) == {"trained elsewhere"}
    assert networks["generalisation_gap"].tolist() == list(range(8))  # the table's, not ours
    assert networks["width"].tolist() == [4, 4, 6, 6] * 2
    assert result.varied == ["lr", "width", "seed"]
    assert set(result.relations["units"]) == {2}  # two seeds
    assert [q.name for q in result.quantities if q.role == "setting"] == ["learning rate (log)", "width"]
    assert "8 of 8 networks (trained outside flatlens) are measured." in result.findings[0]
    assert "from the table of checkpoints, is 0 to 7" in result.findings[0]


def test_the_numbers_are_those_of_the_weights_in_the_files(finished, place):
    one = study(place).networks()[3]
    record = compute(one)
    net = one.model.build().double()
    net.load_state_dict({k: v.double() for k, v in torch.load(one.training.weights, weights_only=True).items()})
    split = one.data.load()
    assert len(split.x) == 80  # nothing is held out of what others trained on
    loss = float(cross_entropy(net(split.x.double()), split.y).detach())
    assert abs(record.report["loss"].value - loss) < 1e-12
    J = torch.func.vmap(torch.func.jacrev(net))(split.x.double()[:, None])[:, 0].flatten(2)
    mls = float(torch.linalg.matrix_norm(J, 2).detach().mean())
    assert abs(record.report["mls"].value - mls) < 1e-9 * mls


def test_a_folder_of_files_says_its_settings_in_names_or_beside(place, tmp_path):
    named = study(place, "ck")
    assert [(n.training.known["lr"], n.model.options["width"], n.training.seed) for n in named.networks()][:3] == [
        *[(0.1, 4, 0), (0.1, 4, 1), (0.1, 6, 0)]
    ]
    assert named.base.data.test == 0
    assert "generalisation_gap" not in named.base.measures
    for number, file in enumerate(sorted((place / "ck").glob("*width=6*"))):
        (tmp_path / f"run{number}").mkdir()
        shutil.copy(file, tmp_path / f"run{number}" / "last.ckpt")
        (tmp_path / f"run{number}" / "config.json").write_text(json.dumps({"optimiser": {"lr": 0.5}, "seed": number}))
    beside = study_of(f"{place}/net.py:samples", model=f"{place}/net.py:build", checkpoints=str(tmp_path)).networks()
    assert [(n.training.seed, dict(n.training.known)) for n in beside] == [(k, {"lr": 0.5}) for k in range(4)]


def test_without_a_gap_the_findings_say_so(place, tmp_path):
    result = run(study(place, "ck"), tmp_path / "out")
    assert any("no column gap" in sentence for sentence in result.findings)


def test_held_out_data_gives_the_gap(place):
    measures = ["loss", "test_loss", "generalisation_gap"]
    found = study(place, "ck", test=f"{place}/net.py:held_out", measures=measures)
    report = compute(found.networks()[0]).report
    gap = report["test_loss"].value - report["loss"].value
    assert abs(report["generalisation_gap"].value - gap) < 1e-12


def test_it_carries_on_and_is_read_without_the_files(place, finished, tmp_path):
    out, result = finished
    part = tmp_path / "part"
    shutil.copytree(out, part)
    for key in list(result.networks["key"])[2:5]:
        shutil.rmtree(part / "networks" / key)
    again = run(study(place), part)
    assert (part / "table.csv").read_bytes() == (out / "table.csv").read_bytes()
    assert (part / "relations.csv").read_bytes() == (out / "relations.csv").read_bytes()
    assert again.findings == result.findings
    moved = tmp_path / "moved"
    shutil.copytree(place, moved)
    assert len(run(study(moved), part).networks) == 8  # where files lie is no setting
    shutil.rmtree(moved)
    assert load_study(part).networks.equals(result.networks)


def test_a_checkpoint_that_changed_is_refused(place, tmp_path):
    shutil.copytree(place, tmp_path / "place")
    found = study(tmp_path / "place")
    one = found.networks()[0]
    torch.save(one.model.build().state_dict(), one.training.weights)
    with pytest.raises(BadWeights, match="was changed since the study began"):
        compute(one)
    (tmp_path / "out").mkdir()
    run(found, tmp_path / "out")
    with pytest.raises(BadFolder, match=r"holds 1 network that this study does not have \(.*\.pt\)"):
        run(study(tmp_path / "place"), tmp_path / "out")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("lr\n0.1\n", "its file in a column weights or checkpoint or path or file; it has lr"),
        ("weights,lr\nnone.pt,0.1\n", "row 1 of .* names 'none.pt', and there is no such file"),
        ("weights,lr\n,0.1\n", "row 1 of .* names nan"),
        ("weights,lr\nX,0.1\nX,0.1\n", "are the same weights with the same columns"),
        ("weights,key\nX,0.1\n", "the column 'key'"),
        ("weights,seed\nX,a\n", "the seed 'a' of .* is not a whole number"),
        ("weights,width\nX,5\n", "has other shapes than the network"),
        ("", "nor a table of comma-separated values"),
    ],
)
def test_a_slip_in_the_table_is_one_line(place, tmp_path, table, said):
    file = next((place / "ck").glob("*width=6*"))
    (tmp_path / "runs.csv").write_text(table.replace("X", str(file)))
    with pytest.raises(BadInput, match=said) as caught:
        study_of(f"{place}/net.py:samples", model=f"{place}/net.py:build", checkpoints=str(tmp_path / "runs.csv"))
    assert "\n" not in str(caught.value)


def test_other_slips(place, tmp_path):
    samples, build = f"{place}/net.py:samples", f"{place}/net.py:build"
    for options, said in [
        ({"checkpoints": str(tmp_path)}, "holds no file that ends in"),
        ({"checkpoints": str(tmp_path / "no.csv")}, "is neither a folder nor an existing table"),
        ({"checkpoints": f"{place}/ck", "settings": ["lr=0.1,0.2"]}, "are trained already"),
        ({"checkpoints": f"{place}/ck", "settings": ["lr=0.1"]}, "unknown setting 'lr'"),
    ]:
        with pytest.raises(BadInput, match=said):
            study_of(samples, model=build, **options)
    with pytest.raises(BadInput, match="--model says what network"):
        study_of(samples, checkpoints=f"{place}/ck")
