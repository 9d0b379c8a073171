"""Training of vision-language models: to another position scheme, and against bias of place."""
