"""Measures: order in the report, limits, and discovery by folder."""

from typing import ClassVar

import pytest

import vispe.experimental.measures  # noqa: F401  (adds its measures)
from vispe.errors import UnknownName
from vispe.evaluate.audit.findings import Finding
from vispe.evaluate.audit.measures import all_measures, choose
from vispe.evaluate.measure.base import FAMILIES, Measure, Outcome
from vispe.evaluate.measure.verdict import judge

REPORT = (
    "probe pattern neighbours spectrum channels read_or_used heads place_in_logits bands prior mask shift turn strips "
    "order sides"
)
EXPERIMENTAL = {"relevance", "latent", "units"}


class Strict(Measure):
    name = "strict"
    family = "features"
    question = "Is it large?"
    number = "a number"
    misleads = "Never."
    limit: ClassVar[float] = 0.5


class Ordinary(Strict):
    limit = Measure.limit


def test_the_order_of_the_report():
    assert [m.name for m in choose()] == REPORT.split()
    ranks = [FAMILIES.index(m.family) for m in all_measures().values()]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize("name", sorted(all_measures()))
def test_every_measure_has_a_limit_and_a_question(name):
    measure = all_measures()[name]
    assert 0 < measure.limit < 1
    assert measure.question.endswith("?")
    assert measure.order >= 0


@pytest.mark.parametrize(("measure", "verdict"), [(Strict(), "no"), (Ordinary(), "yes")])
def test_the_limit_of_the_class_decides(measure, verdict):
    outcome = Outcome(0.3, [0.3] * 6, control={"c": 0.0})
    decision = judge(measure.limit, outcome, {})
    finding = Finding.of(measure, outcome, {}, decision)
    assert finding.verdict == verdict
    assert finding.to_dict()["limit"] == measure.limit


def test_experimental_measures_run_by_name_alone():
    known = all_measures()
    assert {n for n, m in known.items() if m.__module__.startswith("vispe.experimental")} == EXPERIMENTAL
    assert not EXPERIMENTAL & {m.name for m in choose()}
    assert not EXPERIMENTAL & {m.name for m in choose(FAMILIES)}
    assert {m.name for m in choose(sorted(EXPERIMENTAL))} == EXPERIMENTAL


def test_an_unknown_measure_is_named():
    with pytest.raises(UnknownName, match=r"got 'prob'.*experimental"):
        choose(["prob"])
