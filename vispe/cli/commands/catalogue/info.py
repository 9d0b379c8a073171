"""`vispe info`: properties of an encoding or position scheme, or the table of encodings and hosts."""

from typing import Any

POSITIONALS = ("name",)


def info(name: str = "", json: bool = False) -> None:
    """Show an encoding or a position scheme, its options and hosts; without a name, the hosts of all encodings.

    Args:
        name: name of an encoding, a preset, or a position scheme; default all encodings.

    Examples:
        vispe info
        vispe info alibi2d
        vispe info alibi2d.geometric --json
        vispe info vrope
    """
    from json import dumps

    import vispe
    import vispe.multimodal  # registers the names of schemes
    from vispe.encodings.spec import SCHEME_NAMES
    from vispe.hosts.support_matrix import HOSTS, support, support_table

    if not name:
        table = support_table()
        if json:
            print(dumps(dict(table), indent=2))
        else:
            _print_table(table, HOSTS)
        return
    if name in SCHEME_NAMES:
        facts = _scheme(name)
        print(dumps(facts, indent=2, default=str) if json else _scheme_text(facts))
        return
    facts = vars(vispe.encoding_info(name))
    hosts = support(name)
    preset = name.partition(".")[2]
    presets = {preset: facts["presets"][preset]} if preset in facts["presets"] else facts["presets"]
    if json:
        print(dumps(facts | {"presets": presets, "hosts": hosts}, indent=2, default=str))
        return
    print(f"{facts['name']}: {facts['summary']}\n")
    properties = {
        "kind": ", ".join(facts["kinds"]) or "none",
        "axes": ", ".join(map(str, facts["ndim"])),
        "new resolution": "no resampling needed" if facts["extrapolates"] else "resampled",
        "structured form": "yes" if facts["fused"] else "no",
        "paper": f"{facts['paper']} ({facts['year']})" if facts["paper"] else "none",
    }
    for key, value in properties.items():
        print(f"{key:<18} {value}")
    for title, entries in (("options", facts["options"]), ("presets", presets)):
        if entries:
            print(f"\n{title}")
            width = max(map(len, entries))
            for key, value in entries.items():
                text = ", ".join(f"{k}={v}" for k, v in value.items()) if title == "presets" else f"{value!r}"
                print(f"  {key:<{width}}  {text}")
    print("\nhosts")
    for host, reason in hosts.items():
        print(f"  {host:<10} {'yes' if reason is None else 'no: ' + reason}")


def _scheme(name: str) -> dict[str, Any]:
    """Return the properties of a position scheme and the supported model types."""
    from vispe.hosts.transformers.language.families import FAMILIES
    from vispe.multimodal import scheme_info

    return {**vars(scheme_info(name)), "kinds": ["scheme"], "families": [*FAMILIES]}


def _scheme_text(facts: dict[str, Any]) -> str:
    """Return the properties of a position scheme as text."""
    properties = {
        "kind": "position scheme, for the language model of a vision-language model",
        "axes": str(facts["axes"]),
        "text": "identical to 1D positions" if facts["text_exact"] else "changed: needs training",
        "paper": facts["paper"] or "none",
    }
    options = facts["options"]
    width = max(map(len, options), default=0)
    limit = "\n  not for sliding-window attention: the axes depend on the head" if facts["by_head"] else ""
    return "\n".join(
        [
            f"{facts['name']}: {facts['summary']}\n",
            *(f"{key:<18} {value}" for key, value in properties.items()),
            *(["\noptions"] if options else []),
            *(f"  {key:<{width}}  {value!r}" for key, value in options.items()),
            f"\nmodel types of transformers\n  {', '.join(facts['families'])}{limit}",
            f"\nvispe.convert(model, {facts['name']!r})",
        ]
    )


def _print_table(table: list[tuple[str, dict[str, str | None]]], hosts: dict[str, str]) -> None:
    """Print one row per encoding, then the hosts, then each reason once."""
    width = max(len(name) for name, _ in table)
    reasons: dict[str, int] = {}
    print(f"{'':<{width}}  {'  '.join(f'{host:<5}' for host in hosts)}")
    for name, row in table:
        cells = [
            "yes" if reason is None else f"no {reasons.setdefault(reason, len(reasons) + 1)}"
            for reason in row.values()
        ]
        padded = [f"{c:<{max(len(h), 5)}}" for c, h in zip(cells, hosts, strict=True)]
        print(f"{name:<{width}}  {'  '.join(padded)}".rstrip())
    print("\nhosts")
    for host, text in hosts.items():
        print(f"  {host:<10} {text}")
    print("\nreasons")
    for reason, number in reasons.items():
        print(f"  {number}  {reason}")
