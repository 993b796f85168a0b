"""Fetching from the hub, against a server on loopback that speaks as it does."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch

from flatlens.data import Preparation, cifar10, cifar100, fetch, mnist
from flatlens.errors import BadData, BadFolder, UnknownName

RAW = Preparation(standardise="none")


def on_disk(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def refused(*arguments, kind=BadData):
    with pytest.raises(kind) as caught:
        fetch(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("load", [mnist, cifar10, cifar100])
def test_what_was_fetched_is_on_disk_recorded_and_readable(small, hub_of, load):
    files = small(load.__name__)
    hub = hub_of(files)
    root = files.root / "sets"
    seen = []
    fetched = fetch(load.__name__, root, progress=lambda *a: seen.append(a))
    contents = files.parquets()
    assert sorted(fetched.downloaded) == sorted(contents)
    found = on_disk(root / load.__name__)
    record = json.loads(found.pop("fetched.json"))
    assert found == contents
    assert record["repository"] == files.known.repository
    assert record["revision"] == hub.REVISION
    assert {f["path"]: (f["bytes"], f["sha256"]) for f in record["files"]} == {
        name: (len(c), hashlib.sha256(c).hexdigest()) for name, c in contents.items()
    }
    assert {what for what, _, _ in seen} >= {f"{name.rpartition('/')[2]} (MB)" for name in contents}
    split = load(root, RAW)
    assert torch.equal((split.x * 255).round().to(torch.uint8), torch.from_numpy(files.x))
    assert split.y.tolist() == files.y.tolist()


def test_a_second_fetch_verifies_and_asks_nothing(small, hub_of):
    files = small("mnist")
    hub = hub_of(files)
    fetch("mnist", files.root)
    before, hub.asked = on_disk(files.root), []
    again = fetch("mnist", files.root)
    assert again.downloaded == ()
    assert hub.asked == []
    assert on_disk(files.root) == before
    path = files.root / "mnist/mnist/test-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert fetch("mnist", files.root).downloaded == ("mnist/test-00000-of-00001.parquet",)  # the damaged one alone
    assert on_disk(files.root) == before


def test_broken_off_it_carries_on(small, hub_of):
    files = small("cifar10")
    hub = hub_of(files)
    total = sum(map(len, hub.files.values()))
    hub.fail_after = total - 1  # the last file does not arrive
    line = refused("cifar10", files.root)
    assert line.startswith(f"cifar10: the hub ({hub.url}) gave no answer that can be used (")
    partial = on_disk(files.root)
    assert len(partial) == 2
    assert all(content == hub.files[name.partition("/")[2]] for name, content in partial.items())
    with pytest.raises(BadData):  # half a set is not read
        cifar10(files.root)
    hub.fail_after = None
    fetch("cifar10", files.root)
    assert hub.sent == total  # no file came twice
    assert {k.partition("/")[2]: v for k, v in on_disk(files.root).items() if not k.endswith(".json")} == hub.files


def test_what_is_not_as_declared_is_not_kept(small, hub_of):
    files = small("mnist")
    hub = hub_of(files)
    name = "mnist/train-00000-of-00002.parquet"
    sent = bytearray(hub.files[name])
    sent[50] ^= 1
    hub.files[name] = bytes(sent)
    line = refused("mnist", files.root)
    told = "the downloaded file differs from the hub's checksum or size (its SHA256 is not "
    assert f"{files.root / 'mnist' / name}: {told}" in line
    assert on_disk(files.root) == {}
    hub.files[name] = hub.declared[name][:-7]
    assert f"bytes instead of {len(hub.declared[name])}" in refused("mnist", files.root)
    assert on_disk(files.root) == {}


def test_what_a_killed_download_left_is_removed(small, hub_of):
    files = small("mnist")
    hub_of(files)
    left = files.root / "mnist" / ".incoming" / "mnist" / "train-00000-of-00002.parquet"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"older")
    fetch("mnist", files.root)
    assert not left.exists()
    mnist(files.root)


def test_a_repository_without_the_files(small, hub_of):
    files = small("mnist")
    hub = hub_of(files)
    hub.lfs = False
    assert "has no parquet files with checksums in mnist/ any more; where there is a network" in refused(
        "mnist", files.root
    )
    hub.declared = {}
    assert "has no parquet files with checksums" in refused("mnist", files.root)
    hub.repository = "somebody/else"
    line = refused("mnist", files.root)
    assert "gave no answer that can be used (" in line
    assert "404" in line
    assert on_disk(files.root) == {}


def test_a_path_that_leads_out_of_the_folder_is_refused(small, hub_of):
    files = small("mnist")
    hub = hub_of(files)
    hub.declared = {f"mnist/../../../{part}-00000-of-00001.parquet": b"x" for part in ("train", "test")}
    hub.files = hub.declared
    assert "no parquet files with checksums" in refused("mnist", files.root)
    assert on_disk(files.root) == {}


def test_files_of_an_older_fetch_are_not_read_along(small, hub_of):
    files = small("mnist")
    hub_of(files)
    fetch("mnist", files.root)
    folder = files.root / "mnist" / "mnist"
    (folder / "train-00000-of-00001.parquet").write_bytes(files.parquets()["mnist/test-00000-of-00001.parquet"])
    assert mnist(files.root, RAW).y.tolist() == files.y.tolist()


def test_a_record_without_a_part_is_refused(small, hub_of):
    files = small("mnist")
    hub_of(files)
    path = fetch("mnist", files.root).folder / "fetched.json"
    record = json.loads(path.read_text())
    record["files"] = [f for f in record["files"] if "test" in f["path"]]
    path.write_text(json.dumps(record))
    with pytest.raises(BadData, match=r"fetched\.json: lists no training images or no test images"):
        mnist(files.root)


def test_no_network_says_what_to_do_by_hand(small, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    files = small("cifar10")
    line = refused("cifar10", files.root / "sets")
    assert line.startswith("cifar10: the hub (http://127.0.0.1:9) gave no answer that can be used (ConnectError: ")
    assert line.endswith(
        f"; where there is a network, run the same command and copy {files.root / 'sets' / 'cifar10'} here, or put the "
        ".parquet files of https://huggingface.co/datasets/uoft-cs/cifar10/tree/main/plain_text into "
        f"{files.root / 'sets' / 'cifar10' / 'plain_text'}"
    )
    assert list(files.root.iterdir()) == []


def test_files_put_there_by_hand_are_read(small, hub_of):
    files = small("cifar10")
    hub_of(files)
    for name, content in files.parquets().items():  # as the error above says
        path = files.root / "cifar10" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert cifar10(files.root).y.tolist() == files.y.tolist()


def test_an_unknown_name_and_a_folder_that_cannot_be_made(small, hub_of):
    assert "did you mean cifar10" in refused("cifar", kind=UnknownName)
    assert "unknown image set 'digits' to fetch" in refused("digits", kind=UnknownName)
    files = small("mnist")
    hub_of(files)
    (files.root / "file").write_text("")
    assert refused("mnist", files.root / "file", kind=BadFolder).startswith(
        f"--root: the folder {files.root / 'file' / 'mnist'} cannot be made ("
    )


def test_the_command_through_the_environment_alone(small, hub_of):
    """HF_ENDPOINT, the users' own way to another hub, in a process of its own; nothing outside the root is written."""
    files = small("mnist")
    hub = hub_of(files)
    home = files.root / "home"
    home.mkdir()
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    environment = {k: v for k, v in environment.items() if k not in ("HF_HOME", "HF_HUB_CACHE")}
    command = [sys.executable, "-m", "flatlens", "data", "fetch", "mnist", "--root", str(files.root / "sets")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    said = [line for line in done.stderr.splitlines() if not line.endswith(" so far")]  # on a busy machine
    assert (done.returncode, said) == (0, [])
    assert " ".join(done.stdout.split()).endswith("3 files, 0.0 MB, checked")
    assert on_disk(home) == {}
    assert len(on_disk(files.root / "sets")) == 4
    hub.server.shutdown()
    again = subprocess.run([*command, "--json"], capture_output=True, text=True, env=environment, check=False)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["downloaded"] == []
