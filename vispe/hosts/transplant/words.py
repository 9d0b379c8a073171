"""The words of a spec that belong to the host: `learn` and `rope` say what stays of its own."""

from __future__ import annotations

from typing import Any

from vispe.encodings.base import Encoding
from vispe.encodings.registry import Spec, parse_spec
from vispe.errors import OptionError


def with_options(spec: Spec, keep_abs: bool, options: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Return the parsed terms of a spec with options beside it, and whether the absolute table stays."""
    terms, learn = host_terms(spec)
    if options:
        if len(terms) != 1:
            raise OptionError(
                f"Options {sorted(options)} beside a sum are ambiguous; write them into the spec."
            )
        terms = parse_spec({**terms[0], **options})
    return terms, keep_abs or learn


def host_terms(spec: Spec) -> tuple[list[dict[str, Any]], bool]:
    """Return the parsed terms of a spec without timm's own 'learn', and whether that was among them."""
    rest, kept = _without(spec, "learn")
    return parse_spec(rest), kept


def timm_terms(spec: Spec) -> tuple[list[dict[str, Any]], bool, bool]:
    """Return the parsed terms of a spec without 'learn' and 'rope', and whether each was among them."""
    rest, rope = without_rope(spec)
    terms, learn = host_terms(rest)
    return terms, learn, rope


def without_rope(spec: Spec) -> tuple[Spec, bool]:
    """Return a spec without the term 'rope', the model's own, and whether it was there."""
    return _without(spec, "rope")


def _without(spec: Spec, word: str) -> tuple[Spec, bool]:
    """Return a spec without a word of the host, and whether it was there; 'none' when nothing else was."""
    if isinstance(spec, str):
        names = [t.strip() for t in spec.split("+")]
        rest = [t for t in names if t != word]
        if len(rest) < len(names):
            return "+".join(rest) if rest else "none", True
    elif spec == {"name": word}:
        return "none", True
    elif isinstance(spec, list | tuple):
        rest = [t for t in spec if t not in (word, {"name": word})]
        if len(rest) < len(spec):
            return rest or "none", True
    return spec, False


def finished(spec: Spec) -> list[Encoding | None]:
    """Return the finished encodings in a spec, None for each term that is only described."""
    if isinstance(spec, Encoding):
        return list(spec.parts())
    if isinstance(spec, list | tuple):
        words = ("learn", "rope", {"name": "learn"}, {"name": "rope"})
        return [e for member in spec if member not in words for e in finished(member)]
    return [None] * len(timm_terms(spec)[0])
