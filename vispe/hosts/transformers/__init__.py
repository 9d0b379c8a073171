"""Models of Hugging Face transformers: vision towers, vision-language models, saving."""
