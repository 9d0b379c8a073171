"""Shipped recipes load and match the defaults."""

from pathlib import Path

from tests.cases import cases
from vispe.cli.main import main

NEEDED = {"segment": ["image.png", "-o", "out"], "probe": ["vit_tiny_patch16_224"]}
CONFIGS = [Path(__file__).parents[2] / "configs" / f"{name}.yaml" for name in NEEDED]  # others: tests/train


@cases("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_recipes_load(path, capsys):
    assert main([path.stem, *NEEDED[path.stem], "--config", str(path), "--print_config"]) == 0
    printed = capsys.readouterr().out
    for line in path.read_text().splitlines():
        if line and not line.startswith(("#", "clip")):
            assert line in printed.splitlines()


def test_a_recipe_with_an_unknown_key_raises(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("classifer: forest\n")
    assert main(["segment", "image.png", "-o", "out", "--config", str(tmp_path / "a.yaml")]) == 2
    assert "classifer" in capsys.readouterr().err
