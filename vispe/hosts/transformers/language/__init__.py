"""Position schemes in vision-language models of transformers."""
