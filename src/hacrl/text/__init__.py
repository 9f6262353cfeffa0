"""Chat templates, tokenizers, text <-> token ids."""
