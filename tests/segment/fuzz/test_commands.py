"""Command line with damaged files and unusual names: exit codes, one line per problem, complete outputs."""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.segment.fuzz import corpus
from vispe.cli.main import main

unix = pytest.mark.skipif(sys.platform == "win32", reason="such names and links are of Unix")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model file for one channel, with filter features."""
    folder = tmp_path_factory.mktemp("model")
    g = corpus.grey(np.uint8, 24, 30)
    g[:, 15:] //= 2
    scribbles = np.zeros(g.shape, np.uint8)
    scribbles[::3, 3:12:2], scribbles[::3, 18:27:2] = 1, 2
    Image.fromarray(g).save(folder / "a.png")
    Image.fromarray(scribbles).save(folder / "l.png")
    argv = f"segment {folder}/a.png --labels {folder}/l.png --features filters -o {folder}/out"
    assert main(argv.split()) == 0
    return folder / "out/model.vispe"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def vispe(capsys, *words):
    """Run the command -> exit code, lines of stdout and of stderr; check lines and outputs."""
    code = main([str(w) for w in words])
    captured = capsys.readouterr()
    assert code in (0, 1, 2)
    assert "Traceback" not in captured.err
    assert all(c.isprintable() or c == "\n" for c in captured.out + captured.err)
    lines = captured.err.splitlines()
    assert all(line.startswith(("vispe: ", "  ")) for line in lines), captured.err
    out = Path(words[words.index("-o") + 1])
    for path in out.glob("*") if out.is_dir() else ():
        assert ".partial-" not in path.name
        if path.suffix == ".tif":
            tifffile.imread(path)
        elif path.suffix == ".png":
            np.asarray(Image.open(path))
        elif path.suffix == ".json":
            json.loads(path.read_text())
    return code, captured.out.splitlines(), lines


def test_bad_files_in_a_folder_are_skipped_with_one_line_each(capsys, model, tmp_path):
    files = dict(corpus.foreign())
    files |= {n: d for n, d, _ in corpus.hostile() if n.startswith(("header", "circle", "planes", "laughs"))}
    g = corpus.grey()
    for seed, (name, data) in enumerate(
        {"png": corpus.encoded(g, "PNG"), "tif": corpus.tiff(g), "jpg": corpus.encoded(g, "JPEG")}.items()
    ):
        rng = np.random.default_rng(seed)
        files |= {f"cut{n}.{name}": data[:n] for n in rng.integers(1, len(data) - 20, 6)}
    files = {f"{number}_{name}": data for number, (name, data) in enumerate(files.items())}
    corpus.write(tmp_path / "in", files)
    Image.fromarray(g).save(tmp_path / "in/good.png")
    tifffile.imwrite(tmp_path / "in/flat.tif", np.full((9, 1), 5, np.uint16))
    (tmp_path / "in/folder.png").mkdir()
    code, out, err = vispe(capsys, "apply", model, "in", "-o", "out")
    assert code == 1
    assert {line.partition(":")[0] for line in out} == {"in/good.png", "in/flat.tif"}
    skipped = [line for line in err if "was skipped" in line]
    assert len(skipped) == len(files)
    report = json.loads(Path("out/report.json").read_text())
    assert len(report["failures"]) == len(files)
    assert np.asarray(Image.open("out/good_seg.png")).shape == g.shape
    assert not list(Path("out").glob("cut*"))


KINDS = ("bool", "uint8", "int8", "uint16", "uint32", "int64", "uint64", "float16", "float64")


def test_the_bit_depth_does_not_change_the_segmentation(capsys, model):
    levels = np.kron(np.arange(2), np.ones((12, 9)))
    for kind in KINDS:
        tifffile.imwrite(
            f"{kind}.tif", levels.astype(bool) if kind == "bool" else (levels * 100).astype(kind)
        )
    Image.fromarray((levels * 255).astype(np.uint8)).save("b.png")
    code, lines, _ = vispe(capsys, "apply", model, *(f"{kind}.tif" for kind in KINDS), "b.png", "-o", "out")
    assert code == 0
    assert len(lines) == len(KINDS) + 1
    expected = np.asarray(Image.open("out/b_seg.png"))
    for kind in KINDS:
        np.testing.assert_array_equal(np.asarray(Image.open(f"out/{kind}_seg.png")), expected, err_msg=kind)


def test_thin_images_are_segmented(capsys, model):
    shapes = {f"{h}x{w}": (h, w) for h, w in ((1, 1), (1, 200), (200, 1), (2, 3))}
    for name, shape in shapes.items():
        Image.fromarray(corpus.grey(np.uint8, *shape)).save(f"{name}.png")
    code, _, _ = vispe(capsys, "apply", model, *(f"{name}.png" for name in shapes), "-o", "out")
    assert code == 0
    for name, shape in shapes.items():
        assert np.asarray(Image.open(f"out/{name}_seg.png")).shape == shape


NAMES = [
    "ünï·код 空.png",
    "two\nlines.png",
    "\x1b[31mred.png",
    "tab\there.png",
    "[a-z]*.png",
    "-o.png",
    "x" * 200 + ".png",
    "x" * 250 + ".png",
    b"not\xff\xfeutf8.png",
    "CON.png",
    ".hidden.png",
    "a'b\"c;$(touch ran).png",
]


@unix
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_unusual_file_names_are_supported(capsys, model, name, tmp_path):
    name = os.fsdecode(name)
    try:
        Image.fromarray(corpus.grey()).save("plain.png")
        Path("plain.png").rename(name)
    except (OSError, UnicodeError):
        pytest.skip("this file system has no such names")
    code, out, err = vispe(capsys, "apply", model, f"./{name}", "-o", "out")
    if len(name) > 240:
        assert code == 2
        assert len(err) == 1
        assert "File name too long" in err[0]
        return
    assert code == 0, err
    assert len(out) == 1
    stem = name.removesuffix(".png")
    assert Path(f"out/{stem}_seg.png").exists()
    assert Path(f"out/{stem}_overlay.png").exists()
    report = json.loads(Path("out/report.json").read_text())
    assert report["images"][0]["image"] == name
    assert not Path("ran").exists()


@unix
def test_cyclic_and_dangling_symlinks_are_reported(capsys, model):
    Path("a.png").symlink_to("b.png")
    Path("b.png").symlink_to("a.png")
    Path("c.png").symlink_to("nothing")
    for name in ("a.png", "c.png"):
        code, _, err = vispe(capsys, "apply", model, name, "-o", "out")
        assert code == 2
        assert name in err[0]
    Path("loop1").symlink_to("loop2")
    Path("loop2").symlink_to("loop1")
    Image.fromarray(corpus.grey()).save("good.png")
    code, _, err = vispe(capsys, "apply", model, "good.png", "-o", "loop1/out")
    assert code == 2
    assert len(err) == 1
    code, _, err = vispe(capsys, "apply", "a.png", "good.png", "-o", "out")
    assert code == 2
    assert len(err) == 1


@unix
def test_missing_permissions_are_reported(capsys, model, tmp_path):
    Image.fromarray(corpus.grey()).save("a.png")
    Path("a.png").chmod(0)
    Path("shut").mkdir()
    Image.fromarray(corpus.grey()).save("shut/b.png")
    Path("shut").chmod(0)
    Path("open").mkdir()
    Path("open").chmod(0o777)
    words = [(model, "a.png"), (model, "shut"), (model, "shut/b.png")]
    user = os.geteuid()
    if user == 0:  # root can read everything: run as another user
        for path in (tmp_path, model, *tmp_path.parents, *model.parents):
            if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
                path.chmod(0o755)
        os.seteuid(65534)
        if not os.access(np.__file__, os.R_OK, effective_ids=True):
            os.seteuid(user)
            pytest.skip("root may read everything, and nobody else may import what is installed here")
    try:
        actual = [vispe(capsys, "apply", *w, "-o", "open/out") for w in words]
    finally:
        os.seteuid(user)
        Path("shut").chmod(0o755)
    for (_, name), (code, _, err) in zip(words, actual, strict=True):
        assert code == 2
        # a model of a tiny image has no training summary for out-of-distribution checks, which adds a line
        err = [line for line in err if "no summary of its training images" not in line]
        assert len(err) == 1
        assert name in err[0]
        assert "ermission" in err[0]


def test_folders_with_an_image_suffix_are_read_as_folders(capsys, model):
    Path("a.png").mkdir()
    code, _, err = vispe(capsys, "apply", model, "a.png", "-o", "out")
    assert code == 2
    assert "the folder a.png contains no image" in err[0]
    Image.fromarray(corpus.grey()).save("a.png/b.png")
    assert vispe(capsys, "apply", model, "a.png", "-o", "out")[0] == 0
