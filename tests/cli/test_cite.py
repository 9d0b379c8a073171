"""Papers of measures and recipes, and `vispe cite` for names of every group."""

import inspect
import json
import re
from collections import defaultdict

import vispe
import vispe.experimental.measures
from tests.cases import cases
from tests.cli.test_main import failed
from vispe.cli.main import main
from vispe.evaluate.audit.measures import all_measures
from vispe.multimodal import list_schemes, scheme_info
from vispe.train.recipe_papers import RECIPE_PAPERS

MEASURES = all_measures()
GROUPS = {"measures": {name: kind.papers for name, kind in MEASURES.items()}, "recipes": RECIPE_PAPERS}
PAPERS = [(group, name) for group, entries in GROUPS.items() for name in entries]
LINK = re.compile(r"https://(arxiv\.org/abs/\d{2}(0[1-9]|1[0-2])\.\d{4,5}|github\.com/[\w-]+/[\w.-]+)")


def split(paper):
    """Return title and link ("" for none)."""
    title, _, link = paper.rpartition(", ") if "://" in paper else (paper, "", "")
    return title, link


@cases("name", MEASURES)
def test_each_measure_names_its_papers(name):
    kind = MEASURES[name]
    assert "papers" in vars(kind)
    is_own_method = "vispe's own" in re.sub(r"\s+", " ", inspect.getdoc(kind))
    assert bool(kind.papers) != is_own_method


def test_each_remedy_and_recipe_has_a_paper():
    from vispe.evaluate.probe.remedies import METHODS

    assert set(METHODS) <= set(RECIPE_PAPERS)
    assert all(RECIPE_PAPERS.values())
    assert not set(RECIPE_PAPERS) & {*vispe.list_encodings(), *list_schemes(), *MEASURES}


@cases(("group", "name"), PAPERS)
def test_papers_are_titles_with_an_optional_link(group, name):
    papers = GROUPS[group][name]
    assert isinstance(papers, tuple)
    assert len({*papers}) == len(papers)
    for title, link in map(split, papers):
        assert title == title.strip()
        assert len(title) > 3
        assert "  " not in title
        assert "arxiv" not in title.casefold()
        assert not link or LINK.fullmatch(link), link


def test_a_link_has_one_title_and_a_title_has_one_link():
    titles, links = defaultdict(set), defaultdict(set)
    for group, name in PAPERS:
        for title, link in map(split, GROUPS[group][name]):
            titles[link].add(title)
            links[title].add(link)
    registered = [vispe.encoding_info(name).paper for name in vispe.list_encodings()]
    registered += [scheme_info(name).paper for name in list_schemes()]
    for title, link in map(split, registered):
        if link in titles:
            titles[link].add(title)
        if title in links:
            links[title].add(link)
    assert {link: known for link, known in titles.items() if link and len(known) > 1} == {}
    assert {title: known for title, known in links.items() if len(known) > 1} == {}


def test_cite_prints_every_paper_of_measures_and_recipes(capsys):
    for group, entries in GROUPS.items():
        assert main(["cite", *entries]) == 0
        lines = capsys.readouterr().out.splitlines()
        for name, papers in entries.items():
            label = name if name != "shift" else "shift (measure)"  # also an encoding
            assert [f"{label}: {paper}" in lines for paper in papers or ["no paper"]] == [True] * max(
                1, len(papers)
            )
        assert main(["cite", *entries, "--json"]) == 0
        output = json.loads(capsys.readouterr().out)
        assert list(output) == ["vispe", "encodings", "schemes", "measures", "recipes"]
        assert output[group] == {name: {"papers": [*papers]} for name, papers in entries.items()}


def test_cite_prints_all_meanings_of_a_name(capsys):
    assert main(["cite", "shift", "alibi2d"]) == 0
    out = capsys.readouterr().out
    assert "\nshift (encoding): Randomized shift of positions" in out
    assert "\nshift (measure): no paper\n" in out
    assert "\nalibi2d: What DINO saw" in out


@cases(
    ("spelled", "right"),
    [
        ("strip", "strips"),
        ("Read-or-used", "read_or_used"),
        ("threecell", "three_cell"),
        ("retrofits", "retrofit"),
        ("slot-distilation", "slot_distillation"),
        ("alibi2d.geometrc", "alibi2d.geometric"),
    ],
)
def test_misspelled_measures_and_recipes_are_suggested(capsys, spelled, right):
    assert f"'{right}'" in failed(capsys, "cite", spelled).partition("Use ")[0]
