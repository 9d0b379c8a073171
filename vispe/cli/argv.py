"""Command-line arguments rewritten for the parser: values of lists, and options that are written without a value."""

import json
import os
import re
from collections.abc import Mapping, Sequence

from vispe.errors import OptionError


def normalize_argv(
    words: Sequence[str],
    lists: Mapping[str, type],
    multi_word: Sequence[str] = (),
    optional_value: Mapping[str, str] | None = None,
) -> list[str]:
    """Rewrite list options for the parser: `1,2` becomes `[1,2]`, and `a,b` becomes `["a", "b"]`.

    Args:
        words: command-line arguments.
        lists: item type of each list option.
        multi_word: list options that consume all arguments up to the next option.
        optional_value: value of options written without one; the next argument is parsed as their value only if it is
            a number or equal to that value.

    Raises:
        OptionError: a text is not valid UTF-8.

    >>> scales, cluster = {"--scales": float}, {"--cluster": "auto"}
    >>> normalize_argv(["--scales", "1,2", "--cluster", "a.png"], scales, optional_value=cluster)
    ['--scales', '[1,2]', '--cluster', 'auto', 'a.png']
    """
    rest, optional_value = list(words), optional_value or {}
    result: list[str] = []
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if equals and option in lists:
            word = f"{option}={_bracket(option, value, lists[option])}"
        result.append(word)
        if word in multi_word:
            end = next((k for k, w in enumerate(rest) if w.startswith("-") and w != "-"), len(rest))
            parts = [part for w in rest[:end] for part in map(str.strip, w.split(",")) if part]
            result.append(_list_of_texts(word, parts))
            del rest[:end]
        elif word in optional_value and not (
            rest and (rest[0] == optional_value[word] or re.fullmatch(r"[-+]?[\d.]+", rest[0]))
        ):
            result.append(optional_value[word])
        elif word in lists and rest:
            result.append(_bracket(word, rest.pop(0), lists[word]))
    return result


def _bracket(option: str, value: str, item: type) -> str:
    """Write the value of a list option as a YAML list; the name of an existing file is never split at commas."""
    is_file = item is str and os.path.lexists(value)
    if value.startswith("[") and not is_file and (item is not str or value.endswith("]")):
        return value
    parts = [value] if is_file else [part.strip() for part in value.split(",") if part.strip()]
    return _list_of_texts(option, parts) if item is str else f"[{','.join(parts)}]"


def _list_of_texts(option: str, texts: Sequence[str]) -> str:
    """Quote texts as a YAML list that is read back unchanged."""
    for text in texts:
        # lone surrogates stand for undecodable bytes of a file name
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise OptionError(
                f"{option}: file names must be valid UTF-8, got {text!r}. Rename the file, or pass its folder."
            )
    # JSON escapes characters above U+FFFF as surrogate pairs, which YAML rejects
    quoted = ("".join(c if c > "\uffff" else json.dumps(c)[1:-1] for c in text) for text in texts)
    return "[" + ", ".join(f'"{text}"' for text in quoted) + "]"
