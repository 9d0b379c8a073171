"""Linear probe of position in features, layer by layer, before and after debiasing."""

from vispe._lazy import lazy_exports

__all__ = [
    "ProbeResult",
    "ProbeRow",
    "Rasa",
    "RasaProjection",
    "debias",
    "fit_rasa",
    "markdown_table",
    "positional_probe",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    dict.fromkeys(("ProbeRow", "ProbeResult", "positional_probe"), "vispe.evaluate.probe.positional")
    | dict.fromkeys(("Rasa", "fit_rasa"), "vispe.evaluate.probe.rasa.fit")
    | {"RasaProjection": "vispe.evaluate.probe.rasa.projection", "debias": "vispe.evaluate.probe.remedies"}
    | dict.fromkeys(("markdown_table",), "vispe.utils.report.table"),
)
