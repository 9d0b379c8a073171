"""Documentation site: a page and an image for every encoding, valid links, running code."""

import html
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

import vispe
from tests.cases import cases
from tests.products import slow_except
from vispe.cli.main import COMMANDS, load_command
from vispe.encodings.registry import encoding_class, parse_spec

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GUIDE = sorted(DOCS.rglob("*.md"))


def load(name, path):
    location = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(location)
    sys.modules[name] = module  # dataclasses look their module up
    location.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def generator():
    return load("docs_gen_pages", DOCS / "gen_pages.py")


@pytest.fixture(scope="module")
def site(generator):
    """Return the text of every page by its path, including generated pages."""
    return generator.pages() | {
        str(p.relative_to(DOCS)): generator.filled(p.read_text(), str(p.relative_to(DOCS))) for p in GUIDE
    }


def test_every_encoding_has_a_page(site):
    assert {p for p in site if p.startswith("encodings/")} == {
        "encodings/index.md",
        *(f"encodings/{name}.md" for name in vispe.list_encodings()),
    }


def test_the_index_has_a_card_per_encoding_and_no_button_is_empty(site):
    index = site["encodings/index.md"]
    cards = dict(re.findall(r'<a href="(\w+)/" data-facts="([^"]+)">', index))
    assert list(cards) == vispe.list_encodings()
    buttons = re.findall(r'type="checkbox" value="([^"]+)"', index)
    for button in buttons:
        matches = [name for name, facts in cards.items() if button in facts.split()]
        assert 0 < len(matches) < len(cards), button
    assert "axes-3" in cards["alibi3d"].split()
    assert "axes-3" not in cards["alibi2d"].split()


def test_the_command_reference_has_every_option(site):
    page = site["reference/commands.md"]
    sections = dict(re.findall(r"^## vispe (.+?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(COMMANDS)
    for name, section in sections.items():
        function, positionals, short = load_command(name)
        for key, parameter in inspect.signature(function).parameters.items():
            name_ = key if key in positionals else f"--{key.strip('_').replace('_', '-')}"
            (row,) = re.findall(rf"^\| (?:`-\w`, )?`{name_}` \| (.*) \|$", section, re.MULTILINE)
            assert row.rpartition("| ")[2].strip(), f"{name} {key} is not explained"
            assert ("required" in row) == (parameter.default is parameter.empty), (name, key)
            assert key not in short or f"`{short[key]}`, `{name_}`" in section


@cases("name", vispe.list_encodings())
def test_pages_contain_the_complete_docstring(site, generator, name):
    page, info = site[f"encodings/{name}.md"], vispe.encoding_info(name)
    doc = inspect.getdoc(encoding_class(name))
    for option in info.options:
        (row,) = re.findall(rf"^\| `{option}` \| `(.*)` \| (.*) \|$", page, re.MULTILINE)
        assert row[1], f"{option} is not explained"
    assert [p for p in info.presets if f"| `{name}.{p}` |" not in page] == []
    assert [f for f in generator.FACTS if f"{f}:" in doc and f"**{f}:**" not in page] == []
    assert info.summary in page.replace("\\", "")
    plain = {w for w in re.findall(r"[A-Za-z]{4,}", doc) if w != "Args"}
    assert plain - set(re.findall(r"[A-Za-z]{4,}", page)) == set()


FORMULAS = {name: latex for name in vispe.list_encodings() if (latex := encoding_class(name).formula)}


def test_every_formula_of_a_docstring_is_on_its_page(site, generator):
    # the docstring of target has a description instead of a formula
    with_formula = {
        n for n in vispe.list_encodings() if generator.sections(inspect.getdoc(encoding_class(n)))["maths"]
    }
    assert with_formula - set(FORMULAS) == {"target"}
    for name, latex in FORMULAS.items():
        printed = re.findall(r"^\$\$\n(.+)\n\$\$$", site[f"encodings/{name}.md"], re.MULTILINE)
        assert " \\\\ ".join(printed) == latex


def test_formulas_become_mathml(generator):
    pytest.importorskip("latex2mathml", reason="latex2mathml is not installed: pip install 'vispe[docs]'")
    from xml.etree import ElementTree

    from formulas import mathml

    for name, latex in FORMULAS.items():
        assert latex.count("{") == latex.count("}"), name
        for line in latex.split(r" \\ "):
            markup = mathml(f'<p>x</p><div class="arithmatex">\\[\n{html.escape(line)}\n\\]</div>')
            (formula,) = ElementTree.fromstring(f"<page>{markup}</page>").iter(
                "{http://www.w3.org/1998/Math/MathML}math"
            )
            assert formula.get("display") == "block"
            assert "\\" not in "".join(formula.itertext()), f"{name}: a command of LaTeX is not known"
    assert mathml(r"<p>a <code>\(x\)</code></p>") == r"<p>a <code>\(x\)</code></p>"


@cases("name", vispe.list_encodings())
def test_images_exist_and_are_small(name):
    path = DOCS / "gallery" / f"{name}.png"
    assert path.exists(), f"run python eval/gallery.py {name}"
    assert 5_000 < path.stat().st_size < 60_000
    with Image.open(path) as image:
        assert image.size == (960, 350)


@cases("path", sorted((DOCS / "figures").glob("*.svg")), ids=lambda p: p.stem)
def test_animations_are_small_valid_and_respect_reduced_motion(path):
    from xml.etree import ElementTree

    text = path.read_text()
    assert len(text) < 300_000
    drawing = ElementTree.fromstring(text)
    assert drawing.findtext("{http://www.w3.org/2000/svg}title")
    assert "script" not in text
    assert "prefers-reduced-motion:reduce" in text
    assert set(re.findall(r'href="(.{10})', text)) <= {"data:image"}
    frames = re.findall(r'class="f( k)?"', text)
    assert frames.count(" k") == (1 if frames else 0)
    (rule,) = re.findall(r"@media\(prefers-reduced-motion:reduce\)\{(.*?)\}\}?<?", text)
    assert "animation:none" in rule


def test_the_gallery_has_no_images_of_removed_encodings():
    assert {p.stem for p in (DOCS / "gallery").iterdir()} == set(vispe.list_encodings())


def test_gallery_figures_are_png():
    gallery = load("eval_gallery", ROOT / "eval" / "gallery.py")
    assert gallery.figure_png("sincos2d")[:4] == b"\x89PNG"


def test_links_resolve_to_pages(site):
    for path, text in site.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            if target.startswith(("http", "#")):
                continue
            resolved = (DOCS / path).parent.joinpath(target.partition("#")[0]).resolve().relative_to(DOCS)
            assert str(resolved) in site or (DOCS / resolved).is_file(), f"{path} links to {target}"


def test_navigation_lists_every_page(site):
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert set(listed) - set(site) == set()
    assert {str(p.relative_to(DOCS)) for p in GUIDE} - set(listed) == set()


def test_names_of_encodings_exist():
    known = set(vispe.list_encodings())
    for path in GUIDE:
        for spec in re.findall(r"`((?:\w+\+)*(\w+)(?:\.\w+)?(?:\([\w=,]+\))?)`", path.read_text()):
            terms = [t for t in spec[0].split("+") if t != "learn"]
            if terms and {re.split(r"[.(]", t)[0] for t in terms} <= known:
                assert parse_spec("+".join(terms)), spec[0]


# creates models of 90 to 150 million parameters, and compiles
LONG = {"models/hosts.md", "explanation/attention.md"}


# documented in the guide
@pytest.mark.filterwarnings("ignore:.* is saved with .* load it with vispe.from_pretrained")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft
@pytest.mark.parametrize(
    "path",
    slow_except(GUIDE, [p for p in GUIDE if "/".join(p.parts[-2:]) not in LONG]),
    ids=lambda p: p.stem,
)
def test_code_blocks_run(path, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from vispe.encodings.registry import _REGISTRY

    registry, namespace = dict(_REGISTRY), {"__name__": "guide"}
    monkeypatch.chdir(tmp_path)
    try:
        for code in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            exec(compile(code, path.name, "exec"), namespace)
    finally:
        _REGISTRY.clear()
        _REGISTRY.update(registry)


def test_commands_exist():
    for path in GUIDE:
        for command in re.findall(r"`vispe ([\w-]+)|^vispe ([\w-]+)", path.read_text(), re.MULTILINE):
            assert "".join(command) in COMMANDS, path.name


def test_the_entry_point_example_is_valid_toml():
    (text,) = re.findall(
        r"```toml\n(.*?)```", (DOCS / "how-to/models/own-encoding.md").read_text(), re.DOTALL
    )
    assert tomllib.loads(text)["project"]["entry-points"]["vispe.encodings"]


def test_every_golden_case_has_a_status():
    cases = json.loads((ROOT / "eval" / "results" / "golden.json").read_text())
    here = ROOT / "tests" / "golden"
    adapters = {p.stem for p in (here / "adapters").glob("*.py")}
    expected = {p.stem for p in (here / "vectors").glob("*.npz") if p.stem.partition("__")[0] in adapters}
    assert set(cases) == expected, "run python eval/golden.py"
    assert {c["status"] for c in cases.values()} == {"PASS"}
    assert {e for c in cases.values() for e in c["encodings"]} <= set(vispe.list_encodings())


@pytest.fixture(scope="module")
def contracts():
    return load("transformers_contracts", ROOT / "eval" / "transformers_contracts.py")


def test_transformers_contracts_have_reasons_and_current_tables(contracts):
    version = json.loads(contracts.OUT.read_text())["versions"]["transformers"]
    rows = contracts.read(contracts.OUT, version)
    changes = [group for row in rows.values() for group in row.get("differences", [])]
    assert changes
    assert [group["tests"] for group in changes if not group["reason"]] == []
    for page, families in (
        ("reference/transformers-tests", contracts.LANGUAGE),
        ("how-to/models/transformers", contracts.VISION),
    ):
        family_rows = {key: row for key, row in rows.items() if key[0] in families}
        assert contracts.table(family_rows) in (DOCS / f"{page}.md").read_text()


def test_contract_files_with_another_transformers_version_raise(contracts, tmp_path):
    path = tmp_path / "rows.json"
    assert contracts.read(path, "5.24.0") == {}
    row = {"family": "vit", "scheme": "stock", "counts": {"passed": 1}}
    contracts.write(path, {"transformers": "5.23.0"}, {("vit", "stock"): row})
    assert contracts.read(path, "5.23.0") == {("vit", "stock"): row}
    with pytest.raises(
        SystemExit, match=r"rows are of transformers 5\.23\.0.* installed version is 5\.24\.0"
    ):
        contracts.read(path, "5.24.0")


def test_the_extrapolation_table_averages_seeds(generator, tmp_path):
    path = tmp_path / "extrapolation.json"
    assert "python eval/extrapolation.py" in generator.extrapolation_table(path)
    rows = [
        {"encoding": name, "seed": seed, "accuracy": {"1x": {"near": a}, "2x": {"near": a / 2}}}
        for name, seed, a in (("low", 0, 0.2), ("low", 1, 0.4), ("high", 0, 0.8))
    ]
    path.write_text(json.dumps({"shapes": {"1x": [6, 6], "2x": [12, 12]}, "rows": rows}))
    missing, _, *lines = generator.extrapolation_table(path).splitlines()
    assert missing.startswith("Not run yet: `alibi2d`, ")
    assert lines == [
        "Question: near.",
        "",
        "| encoding | 1x (6x6) | 2x (12x12) |",
        "|---|---|---|",
        "| `high` (1 of 2 seeds) | 0.800 | 0.400 |",
        "| `low` | 0.300 | 0.150 |",
    ]


def test_the_comparison_has_a_row_for_every_2d_encoding(generator, tmp_path):
    rows = [
        {"encoding": "alibi2d", "accuracy": {"1x": {"distance": 1.0, "direction": 1.0}, **unseen}}
        for unseen in (
            {"2x": {"distance": 0.2, "direction": 0.3}, "3x": {"distance": 0.4, "direction": 0.3}},
            {"2x": {"distance": 0.6, "direction": 0.5}, "3x": {"distance": 0.8, "direction": 0.5}},
        )
    ]
    (tmp_path / "extrapolation.json").write_text(json.dumps({"rows": rows}))
    cells = [
        {"encoding": "alibi2d", "scores": {"average": 58.0}},
        {"encoding": "alibi2d", "scores": {"average": 62}},
    ]
    (tmp_path / "three_cell.json").write_text(json.dumps({"rows": cells}))
    speeds = [{"pos_embed": "alibi2d", "batch": b, "relative_speed": v} for b, v in ((1, 0.5), (8, 0.9))]
    (tmp_path / "encodings_cpu.json").write_text(json.dumps({"rows": speeds}))
    actual = generator.scores(tmp_path)
    expected = {"distance": 0.5, "direction": 0.4, "three cells": 0.6, "speed": 0.9}
    assert actual == {"alibi2d": pytest.approx(expected)}
    lines = generator.comparison_table().splitlines()
    named = [re.match(r"\| \[`(\w+)`\]", line)[1] for line in lines[2:]]
    assert named == vispe.list_encodings(ndim=2, exclude=vispe.list_encodings(kind="positions"))
    assert {line.count(" | ") for line in lines if not line.startswith("|--")} == {6}
    # missing measurements are empty, not 0
    assert re.search(r"\[`border`\].* \| 0\.70 \| 0\.71 \|  \|  \|$", "\n".join(lines), re.MULTILINE)


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install 'vispe[docs]'")
    for package in ("mkdocstrings", "mkdocs_jupyter", "latex2mathml"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'vispe[docs]'")
    import subprocess

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    page = (tmp_path / "encodings" / "alibi2d" / "index.html").read_text()
    assert "<math" in page
    assert "arithmatex" not in page
    assert "site/tables.js" in page
    search = load("site_search", ROOT / "eval" / "site_search.py")
    assert len(set(search.TERMS)) == 78
    assert [term for term, pages in search.pages_of(tmp_path).items() if not pages] == []
    assert (tmp_path / "site" / "tables.js").exists()
    # notebooks link to pages, and nothing is loaded from another server
    page = (tmp_path / "tutorials" / "new-encoding" / "index.html").read_text()
    assert 'href="../../how-to/models/choosing/"' in page
    for path in tmp_path.rglob("*.html"):
        sources = re.findall(
            r"<(?:script|img|iframe|link)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", path.read_text()
        )
        assert [s for s in sources if "canonical" not in s] == [], path
        assert "cdnjs" not in path.read_text(), path
