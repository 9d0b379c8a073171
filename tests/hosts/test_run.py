"""`python -m vispe.run SCRIPT ARGS...`."""

import sys

import pytest

from vispe import run


def test_run_passes_arguments_and_folder_to_a_script(tmp_path, monkeypatch, capsys):
    (tmp_path / "neighbour.py").write_text("word = 'sibling'\n")
    script = tmp_path / "stock.py"
    script.write_text(
        "import argparse, sys\nfrom timm import create_model\nfrom timm.utils import ParseKwargs\n"
        "from neighbour import word\n"
        "p = argparse.ArgumentParser(); p.add_argument('--model-kwargs', nargs='*', action=ParseKwargs)\n"
        "p.add_argument('--flag', action='store_true')\n"
        "a = p.parse_args()\n"
        "if __name__ == '__main__':\n"
        "    m = create_model('vit_tiny_patch16_224', depth=1, **a.model_kwargs)\n"
        "    print(type(m).__name__, word, sys.argv[0], a.flag)\n"
        "    sys.exit(3)\n"
    )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["run", str(script), "--flag", "--model-kwargs", "pos_embed=alibi2d"])
    with pytest.raises(SystemExit) as stop:
        run.main()
    assert stop.value.code == 3
    assert capsys.readouterr().out.split() == ["VispeVisionTransformer", "sibling", str(script), "True"]
    monkeypatch.setattr(sys, "argv", ["run", str(script), "--help"])
    with pytest.raises(SystemExit):
        run.main()
    assert "--model-kwargs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["nowhere.py"], 2, "script nowhere.py does not exist"),
        ([], 2, "required: script"),
        (["-h"], 0, "SCRIPT"),
        (["-m"], 2, "required: script"),
        (["-m", "no_such_package.main"], 2, "module no_such_package.main does not exist or cannot be run"),
        (["-m", "vispe.hosts"], 2, "module vispe.hosts does not exist or cannot be run"),
        (["-m", "../file.py"], 2, "module ../file.py does not exist or cannot be run"),
    ],
)
def test_error_messages_of_run(words, code, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", *words])
    with pytest.raises(SystemExit) as stop:
        run.main()
    captured = capsys.readouterr()
    assert stop.value.code == code
    assert text in captured.out.upper() + captured.err


@pytest.mark.parametrize("module", ["stock_package.main", "stock_package"])
def test_run_passes_arguments_to_a_module(module, tmp_path, monkeypatch, capsys):
    package = tmp_path / "stock_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sibling.py").write_text("word = 'sibling'\n")
    code = (
        "import sys\nfrom timm import create_model\nfrom .sibling import word\n"
        "if __name__ == '__main__':\n"
        "    m = create_model('vit_tiny_patch16_224', depth=1, pos_embed='alibi2d')\n"
        "    print(type(m).__name__, word, *sys.argv)\n"
        "    sys.exit(3)\n"
    )
    for name in ("main.py", "__main__.py"):
        (package / name).write_text(code)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "argv", ["run", "-m", module, "-m", "--help", "--epochs=1"])
    with pytest.raises(SystemExit) as stop:
        run.main()
    assert stop.value.code == 3
    kind, word, program, *words = capsys.readouterr().out.split()
    assert (kind, word, words) == ("VispeVisionTransformer", "sibling", ["-m", "--help", "--epochs=1"])
    assert program == str(package / f"{'main' if 'main' in module else '__main__'}.py")
    for name in [name for name in sys.modules if name.startswith("stock_package")]:
        del sys.modules[name]
