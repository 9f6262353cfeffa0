"""Plain text <-> ids for one tokenizer, with control tokens switched off.

The lower half of render.py, without chat templates and turns. Ids of a text after a prompt follow the
rendering law

    decode(prompt + ids) == decode(prompt) + text,   no control token among ids,

or are None.
"""

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer

Ids = tuple[int, ...]

_ANCHORS = ("", "\n", "=", ".", "0", "a")
"""Texts put before a reply, so that SentencePiece neither adds nor strips its first space."""
_REPLACEMENT = "\ufffd"
_CACHE = 4096


class LiteralCoder:
    """A copy of a tokenizer that reads control tokens as plain text. It uses the vocabulary of
    the original, but not its padding and truncation settings.

    Example: LiteralCoder(backend, control={0, 2}).continuations([((5, 6), "</s>")]) == [(91, 8, 92)]
    """

    def __init__(self, backend: Tokenizer, control: Iterable[int]) -> None:
        self.control = frozenset(control)  # ids that never come from text
        added = backend.get_added_tokens_decoder()
        self._head = _literal_head(backend, added, self.control)
        size = self._head.get_vocab_size(with_added_tokens=False)
        self._max_id = max([size - 1, *added])
        self._decoded: dict[Ids, str] = {}
        # The plain encoding first, unless it breaks the rendering law for a single letter.
        before = self.encode("a")
        plain = self.decode(before + self.encode("x")) == self.decode(before) + "x"
        self._anchors = _ANCHORS if plain else (*_ANCHORS[1:], "")

    def encode(self, text: str) -> list[int]:
        """The ids of a text that stands alone."""
        return self._head.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, control tokens written out."""
        return self._head.decode(list(ids), skip_special_tokens=False)

    def encode_behind(self, texts: Sequence[str], anchor: str) -> list[Ids | None]:
        """Encode each text behind `anchor` and remove the anchor's ids; None where a token spans
        both."""
        head = self.encode(anchor) if anchor else []
        behind = [anchor + text for text in texts]
        encoded = self._head.encode_batch_fast(behind, add_special_tokens=False)
        rows = [e.ids for e in encoded]  # `ids` copies on every access
        return [tuple(ids[len(head) :]) if ids[: len(head)] == head else None for ids in rows]

    def continuations(self, pairs: Iterable[tuple[Sequence[int], str]]) -> list[Ids | None]:
        """For each (prompt ids, text): the ids of the text after that prompt, or None if this
        tokenizer cannot keep the rendering law."""
        work = [(tuple(p), t) for p, t in pairs]
        before = self._decode_prompts([p for p, _ in work])
        result: list[Ids | None] = [None] * len(work)
        pending = list(range(len(work)))
        for anchor in self._anchors:
            if not pending:
                break
            tried = self.encode_behind([work[n][1] for n in pending], anchor)
            found = [(n, ids) for n, ids in zip(pending, tried, strict=True) if ids is not None]
            wholes = self._decode_batch([(*work[n][0], *ids) for n, ids in found])
            for (n, ids), whole in zip(found, wholes, strict=True):
                if whole == before[n] + work[n][1] and self.control.isdisjoint(ids):
                    result[n] = ids
            pending = [n for n in pending if result[n] is None]
        return result

    def texts(self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[str, bool]]:
        """For each (prompt ids, reply ids): the reply's text, and whether the text reproduces the
        reply. It does not if the ids contain a control token or an id without text, if a character
        is incomplete, or if the tokenizer cannot encode the text.
        """
        work = [(tuple(p), tuple(r)) for p, r in pairs]
        before = self._decode_prompts([p for p, _ in work])
        wholes = self._decode_batch([p + r for p, r in work])
        clean = [w.startswith(b) for w, b in zip(wholes, before, strict=True)]
        replies = [
            whole[len(start) :] if ok else self.decode(ids)
            for whole, start, ok, (_, ids) in zip(wholes, before, clean, work, strict=True)
        ]
        again = self.continuations((p, t) for (p, _), t in zip(work, replies, strict=True))
        result = []
        for (_, ids), ok, reply, encoded in zip(work, clean, replies, again, strict=True):
            # Ids beyond _max_id only pad the embedding and have no text.
            plain = self.control.isdisjoint(ids) and max(ids, default=0) <= self._max_id
            # An incomplete character decodes to U+FFFD, like a real U+FFFD: compare the ids.
            complete = _REPLACEMENT not in reply or encoded == ids
            result.append((reply, ok and encoded is not None and plain and complete))
        return result

    def shorten(self, prompt_ids: Sequence[int], token_ids: Sequence[int], limit: int) -> Ids:
        """The first `limit` ids, or a few less so that the last character is complete."""
        prompt, ids = tuple(prompt_ids), tuple(token_ids)
        whole = self.decode(prompt + ids)
        for length in range(min(limit, len(ids)), 0, -1):
            if whole.startswith(self.decode(prompt + ids[:length])):
                return ids[:length]
        return ()

    def _decode_batch(self, rows: Sequence[Ids]) -> list[str]:
        return self._head.decode_batch([list(r) for r in rows], skip_special_tokens=False)

    def _decode_prompts(self, prompts: Sequence[Ids]) -> list[str]:
        """Decode prompts with a cache: many samples have the same prompt."""
        new = [p for p in dict.fromkeys(prompts) if p not in self._decoded]
        if len(self._decoded) + len(new) > _CACHE:
            self._decoded.clear()
            new = list(dict.fromkeys(prompts))
        self._decoded.update(zip(new, self._decode_batch(new), strict=True))
        return [self._decoded[p] for p in prompts]


def _literal_head(
    backend: Tokenizer, added: dict[int, AddedToken], control: frozenset[int]
) -> Tokenizer:
    """A tokenizer with exactly the control tokens marked special; `encode_special_tokens` makes it
    read special tokens as plain text."""
    options = ("single_word", "lstrip", "rstrip", "normalized")
    tokens = [
        AddedToken(t.content, **{o: getattr(t, o) for o in options}, special=i in control)
        for i, t in sorted(added.items())
    ]
    head = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(backend, part) is not None:
            setattr(head, part, getattr(backend, part))
    head.add_tokens(tokens)
    if any(head.token_to_id(t.content) != i for i, t in added.items()):
        # Ids with gaps: only a full copy keeps them.
        head = Tokenizer.from_str(backend.to_str())
        head.no_padding()
        head.no_truncation()
        head.add_tokens(tokens)
    head.encode_special_tokens = True
    return head
