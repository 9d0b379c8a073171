"""How much position can be read from features, layer by layer, and what takes it away."""

from vispe._lazy import face

__all__ = ["ProbeResult", "ProbeRow", "aligned", "positional_probe"]

__getattr__, __dir__ = face(
    __name__,
    dict.fromkeys(("ProbeRow", "ProbeResult", "positional_probe"), "vispe.evaluate.probe.positional")
    | dict.fromkeys(("aligned",), "vispe.report.table"),
)
