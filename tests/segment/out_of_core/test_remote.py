"""Stores at URLs: results equal those of local stores, error messages, and credentials are never stored."""

import functools
import http.server
import json
import threading

import numpy as np
import pytest

from tests.segment.out_of_core.stores import scene, scribbled, write_store, zarr
from vispe.cli.main import main
from vispe.errors import InputError, MissingExtra, OptionError
from vispe.images import remote
from vispe.images.paths import expanded
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.tiles import Region
from vispe.segment.out_of_core.source.open_image import open_image
from vispe.segment.pipeline import apply, segment

FILTERS = FeatureConfig("filters")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def folder(tmp_path):
    values, phase = scene(90, 110)
    write_store(tmp_path / "a.zarr", values.astype(np.float32))
    scribbled(tmp_path / "a_labels.png", phase)
    return tmp_path


@pytest.fixture
def server(folder):
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def memory_url(folder):
    import fsspec

    system = fsspec.filesystem("memory")
    system.put(str(folder / "a.zarr"), "/bucket/a.zarr", recursive=True)
    yield "memory://bucket/a.zarr"
    system.rm("/bucket", recursive=True)


def result(folder):
    root = zarr.open_group(str(folder / "a_seg.ome.zarr"), mode="r")
    return root["0"][:], root["labels/classes/0"][:]


@pytest.mark.slow
def test_results_at_a_url_equal_those_of_the_local_store(folder, server, memory_url, capsys):
    labels = ["--labels", str(folder / "a_labels.png"), "--features", "filters", "--classes", "bright,dark"]
    assert main(["segment", str(folder / "a.zarr"), *labels, "-o", str(folder / "local")]) == 0
    expected = result(folder / "local")
    for name, url in (("http", f"{server}/a.zarr"), ("memory", memory_url)):
        out = folder / name
        assert main(["segment", url, *labels, "-o", str(out)]) == 0
        assert all(np.array_equal(a, b) for a, b in zip(result(out), expected, strict=True))
        assert json.loads((out / "report.json").read_text())["images"][0]["image"] == url
        assert (
            main(["apply", str(folder / "local" / "model.vispe"), url, "-o", str(folder / f"{name}2")]) == 0
        )
        assert all(np.array_equal(a, b) for a, b in zip(result(folder / f"{name}2"), expected, strict=True))


def test_unfinished_runs_on_a_url_are_resumed(folder, memory_url, monkeypatch):
    from vispe.segment.out_of_core.store_run import OutOfCoreRun

    call = {"labels": folder / "a_labels.png", "features": FILTERS}
    with monkeypatch.context() as patch:
        patch.setattr(OutOfCoreRun, "_settle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            segment(memory_url, folder / "out", **call)
    report = segment(memory_url, folder / "out", **call)
    assert any("already done" in note for note in report.notes)


def test_storage_options_reach_the_protocol_and_are_not_stored(folder, memory_url, monkeypatch):
    requested = []
    original = remote.options_of
    monkeypatch.setattr(
        "vispe.segment.out_of_core.source.stored_array.options_of",
        lambda url: requested.append(original(url)) or {},
    )
    monkeypatch.setattr(remote, "options_of", lambda url: requested.append(original(url)) or {})
    secret = {"key": "user-secret", "secret": "pass-secret"}
    (folder / "options.json").write_text(json.dumps(secret))
    for number, options in enumerate((secret, json.dumps(secret), folder / "options.json")):
        segment(
            memory_url, folder / f"out{number}", labels=folder / "a_labels.png", features=FILTERS,
            storage_options=options,
        )  # fmt: skip
        assert requested
        assert all(options == secret for options in requested)
        requested.clear()
        files = [path.read_bytes() for path in (folder / f"out{number}").rglob("*") if path.is_file()]
        assert not any(b"-secret" in data for data in files)
    assert remote.options_of("memory://bucket") == {}


@pytest.mark.parametrize("options", ["[1]", "{oops", "nofile.json", '"text"'])
def test_invalid_storage_options_raise_without_revealing_them(folder, options):
    with pytest.raises(OptionError, match="must be a JSON object") as caught:
        segment("memory://x/a.zarr", folder / "out", labels=folder / "a_labels.png", storage_options=options)
    assert "oops" not in str(caught.value)


def test_access_without_credentials_is_anonymous(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(remote, "require", lambda *_: None)
    assert remote.options_of("s3://bucket/a.zarr") == {"anon": True}
    with remote.storage_options({"endpoint_url": "http://x"}):
        assert remote.options_of("s3://bucket/a.zarr") == {"endpoint_url": "http://x"}
    monkeypatch.setenv("AWS_PROFILE", "me")
    assert remote.options_of("s3://bucket/a.zarr") == {}


@pytest.mark.parametrize(
    ("url", "package"),
    [("https://host/a.zarr", "aiohttp"), ("s3://bucket/a.zarr", "s3fs"), ("gs://b/a.zarr", "gcsfs")],
)
def test_missing_packages_raise_with_their_extra(folder, monkeypatch, url, package):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    with pytest.raises(MissingExtra, match=rf"needs the package '{package}'.*vispe\[remote\]"):
        segment(url, folder / "out", labels=folder / "a_labels.png", features=FILTERS)


def test_unreadable_urls_are_rejected(folder, server, capsys):
    labels = ["--labels", str(folder / "a_labels.png"), "-o", str(folder / "out")]
    for url in (
        f"{server}/none.zarr",
        "http://127.0.0.1:1/a.zarr",
        "memory://none/a.zarr",
        "nonsense://a/b.zarr",
    ):
        assert main(["segment", url, *labels]) == 2
        message = capsys.readouterr().err
        assert f"{url} cannot be read" in message
        assert "--storage-options" in message
    for url in ("https://me:word@host/a.zarr", "https://host/a.zarr?sig=word"):
        assert main(["segment", url, *labels]) == 2
        message = capsys.readouterr().err
        assert "must not contain credentials or a query" in message
        assert "word" not in message.replace("password", "")


def test_connections_lost_during_a_run_raise(folder, memory_url, monkeypatch):
    model = folder / "model"
    segment(folder / "a.zarr", model, labels=folder / "a_labels.png", features=FILTERS)

    def fail(*_):
        raise RuntimeError("connection lost")

    monkeypatch.setattr(zarr.Array, "__getitem__", fail)
    with pytest.raises(
        InputError, match=r"memory://bucket/a\.zarr cannot be read \(RuntimeError: connection lost\)"
    ):
        apply(model / "model.vispe", memory_url, folder / "out")


def named_error(name):
    module, _, kind = name.rpartition(".")
    return pytest.importorskip(module, reason=f"{module} is not installed").__dict__[kind]


@pytest.mark.parametrize(
    ("name", "unreadable"),
    [
        ("aiohttp.ClientPayloadError", True),
        ("botocore.exceptions.NoCredentialsError", True),
        ("fsspec.exceptions.FSTimeoutError", True),
        ("zarr.errors.MetadataValidationError", True),
        ("builtins.MemoryError", False),
        ("builtins.AssertionError", False),
    ],
)
def test_only_errors_of_the_libraries_become_input_errors(folder, memory_url, monkeypatch, name, unreadable):
    error = named_error(name)
    expected = InputError if unreadable else error

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("fsspec.implementations.memory.MemoryFileSystem.cat_file", fail)
        with pytest.raises(expected):
            remote.fingerprint_url(expanded(memory_url))
    image = open_image(memory_url)
    monkeypatch.setattr(zarr.Array, "__getitem__", fail)
    with pytest.raises(expected):
        image.read(0, Region(0, 8, 0, 8))
    monkeypatch.setattr(zarr, "open", fail)
    with pytest.raises(expected):
        open_image(memory_url)


def test_name_of_a_url_is_that_of_its_store():
    url = expanded("s3://bucket/folder/a.ome.zarr/")
    assert (str(url), url.name, url.resolve()) == ("s3://bucket/folder/a.ome.zarr", "a.ome.zarr", url)
    assert url == expanded("s3://bucket/folder/a.ome.zarr")
    assert hash(url) == hash(expanded(str(url)))
    assert url != expanded("gs://bucket/folder/a.ome.zarr")
