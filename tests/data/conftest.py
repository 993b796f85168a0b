"""Small files in the true formats, and what is known of them."""

import gzip
import hashlib
import io
import json
import struct
import tarfile
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import numpy as np
import pytest

from flatlens.data.image_sets import IMAGE_SETS

TRAIN, TEST = 20, 10


def numbers(known, seed=0):
    """Random images (n, channels, rows, columns) and labels, training and test."""
    drawn = np.random.default_rng(seed)
    sizes = (known.train, known.test)
    return [
        (
            drawn.integers(0, 256, (n, *known.shape), dtype=np.uint8),
            drawn.permutation(n).astype(np.uint8) % known.classes,
        )
        for n in sizes
    ]


def idx(array):
    """The bytes of an IDX file."""
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def binary(known, images, labels):
    """The bytes of a CIFAR file: superclass (CIFAR-100), class, planes."""
    coarse = [bytes([0])] * len(labels) if known.label_bytes == 2 else [b""] * len(labels)
    return b"".join(c + bytes([y]) + x.tobytes() for c, y, x in zip(coarse, labels, images, strict=True))


def png(image):
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0)).save(out, "PNG")
    return out.getvalue()


def parquet(known, images, labels):
    """The bytes of a parquet file in the hub's schema."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {
        known.image_column: pa.array([{"bytes": png(x), "path": None} for x in images], kind),
        known.label_column: pa.array([int(y) for y in labels], pa.int64()),
    }
    if known.label_bytes == 2:
        columns["coarse_label"] = pa.array([0] * len(labels), pa.int64())
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return out.getvalue().to_pybytes()


class Files:
    """Writes one small set under a root, in any form."""

    def __init__(self, known, root):
        self.known, self.root = known, root
        (self.x, self.y), (self.test_x, self.test_y) = numbers(known)

    def write_idx(self, zipped=False):
        folder = self.root / self.known.folder
        folder.mkdir(parents=True, exist_ok=True)
        for names, images, labels in (
            (self.known.train_files, self.x, self.y),
            (self.known.test_files, self.test_x, self.test_y),
        ):
            for name, content in zip(names, (idx(images[:, 0]), idx(labels)), strict=True):
                if zipped:
                    (folder / f"{name}.gz").write_bytes(gzip.compress(content))
                else:
                    (folder / name).write_bytes(content)
        return folder

    def binaries(self):
        """File name -> content."""
        parts = len(self.known.train_files)
        cut = zip(self.known.train_files, np.split(self.x, parts), np.split(self.y, parts), strict=True)
        contents = {name: binary(self.known, x, y) for name, x, y in cut}
        return {**contents, self.known.test_files[0]: binary(self.known, self.test_x, self.test_y)}

    def write_binary(self):
        folder = self.root / self.known.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.binaries().items():
            (folder / name).write_bytes(content)
        return folder

    def write_archive(self):
        path = self.root / self.known.archive
        with tarfile.open(path, "w:gz") as tar:
            for name, content in {"batches.meta.txt": b"cat\n", **self.binaries()}.items():
                member = tarfile.TarInfo(f"{self.known.folder}/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        return path

    def parquets(self):
        """Path in the repository -> content, with the training images in two files."""
        under, half = self.known.hub_folder, len(self.x) // 2
        return {
            f"{under}/train-00000-of-00002.parquet": parquet(self.known, self.x[:half], self.y[:half]),
            f"{under}/train-00001-of-00002.parquet": parquet(self.known, self.x[half:], self.y[half:]),
            f"{under}/test-00000-of-00001.parquet": parquet(self.known, self.test_x, self.test_y),
        }

    def write_parquet(self):
        for name, content in self.parquets().items():
            path = self.root / self.known.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return self.root / self.known.name


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Make one of the known sets small, without published checksums; its files go under tmp_path."""

    def make(name, **changes):
        known = replace(IMAGE_SETS[name], train=TRAIN, test=TEST, **{"md5": {}, **changes})
        monkeypatch.setitem(IMAGE_SETS, name, known)
        return Files(known, tmp_path)

    return make


@pytest.fixture
def md5():
    return lambda content: hashlib.md5(content, usedforsecurity=False).hexdigest()


class Hub:
    """The Hugging Face hub's endpoints for one dataset repository, on loopback."""

    REVISION = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, repository, files):
        self.repository, self.files = repository, dict(files)
        self.declared = dict(files)  # what the listing says; `files` is what is sent
        self.asked, self.sent = [], 0
        self.fail_after = None  # bytes after which no file answers any more
        self.lfs = True
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.do_GET()

            def do_GET(self):
                hub.asked.append(f"{self.command} {self.path}")
                path, _, _ = unquote(self.path).partition("?")
                if path in (
                    f"/api/datasets/{hub.repository}",
                    f"/api/datasets/{hub.repository}/revision/{hub.REVISION}",
                ):
                    return self.answer(200, json.dumps(hub.info()).encode(), "application/json")
                at = f"/datasets/{hub.repository}/resolve/{hub.REVISION}/"
                content = hub.files.get(path.removeprefix(at)) if path.startswith(at) else None
                if content is None:
                    return self.answer(404, b"{}", "application/json")
                if self.command == "GET":
                    if hub.fail_after is not None and hub.sent + len(content) > hub.fail_after:
                        return self.answer(403, b"no more", "text/plain")
                    hub.sent += len(content)
                return self.answer(200, content, "application/octet-stream")

            def answer(self, status, content, kind):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", hub.REVISION)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, *_args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def info(self):
        return {
            "_id": "0", "id": self.repository, "sha": self.REVISION, "private": False, "gated": False,
            "disabled": False, "downloads": 0, "likes": 0, "tags": [],
            "siblings": [
                {"rfilename": "README.md", "size": 3, "blobId": "1"},
                *(
                    {"rfilename": name, "size": len(content), "blobId": "2"}
                    | ({"lfs": {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}}
                       if self.lfs else {})
                    for name, content in self.declared.items()
                ),
            ],
        }  # fmt: skip


@pytest.fixture
def hub_of(monkeypatch):
    """Start a hub that serves a small set's parquet files; huggingface_hub asks it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    pytest.importorskip("pyarrow")
    started = []

    def start(files):
        hub = Hub(files.known.repository, files.parquets())
        threading.Thread(target=hub.server.serve_forever, args=(0.05,), daemon=True).start()
        started.append(hub)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # it is read from HF_ENDPOINT at the import
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        return hub

    yield start
    for hub in started:
        hub.server.shutdown()
        hub.server.server_close()
