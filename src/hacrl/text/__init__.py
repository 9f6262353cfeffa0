"""Chat templates, tokenizers, text <-> token ids.

    render.py     Renderer: one agent's prompts, replies, end tokens and control tokens
    literal.py    LiteralCoder: plain text <-> ids with control tokens switched off

The rendering law: an agent's own samples keep their ids. A peer's text is tokenised with the learner's
renderer, as a continuation of the learner's prompt: decode(prompt + ids) == decode(prompt) + text. The
learner's end token is appended if and only if the peer stopped by itself (STOP). No control token ever
comes from text. Where a tokenizer cannot keep the law, the sample is dropped; text is never changed.
"""
