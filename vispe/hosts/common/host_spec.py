"""Specs of hosts: encodings, and the keywords `learn` and `rope` for the host's own position information."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from vispe.encodings.base import Encoding
from vispe.encodings.registry import Spec, parse_spec
from vispe.encodings.spec import parse_text
from vispe.errors import OptionError

KEYWORDS = ("learn", "rope")


class HostSpec(NamedTuple):
    """A parsed spec of a host.

    Attributes:
        terms: the parsed terms of the encodings.
        keep_abs: whether the host's own absolute table stays in use; None means that it stays in use if it
            exists.
        keep_rope: the same for its own rotary embedding.
        sources: for each term the `Encoding` instance whose weights are copied, or None; empty if there are
            no such instances.
    """

    terms: list[dict[str, Any]]
    keep_abs: bool | None = False
    keep_rope: bool | None = False
    sources: tuple[Encoding | None, ...] = ()


def parse_host_spec(
    spec: Spec,
    options: dict[str, Any] | None = None,
    keep_abs: bool | None = False,
    keep_rope: bool | None = False,
) -> HostSpec:
    """Parse a spec with separate options; the keywords `learn` and `rope` take precedence over the flags.

    >>> parse_host_spec("learn+alibi2d", {"wrap": True})
    HostSpec(terms=[{'name': 'alibi2d', 'wrap': True}], keep_abs=True, keep_rope=False, sources=(None,))

    Raises:
        UnknownEncoding, OptionError: the spec is not valid, or options are passed with a sum.
    """
    keywords: set[str] = set()
    terms: list[dict[str, Any]] = []
    sources: list[Encoding | None] = []
    for member in _members(spec):
        keyword = member.get("name") if isinstance(member, dict) and len(member) == 1 else None
        if keyword in KEYWORDS:
            keywords.add(keyword)
            continue
        parsed = parse_spec(member)
        terms += parsed
        sources += member.parts() if isinstance(member, Encoding) else [None] * len(parsed)
    if not terms:
        terms, sources = parse_spec("none" if keywords else spec), [None]
    if options:
        if len(terms) != 1:
            raise OptionError(
                f"Options of a sum of encodings are ambiguous, got {sorted(options)}. Write them into the spec."
            )
        terms = parse_spec({**terms[0], **options})
    return HostSpec(terms, "learn" in keywords or keep_abs, "rope" in keywords or keep_rope, tuple(sources))


def _members(spec: Spec) -> Iterator[Any]:
    """Yield the terms of a spec; text without a keyword of the host is yielded unparsed."""
    if isinstance(spec, str) and any(name in KEYWORDS for name, _ in parse_text(spec)):
        yield from ({**options, "name": name} for name, options in parse_text(spec))
    elif isinstance(spec, list | tuple):
        for member in spec:
            yield from _members(member)
    else:
        yield spec
