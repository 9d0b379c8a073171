"""What a spec asks of a host: encodings, and what stays of the host's own (the words `learn` and `rope`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from vispe.encodings.base import Encoding
from vispe.encodings.registry import Spec, parse_spec
from vispe.encodings.spec import parse_text
from vispe.errors import OptionError

WORDS = ("learn", "rope")


class Wanted(NamedTuple):
    """A spec as hosts take it.

    Attributes:
        terms: the parsed terms of the encodings.
        keep_abs: whether the host's own absolute table stays in use; None for what there is.
        keep_rope: likewise, of its own rotary embedding.
        sources: for each term the finished encoding whose weights are taken over, or None; empty for none at all.
    """

    terms: list[dict[str, Any]]
    keep_abs: bool | None = False
    keep_rope: bool | None = False
    sources: tuple[Encoding | None, ...] = ()


def read(
    spec: Spec,
    options: dict[str, Any] | None = None,
    keep_abs: bool | None = False,
    keep_rope: bool | None = False,
) -> Wanted:
    """Return what a spec asks, with options beside it; what it keeps is kept whatever the flags say.

    >>> read("learn+alibi2d", {"wrap": True})
    Wanted(terms=[{'name': 'alibi2d', 'wrap': True}], keep_abs=True, keep_rope=False, sources=(None,))

    Raises:
        UnknownEncoding, OptionError: the spec is not right, or options stand beside a sum.
    """
    words: set[str] = set()
    terms: list[dict[str, Any]] = []
    sources: list[Encoding | None] = []
    for member in _members(spec):
        word = member.get("name") if isinstance(member, dict) and len(member) == 1 else None
        if word in WORDS:
            words.add(word)
            continue
        parsed = parse_spec(member)
        terms += parsed
        sources += member.parts() if isinstance(member, Encoding) else [None] * len(parsed)
    if not terms:
        terms, sources = parse_spec("none" if words else spec), [None]
    if options:
        if len(terms) != 1:
            raise OptionError(
                f"Options {sorted(options)} beside a sum are ambiguous; write them into the spec."
            )
        terms = parse_spec({**terms[0], **options})
    return Wanted(terms, "learn" in words or keep_abs, "rope" in words or keep_rope, tuple(sources))


def _members(spec: Spec) -> Iterator[Any]:
    """Yield the terms of a spec; texts without a word of the host stay whole."""
    if isinstance(spec, str) and any(name in WORDS for name, _ in parse_text(spec)):
        yield from ({**options, "name": name} for name, options in parse_text(spec))
    elif isinstance(spec, list | tuple):
        for member in spec:
            yield from _members(member)
    else:
        yield spec
