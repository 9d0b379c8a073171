"""A position scheme in a vision-language model of transformers."""
