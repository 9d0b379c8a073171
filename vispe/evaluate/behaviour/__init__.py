"""Measures of behaviour: outputs on perturbed inputs."""
