"""Plain text <-> ids for one tokenizer, with every control token read as plain text.

This is the lower half of render.py: it keeps the rendering law

    decode(prompt + ids) == decode(prompt) + text,   no control token among ids,

or says None. It knows nothing of chat templates or turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer

Ids = tuple[int, ...]

_ANCHORS = ("", "\n", "=", ".", "0", "a")
"""Texts tried before a reply to keep SentencePiece from adding or stripping its first space."""
_REPLACEMENT = "\ufffd"
_CACHE = 4096


class LiteralCoder:
    """A second head on a tokenizer's vocabulary. The model behind it is shared, not copied, and no
    padding or truncation set on the tokenizer reaches it.

    Example: LiteralCoder(backend, control={0, 2}).continuation((5, 6), "</s>") == (91, 8, 92)
    """

    def __init__(self, backend: Tokenizer, control: Iterable[int]) -> None:
        self.control = frozenset(control)
        """Ids that text never becomes."""
        added = backend.get_added_tokens_decoder()
        self._head = _literal_head(backend, added, self.control)
        size = self._head.get_vocab_size(with_added_tokens=False)
        self._max_id = max([size - 1, *added])
        self._decoded: dict[Ids, str] = {}
        self._anchors = self._order_anchors()

    def encode(self, text: str) -> list[int]:
        return self._head.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._head.decode(list(ids), skip_special_tokens=False)

    def encode_behind(self, texts: Sequence[str], anchor: str) -> list[Ids | None]:
        """Encode each text behind `anchor` and take the anchor's ids off again; None where the two
        run together."""
        head = self.encode(anchor) if anchor else []
        encoded = self._head.encode_batch_fast(
            [anchor + t for t in texts], add_special_tokens=False
        )
        rows = [e.ids for e in encoded]  # a copy each time it is asked for
        return [tuple(ids[len(head) :]) if ids[: len(head)] == head else None for ids in rows]

    def continuations(self, pairs: Iterable[tuple[Sequence[int], str]]) -> list[Ids | None]:
        """Each (prompt ids, text): the text's ids after that prompt, None where the law cannot be
        kept."""
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
        """Each (prompt ids, reply ids): the reply's text, and whether it carries the ids.

        It does not when there is a control token or an id without text among them, when a
        character is cut, or when the tokenizer itself cannot encode the text back.
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
            carries = ok and encoded is not None and self._is_plain(ids)
            if _REPLACEMENT in reply:
                # A cut character decodes to the same sign as a written one: only the ids tell.
                carries = carries and encoded == ids
            result.append((reply, carries))
        return result

    def shorten(self, prompt_ids: Sequence[int], token_ids: Sequence[int], limit: int) -> Ids:
        """The first `limit` ids or a few less, so that no character is cut."""
        prompt, ids = tuple(prompt_ids), tuple(token_ids)
        whole = self.decode(prompt + ids)
        for length in range(min(limit, len(ids)), 0, -1):
            if whole.startswith(self.decode(prompt + ids[:length])):
                return ids[:length]
        return ()

    def _is_plain(self, ids: Ids) -> bool:
        """Neither a control token nor an id without text (rows that only pad an embedding)."""
        return self.control.isdisjoint(ids) and (not ids or max(ids) <= self._max_id)

    def _decode_batch(self, rows: Sequence[Ids]) -> list[str]:
        return self._head.decode_batch([list(r) for r in rows], skip_special_tokens=False)

    def _decode_prompts(self, prompts: Sequence[Ids]) -> list[str]:
        """Samples come in groups: each prompt is decoded once."""
        new = [p for p in dict.fromkeys(prompts) if p not in self._decoded]
        if len(self._decoded) + len(new) > _CACHE:
            self._decoded.clear()
            new = list(dict.fromkeys(prompts))
        self._decoded.update(zip(new, self._decode_batch(new), strict=True))
        return [self._decoded[p] for p in prompts]

    def _order_anchors(self) -> tuple[str, ...]:
        """The plain encoding first, unless it breaks the law for the simplest of texts."""
        context = self.encode("a")
        plain = self.decode(context + self.encode("x")) == self.decode(context) + "x"
        return _ANCHORS if plain else (*_ANCHORS[1:], "")


def _literal_head(
    backend: Tokenizer, added: dict[int, AddedToken], control: frozenset[int]
) -> Tokenizer:
    """Told to, a tokenizer reads as text exactly the tokens marked special: so here exactly the
    control tokens are marked."""
    tokens = [
        AddedToken(
            t.content,
            single_word=t.single_word,
            lstrip=t.lstrip,
            rstrip=t.rstrip,
            normalized=t.normalized,
            special=i in control,
        )
        for i, t in sorted(added.items())
    ]
    head = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(backend, part) is not None:
            setattr(head, part, getattr(backend, part))
    head.add_tokens(tokens)
    if any(head.token_to_id(t.content) != i for i, t in added.items()):
        # Ids with gaps: only the written form keeps them, at the price of a copy.
        head = Tokenizer.from_str(backend.to_str())
        head.no_padding()
        head.no_truncation()
        head.add_tokens(tokens)
    head.encode_special_tokens = True
    return head
