"""Training of vision-language models: fine-tuning to another position scheme, and removal of positional bias."""
