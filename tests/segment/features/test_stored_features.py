"""Stored model outputs: equal results in all commands; features of other images or options raise."""

import functools
import json
import pkgutil

import numpy as np
import pytest
import tifffile
from PIL import Image

from vispe.cli.main import main
from vispe.errors import InputError, OptionError
from vispe.segment.features import stored_features
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.live.paint.open_page import open_paint
from vispe.segment.pipeline import ReadOptions, segment, store_features

TIMM = FeatureConfig("tokens", model="vit_tiny_patch16_224", weights="random")


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        grey = rng.normal(90, 9, (100, 150))
        grey[:, 75:] += 60
        Image.fromarray(grey.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{name}.png")
    labels = np.zeros((100, 150), np.uint8)
    labels[10:20, 10:30], labels[10:20, 100:120] = 1, 2
    Image.fromarray(labels).save(tmp_path / "a_labels.png")
    return tmp_path


@pytest.fixture
def no_model(monkeypatch):
    """Let every call of a feature model fail."""

    def refuse(*_, **__):
        raise AssertionError("the model was run")

    monkeypatch.setattr("vispe.segment.features.micro_features.DenseModel.__call__", refuse)
    monkeypatch.setattr("vispe.segment.features.token_features.TokenModel.__call__", refuse)


def prob(folder, name="a"):
    return tifffile.imread(folder / f"{name}_prob.tif")


@pytest.mark.parametrize("config", [FeatureConfig("both", model="vispe_micro"), TIMM])
def test_segment_gives_equal_results_without_running_the_model(folder, config, request):
    options = {"labels": folder / "a_labels.png", "features": config}
    segment(folder / "a.png", folder / "out", **options)
    store_features(folder / "a.png", folder / "stored", features=config)
    request.getfixturevalue("no_model")
    segment(folder / "a.png", folder / "again", **options, stored_features=folder / "stored")
    assert np.array_equal(prob(folder / "out"), prob(folder / "again"))


def test_all_commands_read_stored_features(folder, request, capsys):
    a, b, stored = str(folder / "a.png"), str(folder / "b.png"), ["--stored-features", str(folder / "stored")]
    assert main(["features", a, b, "-o", stored[1], "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["images"][0]
    assert record["pages"] == 1
    assert record["files"] == [str(folder / "stored" / "a_features_0000.safetensors")]
    request.getfixturevalue("no_model")
    labels = ["--labels", str(folder / "a_labels.png")]
    assert main(["segment", a, *labels, "-o", str(folder / "out"), *stored]) == 0
    assert (
        main(["apply", str(folder / "out" / "model.vispe"), a, b, "-o", str(folder / "more"), *stored]) == 0
    )
    assert main(["suggest", a, *labels, "-o", str(folder / "next"), *stored]) == 0
    paint = open_paint(a, stored_features=stored[1])
    paint.live.draw(np.asarray(Image.open(folder / "a_labels.png")))
    paint.live.fit(preview=True)
    assert paint.live.predict().labels.shape == (100, 150)


@pytest.mark.slow
def test_several_painted_images_read_stored_features(folder, request):
    names = [str(folder / f"{name}.png") for name in ("a", "b")]
    scribbles = [
        {"class": k, "width": 3, "points": [[20 + 90 * (k - 1), 15], [40 + 90 * (k - 1), 15]]} for k in (1, 2)
    ]

    def paint_images(**options):
        paint = open_paint(names, folder / "painted", **options)
        for number in (0, 1):
            content = {"names": ["x", "y"], "image": number, "strokes": [scribbles[number]], "preview": True}
            response = paint.update(content)
        return response

    computed = paint_images()
    assert computed["ready"]
    store_features(names, folder / "stored")
    request.getfixturevalue("no_model")
    assert paint_images(stored_features=folder / "stored") == computed


@pytest.mark.slow
def test_each_page_of_a_stack_has_a_file(folder, request):
    pages = np.stack([np.asarray(Image.open(folder / "a.png"))] * 2)
    pages[1] //= 2
    tifffile.imwrite(folder / "z.tif", pages)
    labels = np.stack([np.asarray(Image.open(folder / "a_labels.png"))] * 2)
    tifffile.imwrite(folder / "z_labels.tif", labels)
    store_features(folder / "z.tif", folder / "stored")
    assert len(list((folder / "stored").iterdir())) == 2
    request.getfixturevalue("no_model")
    segment(
        folder / "z.tif", folder / "out", labels=folder / "z_labels.tif", stored_features=folder / "stored"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"reading": ReadOptions(crop="0:50,0:60")},
            "computed with crop=None, but this run has crop=0:50,0:60",
        ),
        (
            {"reading": ReadOptions(clip=(1.0, 99.0))},
            "computed with clip=0.5,99.5, but this run has clip=1.0,99.0",
        ),
        (
            {"features": FeatureConfig("both", model="vispe_micro", tile=64)},
            "tile=None, but this run has tile=64",
        ),
        ({"features": TIMM}, "computed with model=vispe_micro, but this run has model=vit_tiny"),
    ],
)
def test_features_of_other_options_raise(folder, change, words):
    store_features(folder / "a.png", folder / "stored")
    with pytest.raises(InputError, match=words):
        segment(
            folder / "a.png", folder / "out", labels=folder / "a_labels.png", stored_features=folder / "stored",
            **change,
        )  # fmt: skip
    assert not (folder / "out" / "model.vispe").exists()


def test_features_of_other_images_or_versions_and_damaged_files_raise(folder, monkeypatch):
    def run(image="a.png"):
        segment(
            folder / image, folder / "out", labels=folder / "a_labels.png", stored_features=folder / "stored"
        )

    with pytest.raises(InputError, match="is not a folder"):
        run()
    store_features(folder / "a.png", folder / "stored")
    with pytest.raises(InputError, match=r"has no features of b\.png"):
        run("b.png")
    with pytest.raises(InputError, match="exists"):
        store_features(folder / "a.png", folder / "stored")
    with monkeypatch.context() as patch:
        patch.setattr(stored_features, "__version__", "9.9")
        with pytest.raises(InputError, match=r"vispe=0\..*, but this run has vispe=9\.9"):
            run()
    original = (folder / "a.png").read_bytes()
    (folder / "a.png").write_bytes((folder / "b.png").read_bytes())
    with pytest.raises(InputError, match="features of another image"):
        run()
    (folder / "a.png").write_bytes(original)
    file = folder / "stored" / "a_features_0000.safetensors"
    content = file.read_bytes()
    invalid_contents = [
        content.replace(b'\\"%s\\"' % name, b'\\"x%s\\"' % name[1:])
        for name in (b"pages", b"page_sha256", b"model")
    ]
    for data in (b"", b"\xff" * 100, content[:200], *invalid_contents):
        file.write_bytes(data)
        with pytest.raises(InputError, match="Run vispe features again"):
            run()


@pytest.mark.parametrize("config", [FeatureConfig("both", model="vispe_micro"), TIMM])
def test_out_of_memory_raises_instead_of_storing_smaller_tiles(folder, monkeypatch, config):
    calls = []

    def fail_once(model, images, *args, call):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return call(model, images, *args)

    for name in ("micro_features.DenseModel", "token_features.TokenModel"):
        path = f"vispe.segment.features.{name}.__call__"
        monkeypatch.setattr(path, functools.partialmethod(fail_once, call=pkgutil.resolve_name(path)))
    with pytest.raises(InputError, match=r"out of memory .* on page 0 of .*a\.png\. Use a smaller tile"):
        store_features(folder / "a.png", folder / "stored", features=config)
    assert not list((folder / "stored").glob("*"))


def test_images_of_equal_name_raise_even_with_force(folder):
    (folder / "more").mkdir()
    Image.open(folder / "b.png").save(folder / "more" / "a.png")
    with pytest.raises(InputError, match="two outputs have the same name"):
        store_features([folder / "a.png", folder / "more" / "a.png"], folder / "stored", force=True)


def test_storing_features_without_a_model_raises(folder):
    filters = FeatureConfig("filters")
    with pytest.raises(OptionError, match="no model whose outputs could be stored"):
        store_features(folder / "a.png", folder / "stored", features=filters)
    with pytest.raises(OptionError, match="stored_features has no effect without a model"):
        segment(
            folder / "a.png", folder / "out", labels=folder / "a_labels.png", features=filters,
            stored_features=folder,
        )  # fmt: skip
