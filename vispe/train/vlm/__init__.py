"""Training of vision-language models against bias of place: where an item stands among others, in which order."""
