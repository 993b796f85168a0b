"""Options of one meaning have one name in all signatures; former names are accepted, and read from saved files."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
import torch

import flatlens as fl
from flatlens.cli import run
from flatlens.cli.inputs import How, Inputs
from flatlens.cli.landscape import Between
from flatlens.cli.networks import Compared
from flatlens.cli.studies import Running
from flatlens.column import Column
from flatlens.comparing import Comparison
from flatlens.curvature import Hessian, eigenpairs, lanczos, spectral_density
from flatlens.deprecated_names import FORMER_OPTIONS, FORMER_TRANSFORMS, FormerName, present_measure
from flatlens.errors import BadInput, UnknownName
from flatlens.estimate import Estimate
from flatlens.experiments import Study, load_study, run_study
from flatlens.experiments.quantities import Quantity
from flatlens.experiments.settings import Followed, NetworkSettings
from flatlens.experiments.store import Store
from flatlens.files import write_checksums
from flatlens.measures import MEASURES, Measure
from flatlens.settings_json import as_plain, digest
from flatlens.tracking.history import load_history
from flatlens.transforms import TRANSFORMS, InvarianceReport

PACKAGE = Path(fl.__file__).parent
GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"

RETIRED = {
    "tol": "rtol", "tolerance": "rtol", "top": "top_k", "topk": "top_k", "bottom": "bottom_k",
    "normalize": "normalized", "normalise": "normalized", "normalised": "normalized", "pairs": "probes",
    "draws": "probes", "subset": "samples", "radius": "delta",
}  # fmt: skip
"""Names that no public signature has any more, and the present ones."""
SPARED = {
    "bounds/feature_robustness.py:spectral_term(top)": "the largest eigenvalue itself",
    "curvature/operators.py:Fisher.__init__(draws)": "targets drawn for each sample, which define the operator",
    "problem/loss.py:Loss.draw_slopes(draws)": "as of Fisher",
    "problem/losses.py:SquaredError.draw_slopes(draws)": "as of Fisher",
    "problem/losses.py:CrossEntropy.draw_slopes(draws)": "as of Fisher",
    "problem/row_layout.py:OfRows.draw_slopes(draws)": "as of Fisher",
    "measures/leading_eigenvalues.py:as_estimate(pairs)": "eigenpairs themselves",
    "measures/leading_eigenvalues.py:Searches.__init__(pairs)": "eigenpairs themselves",
    "statistics/groupwise.py:Relations.__init__(pairs)": "pairs of columns",
    "statistics/group_differences.py:group_differences(pairs)": "pairs of networks",
    "curvature/optimiser_geometry.py:dual_norm(radius)": "of a ball for each matrix, in spectral norm",
    "curvature/optimiser_geometry.py:corner(radius)": "of a ball for each matrix, in spectral norm",
    "curvature/optimiser_geometry.py:climb_in_ball(radius)": "of a ball for each matrix, in spectral norm",
    "perturbation/localised_posterior.py:run_chains(draws)": "transitions of a chain",
    "measures/learning_coefficient.py:local_learning_coefficient(draws)": "transitions of a chain",
    "perturbation/searches.py:climb(radius)": "of a ball in any space",
    "perturbation/searches.py:onto_ball(radius)": "of a ball in any space",
    "perturbation/variation.py:Box(radius)": "of a box about a point, for each entry",
}
"""Signatures that have such a name with another meaning, and which."""
IN_PAPERS = {"pairs": "pairs of columns", "top": "whether the largest eigenvalues alone are meant"}
"""The same for the arguments of the papers' recipes, which are no options."""


def public_signatures() -> Iterator[tuple[str, list[str]]]:
    """Yield (file:function or class, names of its arguments or fields) of everything public in the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        yield from _signatures(ast.parse(file.read_text()).body, f"{file.relative_to(PACKAGE)}:")


def _signatures(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, list[str]]]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and (node.name in ("__init__", "__call__") or node.name[0] != "_"):
            yield (
                prefix + node.name,
                [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)],
            )
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            fields = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)
                      and isinstance(each.target, ast.Name)]  # fmt: skip
            yield prefix + node.name, fields
            yield from _signatures(node.body, f"{prefix}{node.name}.")


def test_no_public_signature_has_a_retired_name() -> None:
    found = [
        f"{where}({name})" for where, names in public_signatures() for name in names
        if name in RETIRED and not (where.startswith("papers/") and name in IN_PAPERS)
    ]  # fmt: skip
    assert set(found) - SPARED.keys() == set(), "use the present name, or say why the meaning differs"
    assert SPARED.keys() - set(found) == set(), "no longer needed: take it off the list"
    assert sum(len(names) for _, names in public_signatures()) > 2000  # the walk sees them


def is_settings(one: object) -> bool:
    return isinstance(one, type) and "__dataclass_fields__" in vars(one)  # not a class that inherits from one


def options() -> dict[str, list[str]]:
    """Return the options of measures, of flatlens, flatlens.curvature and the command line, with their owners."""
    found: dict[str, list[str]] = defaultdict(list)

    def add(function: Callable[..., object], owner: str) -> None:
        for one in inspect.signature(function).parameters.values():
            if one.kind is one.KEYWORD_ONLY or one.default is not one.empty:
                found[one.name].append(owner)

    for name, measure in MEASURES.items():
        for option in measure.defaults():
            found[option].append(name)
    for package in ("flatlens", "flatlens.curvature"):
        for name in import_module(package).__all__:
            one = getattr(import_module(package), name)
            error = isinstance(one, type) and issubclass(one, Exception)
            if callable(one) and not isinstance(one, Measure) and not is_settings(one) and not error:
                add(one, name)
    for module in ("studies", "networks", "listing", "landscape"):
        commands = import_module(f"flatlens.cli.{module}")
        for name in ("study", "report", "measure", "bounds", "invariance", "compress", "compare", "reproduce",
                     "list_names", "path_between", "plane_around"):  # fmt: skip
            if inspect.isfunction(command := getattr(commands, name, None)) and command.__module__ == commands.__name__:
                add(command, f"flatlens {name}")
    for group in (Inputs, How, Compared, Between, Running):
        add(group, group.__name__)
    for container in ("about", "inputs", "how", "compared", "pair", "running"):  # not options: they hold them
        found.pop(container, None)
    return found


def rows() -> list[tuple[list[str], list[str]]]:
    """Return (options, their former names) of each line of the glossary's list."""
    section = GLOSSARY.read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    lines = [line.partition(":") for line in section.splitlines() if line.startswith("- `")]
    return [
        (re.findall(r"`(\w+)`", names), re.findall(r"`(\w+)`", said.partition("(formerly")[2]))
        for names, _, said in lines
    ]


def test_the_glossary_has_each_option_once() -> None:
    listed = Counter(name for names, _ in rows() for name in names)
    assert {name: times for name, times in listed.items() if times > 1} == {}
    assert {name: owners for name, owners in options().items() if name not in listed} == {}
    assert set(listed) - set(options()) - {"root"} == set()


def test_the_glossary_has_the_former_names() -> None:
    present = {former: set(names) for names, formers in rows() for former in formers if former not in names}
    for renaming in FORMER_OPTIONS.values():
        for former, name in renaming.items():
            assert name in present.get(former, set()) | {n for names, fs in rows() if former in fs for n in names}
    known = {name: owners for name, owners in options().items() if name in present and name not in ("draws",)}
    assert known == {}


FOREIGN = {"optimizer", "optimizer_step", "optimizers"}  #: names that torch, Lightning or transformers give


def _british(word: str) -> str:
    word = re.sub(r"(\w{3,})iz(e|ed|es|er|ers|ing|ation|ations)$", r"\1is\2", word)
    return word.replace("color", "colour").replace("center", "centre").replace("behavior", "behaviour")


def test_identifiers_spell_a_word_one_way() -> None:
    spellings: dict[str, set[str]] = defaultdict(set)
    for where, names in public_signatures():
        for name in {*names, *where.rpartition(":")[2].split(".")} - FOREIGN:
            for word in name.lower().split("_"):
                stem = re.sub(r"(e|ed|es|er|ers|ing|ation|ations)$", "", _british(word))
                if word != "itemsize" and re.search(
                    r"i[sz](e|ed|es|er|ers|ing|ation|ations)$|olou?r|cent(er|re)|aviou?r", word
                ):
                    spellings[stem].add("z" if _british(word) != word else "s")
    assert {stem: found for stem, found in spellings.items() if len(found) > 1} == {}
    assert spellings["normalis"] == {"z"}  # the measures' names, which are columns of stored tables
    assert {stem for stem, found in spellings.items() if "z" in found} == {"normalis"}


def other_than(value: object) -> object:
    """Return a value that is not the default."""
    return "std" if value is None else value * 2 if isinstance(value, float) else int(str(value)) + 1


FORMER = [(name, former, present) for name, names in FORMER_OPTIONS.items() for former, present in names.items()]


@pytest.mark.parametrize(("name", "former", "present"), FORMER)
def test_a_measure_takes_a_former_option_and_says_the_present_one(name: str, former: str, present: str) -> None:
    measure = MEASURES[name]
    assert former not in measure.defaults()
    value = other_than(measure.defaults()[present])
    new = measure(**{present: value})
    with pytest.warns(FormerName) as said:
        old = measure(**{former: value})
    assert [str(one.message) for one in said] == [f"measure {name}: option {former} is now called {present}"]
    assert said[0].filename == __file__  # the user's line
    assert old.key == new.key
    spelt = f"{name}({former}={value!r})"
    with pytest.warns(FormerName, match=present):
        assert fl.measures.named(spelt)[0].key == new.key
    assert present_measure(spelt) == new.key
    assert str(Column.parse(f"{spelt}.part[fc1]")) == f"{new.key}.part[fc1]"
    with pytest.raises(BadInput, match="give only one") as refused:
        measure(**{former: value, present: value})
    assert "\n" not in str(refused.value)


def test_options_that_never_were_are_unknown() -> None:
    with pytest.raises(UnknownName, match="did you mean"):
        MEASURES["sharpness"](toll=0.1)
    with pytest.raises(UnknownName):
        MEASURES["local_volume"](top=3)  # a name of other measures


def problem() -> fl.Problem:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).double()
        x = torch.randn(12, 3).double()
    return fl.Problem(net, "cross_entropy", (x, torch.arange(12) % 2))


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


CALLS: dict[str, tuple[dict[str, object], dict[str, object], Callable[..., torch.Tensor]]] = {
    "eigenpairs": (
        {"top": 2, "bottom": 1, "tolerance": 1e-6}, {"top_k": 2, "bottom_k": 1, "rtol": 1e-6},
        lambda **options: eigenpairs(Hessian(problem()), **options).values,
    ),
    "lanczos": (
        {"top": 2, "bottom": 1, "tolerance": 1e-6}, {"top_k": 2, "bottom_k": 1, "rtol": 1e-6},
        lambda **options: lanczos(lambda v: v * torch.arange(9.0).double(), torch.ones(9).double(), **options).values,
    ),
    "spectral_density": (
        {"width": 0.2}, {"bandwidth": 0.2}, lambda **options: spectral_density(Hessian(problem()), **options).density
    ),
    "Tracker": (
        {"subset": 5}, {"samples": 5},
        lambda **options: torch.tensor(fl.Tracker(problem(), "loss", live=False, **options).problem.n),
    ),
    "Problem.subset": (
        {"k": 5}, {"samples": 5}, lambda **options: torch.tensor(problem().subset(generator=_seeded(), **options).n)
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_a_function_takes_former_options_and_says_the_present_ones(what: str) -> None:
    former, present, call = CALLS[what]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FormerName)
        new = call(**present)
    with pytest.warns(FormerName) as said:
        old = call(**former)
    lines = [f"{what}: option {a} is now called {b}" for a, b in zip(former, present, strict=True)]
    assert [str(one.message) for one in said] == lines
    assert torch.equal(old, new)
    with pytest.raises(BadInput, match="give only one"):
        call(**former, **present)


def test_the_command_line_says_the_present_name_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "import torch\n"
        "def build(): return torch.nn.Linear(3, 2)\n"
        "def samples(): return torch.ones(4, 3), torch.tensor([0, 1, 0, 1])\n"
    )
    command = ["measure", "net.py:build", "--data", "net.py:samples", "--loss", "cross_entropy", "--json"]
    assert run([*command, "--measures", "relative_flatness(normalize='std')"]) == 0
    printed = capsys.readouterr()
    said = "flatlens: measure relative_flatness: option normalize is now called normalized"
    assert printed.err.splitlines().count(said) == 1
    assert "relative_flatness(normalized='std')" in printed.out
    assert run([*command, "--measures", "relative_flatness(normalize='std', normalized='std')"]) == 2
    assert "give only one" in capsys.readouterr().err


def test_former_transforms() -> None:
    for former, present in FORMER_TRANSFORMS.items():
        with pytest.warns(FormerName, match=present):
            assert TRANSFORMS[former] is TRANSFORMS[present]
        with pytest.warns(FormerName, match=present):
            fl.check_invariance(fl.Lens(problem()), "mls", former)
        assert str(Column.parse(f"mls.sum@{former}[fc1]")) == f"mls.sum@{present}[fc1]"
    with pytest.warns(FormerName):
        assert fl.transforms.feature_normalisation is TRANSFORMS["feature_normalization"]


OLD, NEW = "sharpness(top=2, tol=0.01)", "sharpness(top_k=2, rtol=0.01)"


def test_quoted_values_and_measures_of_the_users_own_stay() -> None:
    assert present_measure("sharpness(note='top=2', top=2)") == "sharpness(note='top=2', top_k=2)"
    assert str(Column.parse("mine(top=2, tol=3)[fc1]")) == "mine(top=2, tol=3)[fc1]"


def test_saved_reports_are_read(tmp_path: Path) -> None:
    former = fl.Report({(OLD, None): Estimate(1.0), (OLD, "fc1"): Estimate(2.0), ("mls", None): Estimate(3.0)}, {})
    former.save(tmp_path / "report")
    with warnings.catch_warnings():
        warnings.simplefilter("error", FormerName)
        report = fl.Report.load(tmp_path / "report")
        assert list(report) == [(NEW, None), (NEW, "fc1"), ("mls", None)]
        assert report[NEW, "fc1"].value == 2.0
        assert (OLD, "fc1") in report
        assert (OLD, "fc2") not in report
    with pytest.warns(FormerName, match=re.escape(NEW)):
        assert report[OLD].value == 1.0


def test_saved_tables_are_read(tmp_path: Path) -> None:
    lens = fl.Lens(problem())
    table = fl.check_invariance(lens, "relative_flatness(normalized='std')", "feature_normalization")
    for cell in table:
        object.__setattr__(cell, "measure", cell.measure.replace("normalized=", "normalize="))
        object.__setattr__(cell, "transform", "feature_normalisation")
    table.moved = {"feature_normalisation": table.moved["feature_normalization"]}
    table.save(tmp_path / "table")
    read = InvarianceReport.load(tmp_path / "table")
    assert read["relative_flatness(normalized='std')", "feature_normalization"].before == table[0].before
    assert list(read.moved) == ["feature_normalization"]

    found = fl.compare({"a": lens, "b": fl.Lens(problem())}, ["sharpness(top_k=2)"])
    former = {name: fl.Report({("sharpness(top=2)", None): report["sharpness(top_k=2)"]}, report.about)
              for name, report in found.reports.items()}  # fmt: skip
    Comparison(former, {"sharpness(top=2)": found.measures["sharpness(top_k=2)"]}).save(tmp_path / "comparison")
    again = Comparison.load(tmp_path / "comparison")
    assert list(again.measures) == ["sharpness(top_k=2)"]
    pd.testing.assert_frame_equal(again.ranks(), found.ranks())


def test_saved_histories_and_states_of_trackers_are_read(tmp_path: Path) -> None:
    trackers = [fl.Tracker(problem(), "sharpness(rtol=0.01)", every=1, live=False) for _ in range(2)]
    trackers[0].step(0)
    trackers[0].save(tmp_path / "history.csv")
    state = trackers[0].state_dict()
    state["tracker"]["measures"] = ["sharpness(tol=0.01)"]
    state["history"]["rows"] = [["sharpness(tol=0.01)" if cell == "sharpness(rtol=0.01)" else cell for cell in row]
                                for row in state["history"]["rows"]]  # fmt: skip
    trackers[1].load_state_dict(state)
    pd.testing.assert_frame_equal(trackers[1].history, trackers[0].history)
    text = (tmp_path / "history.csv").read_text()
    assert "rtol" in text
    (tmp_path / "history.csv").write_text(text.replace("(rtol=", "(tol="))
    assert set(load_history(tmp_path / "history.csv")["measure"]) == {"sharpness(rtol=0.01)"}


def small() -> Study:
    study = Study.digits("smoke").setting("data.train", 40).setting("widths", (8,)).setting("max_steps", 6)
    measured = dataclasses.replace(
        study.base, measures=("mls", "relative_flatness(normalized='std')"), moved=("feature_normalization",),
        followed=Followed(("sharpness(rtol=0.01)",), every=3),
    )  # fmt: skip
    quantity = Quantity("flatness", "relative_flatness(normalized='std')")
    study = dataclasses.replace(study, base=measured, quantities=(*study.quantities[:1], quantity))
    return study.over("lr", 0.05).over("batch_size", 8).over("seed", 0, 1)


def _spelt_as_before(text: str) -> str:
    text = text.replace("(normalized=", "(normalize=").replace("(rtol=", "(tol=")
    return text.replace("feature_normalization", "feature_normalisation")


def test_the_key_of_a_network_is_that_of_its_first_spelling() -> None:
    settings = small().base
    former = json.loads(_spelt_as_before(json.dumps(as_plain(settings))))
    del former["dtype"]  # a setting that came later
    assert settings.key == digest(former)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FormerName)
        read = NetworkSettings.from_json(former)
    assert read == settings


def test_a_stored_study_is_read_and_continued(tmp_path: Path) -> None:
    study, out = small(), tmp_path / "out"
    with ThreadPoolExecutor(1) as executor:
        result = run_study(study, out, executor=executor)
    for file in [out / "study.json", *out.glob("networks/*/config.json"), *out.glob("networks/*/history.csv")]:
        text = file.read_text()
        assert _spelt_as_before(text) != text
        file.write_text(_spelt_as_before(text))
    for folder in (out / "networks").iterdir():
        report = fl.Report.load(folder / "report.safetensors")
        rows = {(_spelt_as_before(name), layer): e for (name, layer), e in report.items()}
        fl.Report(rows, report.about).save(folder / "report.safetensors")
        (folder / "checksums.json").unlink()
        write_checksums(folder)
    stored = {file: file.stat().st_mtime_ns for file in (out / "networks").rglob("*")}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FormerName)
        read = load_study(out)
        with ThreadPoolExecutor(1) as executor:
            again = run_study(study, out, executor=executor)
    for tables in (read, again):
        pd.testing.assert_frame_equal(tables.networks, result.networks)
        pd.testing.assert_frame_equal(tables.values, result.values)
        pd.testing.assert_frame_equal(tables.histories, result.histories)
    assert {file: file.stat().st_mtime_ns for file in (out / "networks").rglob("*")} == stored  # nothing is run again
    assert result.networks["relative_flatness(normalized='std')@feature_normalization"].notna().all()
    assert Store.open(out).study() == study
