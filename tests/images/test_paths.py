"""File names with a tilde, commas, characters beyond U+FFFF or invalid UTF-8; paths that are not files."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cases import cases
from tests.cli.test_segment import scene
from tests.products import partly
from vispe.cli.main import main, parse
from vispe.errors import InputError, OptionError
from vispe.images.file_search import find_images
from vispe.images.paths import check_file, expanded
from vispe.segment.out_of_core import find_stores, is_store


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path


def image(path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(scene()[0]).save(path)
    return Path(path)


def option(name, *arguments):
    return parse("segment", ["i.png", "-o", "o", *arguments])[1][name]


TEXTS = [
    "\U00020bb7.png",
    "\U0001f600/a.png",
    "a\x7fb",
    "a\x85b",
    "\ufeffx",
    "null",
    "012",
    "a: b",
    "#x",
    "'q",
    '"q',
    "a\\b",
]


@partly(1)
@cases("text", TEXTS)
@cases("name", ["labels", "truth", "classes", "text", "legend", "weights", "out"])
def test_text_reaches_its_option_unchanged(text, name):
    flag = f"--{name}"
    for arguments in ([flag, text], [f"{flag}={text}"]):
        if name == "text" and len(arguments) == 1:
            continue  # --text takes words
        actual = option(name, *arguments)
        assert actual == (text if name in ("legend", "weights", "out") else [text])


@cases("text", ["null", "~", "#a.json", "&a"])
def test_null_like_text_is_not_parsed_as_none(text):
    assert option("legend", "--legend", text) == text


def test_list_options_keep_commas_of_existing_files_and_of_json_lists(folder):
    assert option("labels", "--labels", "a,b.png") == ["a", "b.png"]
    assert option("labels", "--labels", '["a,b.png", "c"]') == ["a,b.png", "c"]
    image("a,b.png")
    assert option("labels", "--labels", "a,b.png") == ["a,b.png"]
    assert option("labels", "--labels=a,b.png") == ["a,b.png"]
    assert option("labels", "--labels", "[ab]*.png") == ["[ab]*.png"]
    image("[c].png")
    assert option("labels", "--labels", "[c].png") == ["[c].png"]
    assert option("clip", "--clip", "1,99") == [1, 99]


def test_file_names_with_invalid_utf8_raise_in_a_list():
    with pytest.raises(OptionError, match=r"--labels: file names must be valid UTF-8, got 'a\\udcff.png'"):
        option("labels", "--labels", "a\udcff.png")


def test_segment_with_file_names_beyond_the_bmp(folder):
    grey, _, labels = scene()
    Path("\U00020bb7").mkdir()
    Image.fromarray(grey).save("\U00020bb7/\U0001f52c.png")
    Image.fromarray(labels).save("\U00020bb7/\U0001f3a8.png")
    arguments = [
        "segment",
        "\U00020bb7/\U0001f52c.png",
        "--labels",
        "\U00020bb7/\U0001f3a8.png",
        "-o",
        "\U0001f600",
    ]
    assert main([*arguments, "--classes", "\U0001faa8,\U00020bb7", "--features", "filters"]) == 0
    assert main(["apply", "\U0001f600/model.vispe", "\U00020bb7/\U0001f52c.png", "-o", "more"]) == 0
    assert Path("more/\U0001f52c_seg.png").read_bytes() == Path("\U0001f600/\U0001f52c_seg.png").read_bytes()


@pytest.mark.skipif(
    os.name != "posix" or os.uname().sysname == "Darwin", reason="such names cannot be made here"
)
def test_segment_with_a_file_name_of_invalid_utf8(folder):
    grey, _, labels = scene()
    Image.fromarray(grey).save("a.png")
    Path("a.png").rename("a\udcff.png")
    Image.fromarray(labels).save("drawn.png")
    assert (
        main(["segment", "a\udcff.png", "--labels", "drawn.png", "--features", "filters", "-o", "out"]) == 0
    )
    assert main(["apply", "out/model.vispe", "a\udcff.png", "-o", "more"]) == 0


def test_file_names_that_begin_with_a_tilde(folder, capsys):
    with pytest.raises(InputError, match=r"^~t\.png does not exist, and there is no user 't\.png'"):
        expanded("~t.png")
    assert main(["segment", "~t.png", "--cluster", "2", "-o", "out"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert image("~t.png") == expanded("~t.png")
    assert find_images(["~t.png"]) == [Path("~t.png")]
    assert find_images(["~*.png"]) == [Path("~t.png")]
    image("~t/b.png")
    assert find_images(["~t"]) == [Path("~t/b.png")]
    with pytest.raises(InputError, match=r"^~t/c\.png does not exist. Check the name"):
        find_images(["~t/c.png"])
    with pytest.raises(InputError, match=r"no user 'u'"):
        find_images(["~u/c.png"])
    assert find_stores(["~t.png"]) == ([], ["~t.png"])
    assert not is_store("~t.png")


def test_tilde_is_the_home_folder_unless_a_folder_has_that_name(folder):
    image(folder / "home" / "a.png")
    assert find_images(["~/a.png"]) == [folder / "home" / "a.png"]
    image("./~/a.png")
    assert find_images(["~/a.png"]) == [Path("~/a.png")]


def test_paths_that_are_not_files_raise_with_their_kind(folder):
    os.mkfifo("pipe.png")
    Path("here").symlink_to("there")
    Path("there").symlink_to("here")
    Path("lost.png").symlink_to("gone.png")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("socket.png")
    expected = {
        "pipe.png": r"^pipe\.png is not a file but a named pipe. Save its contents to a file and pass that\.$",
        "/dev/zero": r"^/dev/zero is not a file but a device",
        "socket.png": r"^socket\.png is not a file but a socket",
        "here": r"^here is a cyclic link. Check the name\.$",
        "lost.png": r"^lost\.png is a link to gone\.png, which does not exist",
        "gone.png": r"^gone\.png does not exist. Check the name\.$",
        "a" * 300: r"is not accessible \(File name too long\)",
    }
    for name, pattern in expected.items():
        with pytest.raises(InputError, match=pattern):
            find_images([name])
    with pytest.raises(InputError, match=r"^home is not a file but a folder"):
        check_file(Path("home"))


@pytest.mark.parametrize(
    "words", ["apply pipe a.png -o out", "segment a.png --labels drawn.png --legend pipe -o out"]
)
def test_named_pipes_as_model_or_legend_raise_without_hanging(folder, capsys, words):
    os.mkfifo("pipe")
    image("a.png")
    Image.fromarray(np.uint8([[0, 1], [1, 2]])).save("drawn.png")
    assert main(words.split()) == 2
    assert "pipe is not a file but a named pipe" in capsys.readouterr().err
