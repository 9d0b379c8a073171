"""Tar files read at random give what reading them in order gives; their index is made once, and again when needed."""

import io
import json
import os
import pickle
import tarfile

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from vispe.errors import InputError, OptionError
from vispe.train.data import FolderSource, TarSource, from_config, tar_index
from vispe.train.data.tar_index import expand, index_file

RNG = np.random.default_rng(1)


def _png(array, form="PNG"):
    out = io.BytesIO()
    Image.fromarray(array).save(out, form)
    return out.getvalue()


def _tif(array):
    out = io.BytesIO()
    tifffile.imwrite(out, array, photometric="minisblack")
    return out.getvalue()


def _tar(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def _images(count, shape=(6, 9, 3)):
    return [RNG.integers(0, 256, shape, np.uint8) for _ in range(count)]


@pytest.fixture
def shards(tmp_path):
    """Two shards with samples of several files, nested and long names, and all kinds of images."""
    grey = RNG.integers(0, 256, (5, 4), np.uint8)
    first = {
        "000.cls": b"7",
        "000.png": _png(_images(1)[0]),
        "deep/er/" + "long" * 40 + ".jpg": _png(_images(1)[0], "JPEG"),
        "deep/er/" + "long" * 40 + ".json": b"{}",
        "deep/000.JPEG": _png(grey, "JPEG"),
        "._000.png": b"rubbish of another system",
    }
    second = {
        "010.tif": _tif(RNG.integers(0, 256, (3, 7, 5), np.uint8)),
        "002.png": _png(RNG.integers(0, 9000, (4, 4), np.uint16)),
        "011.png": _png(np.dstack([_images(1)[0], _images(1)[0][..., :1]])),
        "003.bmp": _png(grey, "BMP"),
    }
    _tar(tmp_path / "part-008.tar", first)
    _tar(tmp_path / "part-010.tar", second)
    return tmp_path


def test_random_access_equals_reading_in_order(shards, tmp_path):
    source = TarSource(shards / "part-*.tar")
    names, expected = [], []
    for shard in ("part-008.tar", "part-010.tar"):
        with tarfile.open(shards / shard) as tar:
            for k, info in enumerate(tar):
                if info.name.lower().endswith((".cls", ".json")) or info.name.startswith("._"):
                    continue
                file = tmp_path / f"{shard}-{k}.{info.name.rpartition('.')[2]}"
                file.write_bytes(tar.extractfile(info).read())
                pages = list(FolderSource(file))
                expected += pages
                names += [info.name] * len(pages)
    assert len(source) == len(expected) == 9
    for i in RNG.permutation(9).tolist() + RNG.permutation(9).tolist():
        assert torch.equal(source[i], expected[i]), i
        assert source.name(i).endswith(names[i])
    assert source.name(4) == f"page 1 of {shards / 'part-010.tar'}: 010.tif"
    assert all(torch.equal(a, b) for a, b in zip(source, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(pickle.loads(pickle.dumps(source)), expected, strict=True))
    description = json.loads(json.dumps(source.describe()))
    assert (description["kind"], description["count"], description["files"]) == ("tar", 9, 7)


def test_the_index_is_rebuilt_when_the_tar_changes(shards, tmp_path, monkeypatch):
    file = shards / "part-008.tar"
    before = TarSource(file)
    assert index_file(file, None) == shards / "part-008.tar.index.json"
    assert index_file(file, None).is_file()
    assert not list(shards.glob("*.part"))

    def scan(path):
        raise AssertionError("scanned again")

    with monkeypatch.context() as patch:
        patch.setattr(tar_index, "_scan", scan)
        reopened = TarSource(file)
        assert all(torch.equal(a, b) for a, b in zip(reopened, before, strict=True))
        with pytest.raises(AssertionError, match="scanned again"):
            TarSource(file, cache=tmp_path / "cache")
    stored = TarSource(file, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert stored.fingerprint() == before.fingerprint()
    new = _images(2)
    _tar(file, {"x.png": _png(new[0]), "y.png": _png(new[1])})
    changed = TarSource(file)
    second = changed[1].clone()
    assert len(changed) == 2
    assert torch.equal(second, torch.from_numpy(new[1] / np.float32(255)).permute(2, 0, 1))
    assert changed.fingerprint() != before.fingerprint()
    index_file(file, None).write_text("{half a fil")
    assert len(TarSource(file)) == 2
    _tar(file, {"x.png": _png(new[1]), "y.png": _png(new[0])})  # same length, another time
    os.utime(file, ns=(1, 10**18))
    assert torch.equal(TarSource(file)[0], second)


def test_extensions_choose_among_the_files_of_a_sample(tmp_path):
    image, mask = _images(2)
    tar = _tar(
        tmp_path / "a.tar",
        {"v1.2/s1.png": _png(image), "v1.2/s1.seg.PNG": _png(mask), "v1.2/s2.png": _png(mask)},
    )
    with pytest.raises(
        InputError,
        match=r"the sample v1.2/s1 of .*a.tar has several images .png and seg.png.. Set `extensions`",
    ):
        TarSource(tar)
    assert [s.rpartition(" ")[2] for s in map(TarSource(tar, extensions="png").name, range(2))] == [
        "v1.2/s1.png", "v1.2/s2.png",
    ]  # fmt: skip
    assert len(TarSource(tar, extensions=["png", ".seg.png"])) == 3
    only = TarSource(tar, extensions="seg.png")
    assert torch.equal(only[0], torch.from_numpy(mask / np.float32(255)).permute(2, 0, 1))
    with pytest.raises(InputError, match="contains no readable image"):
        TarSource(tar, extensions="jpg")


def test_damaged_images_raise_or_are_skipped_with_one_warning(shards):
    good = _images(1)[0]
    files = {"0.png": _png(good), "1.png": _png(good)[:60], "2.jpg": b"", "3.png": _png(good)}
    tar = _tar(shards / "bad.tar", files)
    source = TarSource(tar)
    assert len(source) == 4
    with pytest.raises(InputError, match=r"bad.tar: 1.png is truncated .*skip_damaged=true") as error:
        source[1]
    assert "vispe-" not in str(error.value)
    with pytest.warns(
        UserWarning, match="2 damaged files are skipped: .*1.png, .*2.jpg; the first: .*1.png"
    ) as warning:
        stored = TarSource(tar, skip_damaged=True)
    assert len(warning) == 1
    assert [stored.name(i).rpartition(" ")[2] for i in range(len(stored))] == ["0.png", "3.png"]
    with pytest.warns(UserWarning, match="2 damaged files"):  # from the index
        assert TarSource(tar, skip_damaged=True).damaged == stored.damaged
    assert len(TarSource(tar)) == 4
    stack = _tif(RNG.integers(0, 256, (3, 7, 5), np.uint8))
    tar = _tar(shards / "worse.tar", {"0.png": _png(good), "1.tif": stack[:30]})
    with pytest.raises(InputError, match=r"worse.tar: 1.tif is truncated"):
        TarSource(tar)
    with pytest.warns(UserWarning, match=r"1 damaged file is skipped: .*1.tif"):
        assert len(TarSource(tar, skip_damaged=True)) == 1


def test_patterns(tmp_path):
    for name in ("a-08.tar", "a-09.tar", "a-10.tar", "b-8.tar", "b-9.tar", "b-10.tar"):
        (tmp_path / name).touch()

    def names(pattern):
        return [p.name for p in expand(pattern)]

    base = str(tmp_path)
    assert names(f"{base}/a-{{08..10}}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert names(f"{base}/b-{{9..10}}.tar") == ["b-9.tar", "b-10.tar"]
    assert names(f"{base}/{{b-8,a-08}}.tar") == ["b-8.tar", "a-08.tar"]
    assert sorted(names(f"{base}/{{b-{{8,9}},a-10}}.tar")) == ["a-10.tar", "b-8.tar", "b-9.tar"]
    assert names(f"{base}/b-*.tar") == ["b-8.tar", "b-9.tar", "b-10.tar"]
    assert names([f"{base}/b-10.tar", f"{base}/b-*.tar"]) == ["b-10.tar", "b-8.tar", "b-9.tar"]
    for bad, text in (
        (f"{base}/a-{{08..11}}.tar", r"a-11.tar does not exist"),
        (f"{base}/c*.tar", r"c\*.tar does not exist"),
        (f"{base}/a-{{10..08}}.tar", "is empty. Write the smaller number first"),
        ("https://host/a.tar", "must be local files"),
        ("pipe:cat a.tar", "must be local files"),
    ):
        with pytest.raises(InputError, match=text):
            expand(bad)


def test_tars_that_cannot_be_read_at_random(tmp_path, shards):
    packed = _tar(tmp_path / "a.tar.gz", {"0.png": _png(_images(1)[0])}, "w:gz")
    with pytest.raises(InputError, match=r"a.tar.gz is not a tar file with random access"):
        TarSource(packed)
    data = (shards / "part-010.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(data[:700])
    with pytest.raises(InputError, match=r"cut.tar"):
        TarSource(tmp_path / "cut.tar")[0]
    (tmp_path / "afile").touch()
    with pytest.raises(InputError, match=r"cannot be written .*. Set another `cache`"):
        TarSource(shards / "part-010.tar", cache=tmp_path / "afile")
    with pytest.raises(OptionError, match=r"normalize must be one of .*, got 'bright'"):
        TarSource(shards / "part-010.tar", normalize="bright")


def test_recipes_with_tars(shards, tmp_path):
    source = from_config(
        [{"tar": f"{shards}/part-{{008..008}}.tar", "cache": str(tmp_path / "index"), "licence": "MIT"}]
    )
    assert (len(source), source.describe()["licence"]) == (3, "MIT")
