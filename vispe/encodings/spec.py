"""Spec strings: ``name``, ``name.preset``, ``name(option=value, ...)``, joined by ``+``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from vispe.errors import OptionError, counted

MAX_SPEC_LENGTH, MAX_SPEC_DEPTH = 32_768, 20
"""Maximum number of characters of a spec and of nested brackets."""

# names of position schemes and their aliases, registered by `vispe.multimodal`
SCHEME_NAMES: set[str] = set()
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def parse_text(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (name with preset, options) of every term; names and options are not checked.

    ``:`` is accepted for ``=``. Values are Python literals, true, false, null, bare words, specs, or lists of these.

    Raises:
        OptionError: the text cannot be read.
    """
    if len(text) > MAX_SPEC_LENGTH:
        raise OptionError(
            f"The encoding {text[:40]!r}... has {counted(len(text), 'character')}. Use at most {MAX_SPEC_LENGTH}."
        )
    return [_term(term) for term in _split(text, "+")]


def spec_to_text(terms: Iterable[Mapping[str, Any]]) -> str:
    """Return terms (dicts with 'name' and options) as a spec string that `parse_text` reads."""
    return "+".join(_term_text(term) for term in terms)


def _term_text(term: Mapping[str, Any]) -> str:
    options = ",".join(f"{k}={_value_text(v)}" for k, v in term.items() if k != "name")
    return str(term["name"]) + (f"({options})" if options else "")


def _value_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_value_text, cast('Sequence[Any]', value)))}]"
    return str(value)


def _term(term: str) -> tuple[str, dict[str, Any]]:
    # names contain no hyphen, but accepting it lets the lookup suggest the correct name
    match = re.fullmatch(r"(\w[\w.-]*)\s*(?:\((.*)\))?", term.strip(), re.DOTALL)
    if not match:
        raise OptionError(
            f"The encoding {term!r} cannot be parsed. Use name, name.preset or name(option=value, ...), joined by +."
        )
    options: dict[str, Any] = {}
    for item in _split(match[2] or "", ","):
        pair = re.fullmatch(r"([A-Za-z_]\w*)\s*[=:](.+)", item.strip(), re.DOTALL)
        if not pair:
            raise OptionError(
                f"The option {item.strip()!r} of {match[1]} cannot be parsed. Use option=value."
            )
        if pair[1] in options:
            raise OptionError(f"The option {pair[1]!r} of {match[1]} is specified twice. Remove one.")
        options[pair[1]] = _value(pair[2].strip())
    return match[1], options


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "null": None}  # 'none' stays a string: some options accept it
    if text.lower() in words:
        return words[text.lower()]
    if text[0] + text[-1] in ("[]", "()"):
        return [_value(item.strip()) for item in _split(text[1:-1], ",") if item.strip()]
    try:
        return ast.literal_eval(text)
    except (
        ValueError,
        SyntaxError,
        RecursionError,
        MemoryError,
    ):
        # the last two: strings such as 1000 minus signs
        if re.fullmatch(r"[\w./+-]+", text) or _is_spec(text):
            return text
        raise OptionError(f"The value {text!r} cannot be parsed. Quote strings.") from None


def _is_spec(text: str) -> bool:
    """Whether a value is a spec, for encodings with an encoding as an option."""
    try:
        return bool(parse_text(text))
    except OptionError:
        return False


def _split(text: str, at: str) -> list[str]:
    """Split at `at` outside of brackets and quotes; the empty list for an empty string."""
    parts: list[str] = []
    closing: list[str] = []
    start, quote = 0, ""
    for i, char in enumerate(text):
        if quote or char in "'\"":
            # inside quotes, the other kind of quote is an ordinary character
            quote = char if not quote else "" if char == quote else quote
        elif char in _BRACKETS:
            closing.append(_BRACKETS[char])
            if len(closing) > MAX_SPEC_DEPTH:
                raise OptionError(
                    f"The encoding {text[:40]!r}... has more than {MAX_SPEC_DEPTH} levels of brackets."
                )
        elif char in ")]}" and (not closing or closing.pop() != char):
            raise OptionError(f"The encoding {text!r} has unbalanced brackets.")
        elif char == at and not closing:
            parts.append(text[start:i])
            start = i + 1
    if closing or quote:
        raise OptionError(f"The encoding {text!r} has unbalanced {'quotes' if quote else 'brackets'}.")
    return [*parts, text[start:]] if text.strip() else []
