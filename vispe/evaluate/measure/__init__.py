"""Base of measures: interface, audited model, perturbed runs, verdicts and probe images."""
