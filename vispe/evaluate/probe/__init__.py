"""Linear probe of position in features, layer by layer, before and after debiasing."""

from vispe._lazy import lazy_exports

__all__ = ["ProbeResult", "ProbeRow", "markdown_table", "positional_probe"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    dict.fromkeys(("ProbeRow", "ProbeResult", "positional_probe"), "vispe.evaluate.probe.positional")
    | dict.fromkeys(("markdown_table",), "vispe.report.table"),
)
