"""Linear probe of position in features, layer by layer, before and after debiasing."""

from vispe._lazy import face

__all__ = ["ProbeResult", "ProbeRow", "aligned", "positional_probe"]

__getattr__, __dir__ = face(
    __name__,
    dict.fromkeys(("ProbeRow", "ProbeResult", "positional_probe"), "vispe.evaluate.probe.positional")
    | dict.fromkeys(("aligned",), "vispe.report.table"),
)
