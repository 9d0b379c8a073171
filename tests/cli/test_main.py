import inspect
import json
import os
import re
import subprocess
import sys
import types
import warnings
from typing import Literal

import numpy as np
import pytest
import yaml
from PIL import Image

import vispe
from tests.cases import cases
from vispe.cli import arguments
from vispe.cli import main as frame
from vispe.cli.command_parser import command_help, read_docstring
from vispe.cli.main import COMMANDS, MODULES, load_command, main
from vispe.cli.shared_options import SHARED
from vispe.errors import InputError, MissingExtra
from vispe.multimodal import create_scheme, list_schemes

EXCEPTIONS = {
    "numpy": MemoryError("Unable to allocate 8.00 GiB for an array"),
    "python": MemoryError(),
    "torch": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    "other": RuntimeError("a bug"),
}


def toy(
    images: list[str],
    out: str,
    labels: str | None = None,
    cluster: int | None = None,
    kind: Literal["forest", "logistic"] = "forest",
    filters: bool = True,
    scales: list[float] | None = None,
    class_names: list[str] | None = None,
    force: bool = False,
) -> int | None:
    """Do what a test wants, 100 % of it.

    A second paragraph.

    Args:
        images: what to read,
            over two lines: yes.
        out: where to write.

    Examples:
        vispe toy a.png -o out
    """
    non_default = {k: v for k, v in locals().items() if v != inspect.signature(toy).parameters[k].default}
    if labels == "raise":
        raise InputError("toy needs labels=other, got labels=raise; choose another.")
    if labels == "parameters":
        raise InputError("toy: `class_names` needs `images`, got `colour`. Omit `force`.")
    if labels == "crash":
        raise ZeroDivisionError("a bug")
    if labels in EXCEPTIONS:
        raise EXCEPTIONS[labels]
    if labels == "interrupt":
        raise KeyboardInterrupt
    if labels == "file":
        open("/nonexistent/folder/file")  # noqa: SIM115, PTH123  the error is what is tested
    if labels == "package":
        import a_package_that_does_not_exist  # noqa: F401
    if labels == "warn":
        warnings.warn("a thing was\nnoticed", stacklevel=1)
    sys.stdout.write(json.dumps(non_default) + "\n")
    return 7 if labels == "seven" else None


@pytest.fixture(autouse=True)
def _toy_command(monkeypatch):
    module = types.ModuleType("vispe.cli.commands.toy")
    module.toy, module.POSITIONALS, module.SHORT = toy, ("images",), {"out": "-o"}
    monkeypatch.setitem(sys.modules, "vispe.cli.commands.toy", module)
    monkeypatch.setitem(MODULES, "toy", "vispe.cli.commands.toy")
    monkeypatch.setitem(COMMANDS, "toy", "Do what a test wants, 100 % of it.")


def run_toy(capsys, *words):
    assert main(["toy", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def failed(capsys, *words, code=2):
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("vispe: ")
    assert "Traceback" not in err
    return err.removeprefix("vispe: ").rstrip()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a.png -o out", {"images": ["a.png"], "out": "out"}),
        (
            "a.png b.png --labels s.png --out out",
            {"images": ["a.png", "b.png"], "out": "out", "labels": "s.png"},
        ),
        (
            "--labels s.png -o out a.png b.png",
            {"images": ["a.png", "b.png"], "out": "out", "labels": "s.png"},
        ),
        ("a -o o --force --no-filters", {"images": ["a"], "out": "o", "force": True, "filters": False}),
        ("a -o o --filters --cluster 3", {"images": ["a"], "out": "o", "cluster": 3}),
        ("a -o o --scales 1,2.5,4", {"images": ["a"], "out": "o", "scales": [1, 2.5, 4]}),
        ("a -o o --scales=2", {"images": ["a"], "out": "o", "scales": [2]}),
        ("a -o o --scales [1,2]", {"images": ["a"], "out": "o", "scales": [1, 2]}),
        ("a -o o --class-names x,1,yes", {"images": ["a"], "out": "o", "class_names": ["x", "1", "yes"]}),
        ("12 -o 1e3 --labels null.png", {"images": ["12"], "out": "1e3", "labels": "null.png"}),
        ("a -o o --kind logistic", {"images": ["a"], "out": "o", "kind": "logistic"}),
    ],
)
def test_the_command_line_sets_the_arguments(capsys, words, expected):
    assert run_toy(capsys, *words.split()) == expected


def test_values_with_spaces_and_commas_are_not_split(capsys):
    assert run_toy(capsys, "my image, 1.png", "-o", "a folder") == {
        "images": ["my image, 1.png"],
        "out": "a folder",
    }


def test_the_command_line_overrides_the_config_file(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("images: [a.png]\nout: there\nscales: [1, 2]\nclass_names: [x, y]\nfilters: false\n")
    expected = {
        "images": ["a.png"],
        "out": "there",
        "scales": [1, 2],
        "class_names": ["x", "y"],
        "filters": False,
    }
    assert run_toy(capsys, "--config", str(path)) == expected
    overridden = run_toy(capsys, "--config", str(path), "b.png", "--filters", "--scales", "4")
    del expected["filters"]
    assert overridden == expected | {"images": ["b.png"], "scales": [4]}


def test_optional_positional_arguments_of_a_config_file_are_used(tmp_path, capsys):
    path = tmp_path / "c.yaml"
    words = ["--config", str(path)]
    for command, key, value, default in (
        ("probe", "images", ["a.png"], ["m"]), ("list", "filter", "alibi*", []), ("cite", "names", ["rpb"], []),
        ("info", "name", "rpb", []), ("doctor", "model", "m", []),
    ):  # fmt: skip
        path.write_text(f"{key}: {json.dumps(value)}\n")
        for order in ([*words, *default], [*default, *words]):
            assert frame.parse(command, order)[1][key] == value
        assert main([command, *words, *default, "--print_config"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)[key] == value
    path.write_text("images: [a.png]\n")
    assert frame.parse("probe", [*words, "m", "b.png"])[1]["images"] == ["b.png"]
    assert frame.parse("probe", ["m"])[1]["images"] in (None, [])
    for line, error in (
        (
            "images: a.png",
            "images must be a list of strings, such as [a, b], got 'a.png' in the config file.",
        ),
        ("images: [3]", "images must be a list of strings, such as [a, b], got [3] in the config file."),
        ("model: [m]", "model must be a string, got ['m'] in the config file."),
        ("force: 'no'", "--force must be true or false, got 'no' in the config file."),
    ):
        path.write_text(f"{line}\n")
        assert failed(capsys, "probe", *words, "m") == f"probe: {error}"


def test_printed_config_round_trip(capsys, tmp_path):
    assert main(["toy", "a.png", "-o", "out", "--scales", "1,2", "--print_config"]) == 0
    path = tmp_path / "c.yaml"
    path.write_text(capsys.readouterr().out)
    assert run_toy(capsys, "--config", str(path)) == {"images": ["a.png"], "out": "out", "scales": [1, 2]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a -o o --lables s", "toy has no option '--lables'. Did you mean '--labels'"),
        ("a -o o --no-filter", "toy has no option '--no-filter'. Did you mean '--no-filters'"),
        ("a -o o --lab s", "toy has no option '--lab'"),
        ("a", "toy: missing required argument --out."),
        ("-o o", "toy: missing required argument IMAGES."),
        ("a -o", "toy: argument -o/--out: expected one argument."),
        (
            "a -o o b",
            "toy: unexpected argument 'b'. Write all positional arguments next to each other.",
        ),
        ("a -o o --cluster x", "toy: --cluster must be an integer, got 'x'."),
        ("a -o o --kind forrest", "toy: --kind must be 'forest' or 'logistic', got 'forrest'."),
        ("a -o o --scales 1,x", "toy: --scales must be a number, got "),
    ],
)
def test_invalid_arguments_raise_a_one_line_error(capsys, words, message):
    error = failed(capsys, "toy", *words.split())
    assert error.startswith(message)
    assert error.endswith("See vispe toy --help.")


def test_invalid_config_files_raise_a_one_line_error(capsys, tmp_path):
    assert "nope.yaml' does not exist." in failed(capsys, "toy", "--config", "nope.yaml")
    path = tmp_path / "c.yaml"
    path.write_text("images: [a]\nouts: there\n")
    assert "unknown key 'outs' in the config file. Did you mean 'out'" in failed(
        capsys, "toy", "--config", str(path)
    )
    path.write_text("images: [a\n")
    failed(capsys, "toy", "--config", str(path))
    for text, kind in (("", "nothing"), ("[1]\n", "a sequence")):
        path.write_text(text)
        error = failed(capsys, "toy", "--config", str(path))
        assert error == f"{path} must contain options, such as `seed: 1`, got {kind}."
    assert f"--config must be a file, got '{tmp_path}'" in failed(capsys, "toy", "--config", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stages [{img_size:x}]", "--stages: img_size must be an integer, got 'x'"),
        ("--stages [{img_size:64,steps:1.5}]", "--stages: steps must be an integer, got '1.5'"),
        ("--stages [{steps:3}]", "--stages needs the key img_size"),
        ("--stages 3", "--stages must be a list of mappings, such as '[{key: value}]', got '3'"),
        ("--student 3", "--student must be a mapping, such as '{key: value}', got '3'"),
        ("--student {rank:x}", "--student.rank must be an integer, got 'x'"),
        ("--teacher.img_size a", "--teacher.img_size must be an integer, got 'a'"),
        ("--student.symmetric 7", "--student.symmetric must be true or false, got '7'"),
    ],
)
def test_errors_in_groups_name_the_key(capsys, words, message):
    words = [word.replace(":", ": ") for word in words.split()]
    stages = [] if "--stages" in words else ["--stages", "[{img_size: 64, steps: 3}]"]
    teacher = ["--teacher.name", "test_vit"]
    error = failed(capsys, "retrofit", *teacher, *stages, "--data", "[{synthetic: 3}]", *words, "-o", "o")
    assert error == f"retrofit: {message}. See vispe retrofit --help."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rotate test_vit --textures 1 --crop 0", "--crop needs an integer above 0, got --crop 0"),
        ("rotate test_vit --textures 1 --batch-size 0", "--batch-size needs an integer above 0"),
        ("rotate test_vit --textures 1 --clusters 1", "--clusters needs an integer of 2 or more"),
        ("rotate test_vit --textures 1 --budget 0", "--budget needs an integer above 0"),
        (
            "rotate test_vit --textures 1 --seed -1",
            "--seed needs an integer from 0 to 4294967295, got --seed -1",
        ),
        ("rotate test_vit --textures 1 --img-size 0", "--img-size needs an integer above 0"),
        ("rotate test_vit --textures 1 --zero ignore", "--zero ignore has no effect without --masks"),
        ("rotate test_vit a.png --classes a,b", "--classes has no effect without --masks"),
        ("rotate test_vit a.png --masks a.png --metrics d4", "--masks has no effect on --metrics d4."),
        (
            "rotate test_vit a.png --clusters 4 --metrics d4,lie",
            "--clusters has no effect on --metrics d4,lie.",
        ),
        ("rotate test_vit a.png --angles 10 --metrics d4", "--angles has no effect on --metrics d4."),
        ("rotate test_vit a.png --budget 7 --metrics d4", "--budget has no effect on --metrics d4."),
        (f"probe test_vit --noise 1 --seed {1 << 32}", "--seed needs an integer from 0 to 4294967295, got"),
        (f"health test_vit --noise 1 --seed {1 << 70}", "--seed needs an integer from 0 to 4294967295, got"),
        ("audit test_vit --noise -1 --textures 1", "--noise needs an integer of 0 or more"),
        ("audit test_vit --noise 1 --seed -1", "--seed needs an integer from 0 to 4294967295, got --seed -1"),
        ("probe test_vit a.png --noise -1", "--noise needs an integer of 0 or more"),
        ("probe test_vit a.png --textures -1", "--textures needs an integer of 0 or more"),
        (
            "probe test_vit a.png --regressor linear --alpha 2",
            "--alpha 2 has no effect on --regressor linear",
        ),
        ("health test_vit a.png --noise -1", "--noise needs an integer of 0 or more"),
        ("debias test_vit a.png --method rasa --noise -1 -o o", "--noise needs an integer of 0 or more"),
        ("plot alibi2d -o o.png --layer -1", "layer must be 0 or more, got -1"),
        ("list --ndim 0", "no name matches '*'"),
    ],
)
def test_numbers_out_of_range_and_options_without_effect_raise(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.arange(64 * 64).reshape(64, 64).astype(np.uint8)).save("a.png")
    random = [] if words.startswith(("plot", "list")) else ["--weights", "random"]
    assert main([*words.split(), *random]) in (1, 2)
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    "words", ["rotate test_vit --textures 1 -o", "plot alibi2d -o", "probe test_vit --pos-embed"]
)
def test_empty_text_raises(capsys, words):
    command, option = words.split()[0], "--out" if words.endswith("-o") else "--pos-embed"
    expected = f"{command}: {option} must not be empty, got ''. Check that shell variables are set."
    assert failed(capsys, *words.split(), "") == expected


def test_unknown_command_suggests_the_right_one(capsys):
    error = failed(capsys, "segmnt", "a.png")
    assert error.startswith(
        "unknown command 'segmnt'. Did you mean 'segment'? Available commands: list, info,"
    )
    assert "missing command before --lables" in failed(capsys, "--lables")


def test_user_errors_are_one_line_and_tracebacks_with_debug(capsys):
    error = failed(capsys, "toy", "a", "-o", "o", "--labels", "raise")
    assert error == "toy needs labels=other, got labels=raise; choose another."
    for words in (["--debug", "toy"], ["toy", "--debug"]):
        with pytest.raises(InputError, match="got labels=raise"):
            main([*words, "a", "-o", "o", "--labels", "raise"])


def test_parameters_in_messages_are_printed_as_options(capsys):
    error = failed(capsys, "toy", "a", "-o", "o", "--labels", "parameters")
    assert error == "toy: --class-names needs IMAGES, got `colour`. Omit --force."
    with pytest.raises(InputError, match="`class_names` needs `images`"):
        main(["--debug", "toy", "a", "-o", "o", "--labels", "parameters"])
    shown = frame._format_warning(
        "`class_names` is ignored", UserWarning, frame.__file__, 1, words=["toy", "a"]
    )
    assert shown == "vispe: warning: --class-names is ignored\n"
    assert frame._name_options("`class_names`", ["no_such_command"]) == "`class_names`"


def test_missing_files_and_packages_are_user_errors(capsys):
    words = ("toy", "a", "-o", "o", "--labels")
    assert failed(capsys, *words, "file") == "/nonexistent/folder/file: No such file or directory."
    error = failed(capsys, *words, "package")
    assert "missing package 'a_package_that_does_not_exist'" in error
    assert "pip install 'vispe[cli]'" in error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("numpy", "Unable to allocate 8.00 GiB for an array"),
        ("python", "unknown size"),
        ("torch", "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    ],
)
def test_out_of_memory_is_a_one_line_error(capsys, kind, message):
    error = failed(capsys, "toy", "a", "-o", "o", "--labels", kind)
    assert error == f"out of memory ({message}). Use fewer or smaller files, or close other programs."
    with pytest.raises(type(EXCEPTIONS[kind])):
        main(["--debug", "toy", "a", "-o", "o", "--labels", kind])


@pytest.mark.parametrize(("kind", "error"), [("crash", ZeroDivisionError), ("other", RuntimeError)])
def test_internal_errors_are_not_user_errors(kind, error):
    with pytest.raises(error):
        main(["toy", "a", "-o", "o", "--labels", kind])


def test_ctrl_c_ends_with_130_and_one_line(capsys):
    assert "Ctrl-C" in failed(capsys, "toy", "a", "-o", "o", "--labels", "interrupt", code=130)


def test_exit_code_of_the_command_is_passed_on(capsys):
    assert main(["toy", "a", "-o", "o", "--labels", "seven"]) == 7


def test_warnings_of_vispe_are_one_line(capsys, monkeypatch):
    formatted = frame._format_warning(UserWarning("two\nlines"), UserWarning, frame.__file__, 1)
    assert formatted == "vispe: warning: two lines\n"
    assert "UserWarning" in frame._format_warning(UserWarning("x"), UserWarning, "/elsewhere.py", 1)
    formatwarning = warnings.formatwarning
    with pytest.warns(UserWarning, match="noticed"):
        main(["toy", "a", "-o", "o", "--labels", "warn"])
    assert warnings.formatwarning is formatwarning


def test_missing_parser_package_is_named(capsys, monkeypatch):
    def absent(module, extra, purpose):
        raise MissingExtra(f"{purpose} needs the package {module!r}, which is not installed; vispe[{extra}]")

    monkeypatch.setattr(arguments, "require", absent)
    assert failed(capsys, "toy", "a").startswith("the command `vispe toy` needs the package 'jsonargparse'")


def test_help_shows_text_arguments_and_examples(capsys):
    assert main(["toy", "--help"]) == 0
    out = capsys.readouterr().out
    assert "Do what a test wants, 100 % of it.\n\nA second paragraph." in out
    assert "what to read, over two lines: yes." in " ".join(out.split())
    assert "-o OUT, --out OUT" in out
    assert "--debug" in out
    assert out.rstrip().endswith("examples:\n    vispe toy a.png -o out")


def test_docstrings_are_split_into_text_arguments_and_examples():
    text, helps, examples = read_docstring(inspect.getdoc(toy))
    assert text == "Do what a test wants, 100 % of it.\n\nA second paragraph."
    assert helps == {"images": "what to read, over two lines: yes.", "out": "where to write."}
    assert examples == "    vispe toy a.png -o out"
    assert read_docstring("") == ("", {}, "")


def test_overview_lists_every_command_and_version(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out and line in out for name, line in COMMANDS.items())
    assert main([]) == 2
    capsys.readouterr()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vispe {vispe.__version__}\n"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "toy"])
def test_every_command_has_complete_documentation(name, capsys):
    function, positionals, short = load_command(name)
    parameters = inspect.signature(function).parameters
    text, helps, examples = command_help(function)
    assert text.splitlines()[0] == COMMANDS[name]
    assert set(helps) == set(parameters)
    assert examples.strip().startswith(f"vispe {name}")
    assert set(positionals) | set(short) <= set(parameters)
    assert "json" in parameters
    assert main([name, "--help"]) == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_at_most_30_options_and_help_all_lists_all(name, capsys):
    def options(word):
        assert main([name, word]) == 0
        out = capsys.readouterr().out
        return set(re.findall(r"^  (?:-\w(?: \w+)?, )?(--[\w-]+)", out, re.MULTILINE)), out

    function, positionals, _ = load_command(name)
    flags = {f"--{key.strip('_').replace('_', '-')}" for key in inspect.signature(function).parameters}
    flags -= {f"--{key.replace('_', '-')}" for key in positionals}
    advanced = getattr(inspect.getmodule(function), "ADVANCED", ())
    help_flags, text = options("--help")
    assert len(help_flags | {"--help"}) <= 30
    assert flags - help_flags == {f"--{key.replace('_', '-')}" for key in advanced}
    assert ("--help-all also shows" in text) is bool(advanced)
    assert flags <= options("--help-all")[0]


PROGRAM = """
import json, os, sys, vispe
os.chdir(sys.argv[1])
before = set(sys.modules)
from vispe.cli.main import main
def report(value): print(json.dumps(value), file=sys.stderr)
def imported(*names): return sorted(set(names) & set(sys.modules))
report([main(['--help']), main(['--version'])])
new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
report(sorted(new - {'vispe'}))
report(main(['probe', '--help']))
models = ['timm', 'torchvision', 'torch._dynamo', 'torch._inductor', 'sympy', 'transformers', 'open_clip']
report(imported(*models, 'sklearn', 'skimage', 'scipy', 'matplotlib', 'tifffile', 'skops', 'rich'))
report(sorted(name for name in sys.modules if name.startswith('vispe.cli.')))
import vispe.segment
report(imported('scipy', 'sklearn', 'skimage', 'zarr'))
words = '--labels scribbles.png --features filters --classifier logistic -o'.split()
report(main(['segment', 'none.png', *words, 'out']))
report(imported(*models, 'sklearn', 'skops', 'matplotlib'))
report(main(['segment', 'page.png', *words, 'out']))
report(main(['apply', 'out/model.vispe', 'page.png', '-o', 'again']))
report(imported(*models, 'huggingface_hub'))
"""


def test_commands_import_lazily_and_ignore_closed_output_pipes(tmp_path):
    """Both in one interpreter, which takes seconds to start; `tests/cli/test_pipes.py` tests closed pipes alone."""
    page = np.random.default_rng(0).integers(0, 90, (66, 130), np.uint8)
    page[:, 24:] += 120
    scribbles = np.zeros_like(page)
    for top in (5, 20):  # two scribbles of each class, so that there are no notes
        scribbles[top : top + 4, 3:20], scribbles[top : top + 4, 28:44] = 1, 2
    Image.fromarray(page).save(tmp_path / "page.png")
    Image.fromarray(scribbles).save(tmp_path / "scribbles.png")
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        stdout=subprocess.PIPE if os.name == "nt" else writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    lines = process.stderr.splitlines()
    assert "none.png" in lines.pop(6)
    cli_modules = ["vispe.cli.arguments", "vispe.cli.argv", "vispe.cli.command_parser"]
    cli_modules += [
        "vispe.cli.commands",
        "vispe.cli.commands.evaluation",
        "vispe.cli.commands.evaluation.probe",
        "vispe.cli.main",
        "vispe.cli.messages",
        "vispe.cli.shared_options",
    ]
    expected = [[0, 0], [], 0, [], [*cli_modules, "vispe.cli.terminal"], [], 2, [], 0, 0, []]
    assert [json.loads(line) for line in lines] == expected
    assert process.returncode == 0
    first, second = (tmp_path / name / "page_seg.png" for name in ("out", "again"))
    assert second.read_bytes() == first.read_bytes()


def test_list_and_info_and_cite(capsys):
    assert main(["list", "alibi2d.*", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == vispe.list_encodings("alibi2d.*")
    assert main(["list", "--kind", "bias", "--exclude", "alibi2d*"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("alibi ")
    assert "alibi2d" not in out
    assert main(["info", "alibi2d.geometric", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["options"]["slopes"] == "geometric"
    assert info["presets"] == {"geometric": {"slopes": "geometric"}}
    assert main(["info", "sincos2d"]) == 0
    assert "additive" in capsys.readouterr().out
    assert "Did you mean 'alibi2d'" in failed(capsys, "info", "alibi2")
    assert main(["cite", "alibi2d"]) == 0
    out = capsys.readouterr().out
    assert "arxiv.org/abs/2603.16840" in out
    assert f"version = {{{vispe.__version__}}}" in out


def test_list_without_a_match_exits_with_1(capsys):
    assert main(["list", "alibi3"]) == 1
    text = "vispe: list: no name matches 'alibi3' and the options. Did you mean 'alibi3d' or 'alibi'"
    output = capsys.readouterr()
    assert output.err.startswith(text)
    assert not output.out
    assert main(["list", "--kind", "scheme", "--exclude", "*", "--json"]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("[]\n", "vispe: list: no name matches '*' and the options.\n")


def test_info_of_an_alias(capsys):
    assert main(["info", "bapa", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["name"], info["options"]) == ("mousi", {"share": "all"})
    assert main(["cite", "bapa"]) == 0
    assert "2509.21984" in capsys.readouterr().out


def test_list_and_info_and_cite_of_position_schemes(capsys):
    assert main(["list", "--kind", "scheme", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list_schemes()
    assert main(["list", "*", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in entries] == [*vispe.list_encodings("*"), *list_schemes()]
    assert {*entries[0]} <= {*entries[-1]}
    assert main(["list"]) == 0
    assert "\n\nposition schemes" in capsys.readouterr().out
    for words in (["--kind", "bias"], ["--ndim", "2"], ["alibi*"]):
        assert main(["list", *words]) == 0
        assert "position schemes" not in capsys.readouterr().out
    assert "--ndim selects encodings" in failed(capsys, "list", "--kind", "scheme", "--ndim", "2")
    for name in list_schemes():
        assert main(["info", name, "--json"]) == 0
        info = json.loads(capsys.readouterr().out)
        assert (info["name"], info["axes"]) == (name, create_scheme(name).axes)
        assert main(["info", name]) == 0
        assert info["summary"] in (text := capsys.readouterr().out)
        assert "qwen2_5_vl" in text
        assert main(["cite", name]) == 0
        assert info["paper"] in capsys.readouterr().out
    assert main(["cite", "vrope", "alibi2d", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert "2502.11664" in output["schemes"]["vrope"]["paper"]
    assert output["encodings"]["alibi2d"]["year"] == 2026


@pytest.mark.parametrize(
    ("spelled", "right"),
    [("mrope-i", "mrope_i"), ("VRoPE", "vrope"), ("alibi-2d", "alibi2d"), ("v2pee", "v2pe")],
)
@pytest.mark.parametrize("command", ["info", "cite"])
def test_misspelled_encodings_and_schemes_are_suggested(capsys, command, spelled, right):
    assert f"Did you mean '{right}'" in failed(capsys, command, spelled)


def test_info_of_an_unknown_preset_raises(capsys):
    assert "alibi2d.geometrc" in failed(capsys, "info", "alibi2d.geometrc")


def test_plot_does_not_overwrite_its_figure(capsys, tmp_path):
    path = tmp_path / "bias.png"
    words = ["plot", "alibi2d.geometric", "--grid", "5x7", "--query", "1,2", "-o", str(path)]
    assert main(words) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{path}\n"
    assert "add --force to overwrite it" in failed(capsys, *words)
    assert main([*words, "--force"]) == 0
    capsys.readouterr()
    assert "such as 14x20, got '5'" in failed(capsys, *words, "--force", "--grid", "5")
    assert "a row and a column" in failed(capsys, *words, "--force", "--query", "1,2,3")
    assert "query must be in rows 0 to 4 and columns 0 to 6, got (5, 2)" in failed(
        capsys, *words, "--force", "--query", "5,2"
    )
    assert "unsupported figure format" in failed(capsys, *words[:-1], str(tmp_path / "bias.xyz"))
    assert [p.name for p in tmp_path.iterdir()] == ["bias.png"]


def test_doctor_reports_the_installation(capsys, monkeypatch):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["vispe"] == vispe.__version__
    assert set(report["attention"]) == set(vispe.list_encodings(kind="bias"))
    assert report["attention"]["alibi2d"].startswith("sdpa: ")
    assert report["extras"]["cli"] == "complete"
    assert "cpu" in report["devices"]
    # takes seconds
    monkeypatch.setattr("vispe.cli.installation.bias_backends", lambda: report["attention"])
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(
        title in out for title in ("versions", "devices", "attention backend", "weights on disk", "extras")
    )


def test_help_texts_are_not_repeated_across_commands():
    texts = {}
    for name in COMMANDS:
        function, _, _ = load_command(name)
        _, helps, _ = read_docstring(inspect.getdoc(function))
        for key, text in helps.items():
            texts.setdefault((key, text), []).append(name)
            assert SHARED.get(key) != text, f"{name}: {key} is described in shared_options.py"
    repeated = {key: commands for key, commands in texts.items() if len(commands) > 1}
    # files that a command writes or reads, and resumed runs, are described by the command
    assert {key for key, _ in repeated} <= {"device", "force", "image", "out", "noise", "textures"}, repeated


def test_segment_help_lists_at_most_30_options(capsys):
    main(["segment", "--help"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  -")]
    assert len(lines) <= 30


@cases(
    ("message", "printed"),
    [
        (
            "none given. Pass labels=FILE, cluster=K or text=WORDS.",
            "Pass --labels FILE, --cluster K or --text WORDS.",
        ),
        ("3 were excluded. Use object_min_area=0 to include all.", "Use --object-min-area 0 to include all."),
        ("K = 3 chosen; use cluster=K for another number.", "use --cluster K for another number."),
        ("needs a grid. Use dim=3 or features=both.", "Use dim=3 or --features both."),
    ],
)
def test_suggestions_of_library_messages_name_options(message, printed):
    from vispe.cli.commands.segmentation.segment import segment
    from vispe.cli.messages import name_options

    assert name_options(message, segment, ("images",)).endswith(printed)
