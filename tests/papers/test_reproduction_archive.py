"""An archive gives back every table, claim and figure of a reproduction; equal ones have equal bytes."""

import gzip
import io
import json
import math
import random
import stat
import warnings
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd
import pytest

from flatlens import cli
from flatlens.errors import BadFolder
from flatlens.experiments import result as archive_module
from flatlens.experiments.result import StudyResult
from flatlens.papers.reproduction import load_archive, read_studies, save_archive

pytestmark = pytest.mark.xdist_group("X3")


@pytest.fixture(scope="module")
def found(smoke_of):
    """A reproduction; its own studies stand for those of a re-run."""
    one = smoke_of("X3")[1]
    return replace(one, second=one.results, again=one.outcomes)


def test_everything_comes_back(found, tmp_path):
    back = load_archive(save_archive(found, tmp_path / "X3.zip"))
    assert (back.experiment, back.scale) == (found.experiment, found.scale)
    assert back.claims() == found.claims()
    for one, other in ((found.results, back.results), (found.second, back.second)):
        assert list(one) == list(other)
        for name, result in one.items():
            for field in fields(StudyResult):
                if field.name in ("answer", "differences"):  # a study's own page shows them, no archive
                    continue
                here, there = getattr(result, field.name), getattr(other[name], field.name)
                if isinstance(here, pd.DataFrame):
                    pd.testing.assert_frame_equal(here, there, check_exact=True)
                else:
                    assert here == there, field.name
    for first, second in zip(found.plots, back.plots, strict=True):
        pd.testing.assert_frame_equal(first.data, second.data, check_exact=True)


def test_equal_reproductions_make_equal_bytes(found, tmp_path):
    one, other = (save_archive(found, tmp_path / name).read_bytes() for name in ("a.zip", "b.zip"))
    assert one == other


@pytest.mark.parametrize("content", [b"", b"PK", b"{}"])
def test_another_file_is_one_line(content, tmp_path):
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(BadFolder, match="does not hold the archive of a reproduction"):
        load_archive(tmp_path / "a.zip")


STORED = Path(__file__).parents[2] / "docs" / "tables" / "X3-desk.zip"


def members(content=None):
    with zipfile.ZipFile(STORED if content is None else io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(parts):
    """An archive of (name or ZipInfo, content) pairs, names as they are, also twice."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, part in parts.items() if isinstance(parts, dict) else parts:
            archive.writestr(name, part)
    return content.getvalue()


def changed(name, change):
    """The archive with another content of one member."""
    parts = members()
    return zipped({**parts, name: change(parts[name])})


def some(drawn, ending):
    return drawn.choice([name for name in members() if name.endswith(ending)])


def of_table(*tables):
    """A change of one of these tables, drawn; it gets the table and returns another one."""

    def decorate(change):
        def form(drawn):
            name = some(drawn, f"/{drawn.choice(tables)}.parquet")
            return changed(name, lambda part: change(drawn, pd.read_parquet(io.BytesIO(part))).to_parquet(index=False))

        return form

    return decorate


def of_result(change):
    """A change of the JSON object of a study."""

    def form(drawn):
        def other(part):
            plain = json.loads(part)
            return json.dumps(change(drawn, plain) or plain).encode()

        return changed(some(drawn, "result.json"), other)

    return form


ALL = ("networks", "layers", "curves", "values", "relations", "within", "gap_correlations")
OF_NETWORKS = ("networks", "layers", "curves", "values")


@of_table(*ALL)
def missing_column(drawn, table):
    needed = [name for name in table if "(" not in name and "[" not in name and "." not in name]
    return table.drop(columns=drawn.choice(needed[:6]))


@of_table(*ALL)
def extra_column(drawn, table):
    values = ["a", True] if "outcome" in table else ["a", True, 1.0, None]  # numbers of networks have any names
    return table.assign(**{drawn.choice(["evil", "Unnamed: 0", "x.y", "=1+1"]): drawn.choice(values)})


@of_table(*ALL)
def text_instead_of_numbers(drawn, table):
    column = drawn.choice([name for name in table if name in ("lr", "seed", "value", "n", "steps", "loss", "pearson")])
    return table.assign(
        **{column: table[column].map(drawn.choice(["{:g} ".format, lambda _: "NaN", lambda _: "", str]))}
    )


@of_table(*ALL)
def wrong_types(drawn, table):
    column = drawn.choice([name for name in table if name in ("key", "lr", "x", "measure", "seed", "n", "included")])
    return table.assign(**{column: pd.Series([drawn.choice([True, b"a", [1.0]])] * len(table), dtype=object)})


@of_table(*ALL)
def doubled_row(drawn, table):
    row = table.iloc[[drawn.randrange(len(table))]]
    return pd.concat([table, row]).sample(frac=1, random_state=drawn.randrange(9))


@of_table("networks")
def doubled_network(drawn, table):
    return pd.concat([table, table.iloc[[drawn.randrange(len(table))]].assign(key="0123456789ab")])


@of_table(*OF_NETWORKS)
def foreign_network(drawn, table):
    return pd.concat([table, table.iloc[[drawn.randrange(len(table))]].assign(key="0123456789ab", lr=0.3)])


@of_table(*OF_NETWORKS)
def no_key(drawn, table):
    at = drawn.randrange(len(table))
    return table.assign(key=[None if row == at else key for row, key in enumerate(table["key"])])


@of_result
def wrong_type_in_json(drawn, plain):
    name = drawn.choice([name for name in plain if name not in ("seconds", "answers")])  # of older archives
    wrong = {"unfinished": ["3", -0.5, None, [1]], "settings": [3, "x", [], {}, {"type": "SGD", "lr": 1}]}
    plain[name] = drawn.choice(wrong.get(name, ["x", 3, {"a": 1}, [1], [[1, 2, 3]], [None], None]))
    if plain[name] == {"a": 1} and name == "versions":
        plain[name] = {"torch": 3}


@of_result
def missing_in_json(drawn, plain):
    del plain[drawn.choice(["findings", "settings", "versions", "excluded", "failed", "unfinished"])]


@of_result
def extra_in_json(drawn, plain):
    plain[drawn.choice(["evil", "networks", "quantities", "__class__"])] = drawn.choice([1, "a", [], {}])


@of_result
def not_finite_in_json(drawn, plain):
    plain["seconds"] = drawn.choice([math.nan, math.inf])


@of_result
def not_an_object(drawn, plain):
    return drawn.choice([[1], "x", 7, [plain]])


def other_name(drawn):
    """A member under a name that leads elsewhere, or that no archive has."""
    names = [
        "../x",
        "/etc/x",
        "a/../b",
        "./x",
        "a//b",
        "C:\\x",
        "a\\b",
        "",
        "folder/",
        "..",
        "x/result.json",
        "notes.txt",
    ]
    return zipped([*members().items(), (drawn.choice(names), b"")])


def moved_into_a_folder(drawn):
    return zipped({f"{drawn.choice(['X3', 'a/b', '.', '/'])}/{name}": part for name, part in members().items()})


def link(drawn):
    info = zipfile.ZipInfo(name := drawn.choice(list(members())))
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return zipped([(info if one == name else one, b"/etc/passwd" if one == name else part)
                   for one, part in members().items()])  # fmt: skip


def encrypted(drawn):
    content = bytearray(STORED.read_bytes())
    at = content.index(b"PK\1\2")
    content[at + 8] |= 1
    content[6] |= 1
    return bytes(content)


def flipped(drawn):
    content = bytearray(STORED.read_bytes())
    with zipfile.ZipFile(STORED) as archive:
        info = drawn.choice(archive.infolist())
    at = info.header_offset + 30 + len(info.filename) + info.compress_size // 2
    content[at] ^= 1 << drawn.randrange(8)
    return bytes(content)


def swapped_tables(drawn):
    one, other = drawn.sample(ALL, 2)
    study = some(drawn, "result.json").removesuffix("result.json")
    parts = members()
    return zipped({**parts, f"{study}{one}.parquet": parts[f"{study}{other}.parquet"]})


def other_mark(drawn):
    marks = [b"", b"{", b"[]", b"3", b"{}", b'{"experiment": "X3"}', b'{"experiment": 3, "scale": "desk"}', b"\xff\xfe",
             b'{"experiment": "X0", "scale": "desk"}', b'{"experiment": "X3", "scale": "huge"}', b"[" * 5000,
             b'{"experiment": "X3", "scale": ["desk"]}', b'{"experiment": "X3", "scale": "desk", "schema": 2}',
             b'{"experiment": "X3", "scale": "desk", "schema": null}']  # fmt: skip
    return changed("experiment.json", lambda _: drawn.choice(marks))


def without(parts, name):
    return {other: part for other, part in parts.items() if other != name}


FORMS = {
    "truncated": lambda drawn: STORED.read_bytes()[: drawn.randrange(1, STORED.stat().st_size - 30)],
    "empty": lambda drawn: drawn.choice([b"", zipped({})]),
    "no zip": lambda drawn: drawn.choice([b"key\n1\n", gzip.compress(b"x" * 99), b"\0" * 99, b"PK\3\4" + b"x" * 50]),
    "bad encoding": lambda drawn: changed(
        some(drawn, "result.json"), lambda part: part[:50] + drawn.choice([b"\xff", b"\xc3\x28"]) + part
    ),
    "deep": lambda drawn: changed(some(drawn, "result.json"), lambda _: drawn.choice([b"[", b'{"a":']) * 9000),
    "no table": lambda drawn: changed(
        some(drawn, ".parquet"), lambda part: drawn.choice([b"", part[:-9], b"a,b\n1,2\n", b"PAR1" * 9])
    ),
    "member missing": lambda drawn: zipped(without(members(), some(drawn, drawn.choice([".parquet", ".json"])))),
    "member twice": lambda drawn: zipped(
        [*members().items(), (some(drawn, drawn.choice([".parquet", ".json"])), b"")]
    ),
}  # fmt: skip
FORMS |= {
    name.replace("_", " "): globals()[name]
    for name in (
        "missing_column", "extra_column", "text_instead_of_numbers", "wrong_types", "doubled_row", "doubled_network",
        "foreign_network", "no_key", "wrong_type_in_json", "missing_in_json", "extra_in_json", "not_finite_in_json",
        "not_an_object", "other_name", "moved_into_a_folder", "link", "encrypted", "flipped", "swapped_tables",
        "other_mark",
    )
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_malformed_form_is_one_line(form, tmp_path):
    for seed in range(6):
        file = tmp_path / f"{seed}.zip"
        file.write_bytes(FORMS[form](random.Random(seed)))
        with pytest.raises(BadFolder, match="does not hold the archive of a reproduction") as caught:
            read_studies(file)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400 + len(str(file))


def test_what_would_fill_the_memory_is_not_unpacked(tmp_path, monkeypatch):
    file = tmp_path / "a.zip"
    huge = pd.DataFrame({"key": ["a"] * 200_000})
    for limit, value, form, words in (
        ("LARGEST", 10_000, zipped(members()), "unpacks to"),
        ("MOST", 10, zipped(members()), "files, more than 10"),
        (
            "MOST_CELLS",
            100_000,
            changed(some(random.Random(0), "curves.parquet"), lambda _: huge.to_parquet()),
            "200,000",
        ),
    ):
        file.write_bytes(form)
        with monkeypatch.context() as patched:
            patched.setattr(archive_module, limit, value)
            with pytest.raises(BadFolder, match=words):
                read_studies(file)


def test_a_malformed_archive_stops_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("flatlens.progress.DELAY", 1e6)
    (tmp_path / "a.zip").write_bytes(missing_column(random.Random(1)))
    command = [
        "reproduce",
        "X3",
        "--scale",
        "desk",
        "--out",
        str(tmp_path / "out"),
        "--tables",
        str(tmp_path / "a.zip"),
    ]
    assert cli.run(command) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "has no column" in err
    assert not (tmp_path / "out").exists()


def test_an_archive_without_any_study_of_its_experiment_is_refused(tmp_path):
    parts = members()
    study = some(random.Random(0), "result.json").removesuffix("result.json").removeprefix("again/")
    (tmp_path / "a.zip").write_bytes(
        zipped({n: p for n, p in parts.items() if not n.removeprefix("again/").startswith(study)})
    )
    with pytest.raises(BadFolder, match="none of the studies of X3 is in it"):
        load_archive(tmp_path / "a.zip")


@pytest.mark.parametrize("file", sorted(STORED.parent.glob("*.zip"))[::5], ids=lambda file: file.stem)
def test_stored_tables_are_read(file):
    experiment, scale, studies = read_studies(file)
    assert file.stem == f"{experiment.id}-{scale}"
    assert set(experiment.studies(scale)) & set(studies)


def test_what_reads_a_study_that_an_archive_lacks_is_open(tmp_path):
    """Its protocol is declared before its networks are trained; the other rows keep their outcomes."""
    whole = STORED.parent / "X4-laptop.zip"
    with zipfile.ZipFile(whole) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    (tmp_path / "a.zip").write_bytes(zipped({n: p for n, p in parts.items() if "lenet/" not in n}))
    all_of_them, without = load_archive(whole), load_archive(tmp_path / "a.zip")
    lacking = [outcome for outcome in without.outcomes if "'lenet' has not been run" in outcome.statistic.note]
    assert {outcome.conclusion for outcome in lacking} == {"open"}
    assert {outcome.prediction.name for outcome in lacking} >= {
        "lenet.MLS.sqrt_sharpness",
        "LeNets_on_ten_classes.D_against_mls_in_some",
    }
    kept = {outcome.prediction.name: outcome.as_json() for outcome in without.outcomes if outcome not in lacking}
    assert "mlp.MLS.sqrt_sharpness" in kept
    assert all(
        outcome.as_json() == kept.get(outcome.prediction.name, outcome.as_json()) for outcome in all_of_them.outcomes
    )
