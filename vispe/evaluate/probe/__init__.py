"""Linear probe of position in features, layer by layer, before and after debiasing."""

from vispe._lazy import face

__all__ = [
    "ProbeResult",
    "ProbeRow",
    "Rasa",
    "RasaProjection",
    "aligned",
    "fit_rasa",
    "positional_probe",
    "remedied",
]

__getattr__, __dir__ = face(
    __name__,
    dict.fromkeys(("ProbeRow", "ProbeResult", "positional_probe"), "vispe.evaluate.probe.positional")
    | dict.fromkeys(("Rasa", "fit_rasa"), "vispe.evaluate.probe.rasa.fit")
    | {"RasaProjection": "vispe.evaluate.probe.rasa.projection", "remedied": "vispe.evaluate.probe.remedies"}
    | dict.fromkeys(("aligned",), "vispe.report.table"),
)
