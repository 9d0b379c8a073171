"""Models of Hugging Face transformers: vision towers, language models with pictures, saving."""
