"""Text <-> ids for one agent: the only module that knows chat templates and special tokens.

It follows the rendering law of hacrl/text/__init__.py. literal.py encodes and decodes; this module adds
the turns around it.

A control token is a token that the tokenizer marks as special, an end token, a token that looks like
a marker (`<|...|>`, `[INST]`, `<unused7>`: some tokenizers do not mark these), or one that the chat
template puts around a user turn. Other added tokens (runs of white space, `<think>`) are ordinary
words: published as text, read back as the same token.
"""

import ctypes
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hacrl.errors import UserError, describe
from hacrl.text.literal import Ids, LiteralCoder
from hacrl.types import Finish, Message, Rollout

TEMPLATES: dict[str, str] = {
    # Question and answer, for base models without a chat template.
    "plain": (
        "{% for m in messages %}"
        "{% if m['role'] == 'user' %}Question: {{ m['content'] }}\n"
        "{% elif m['role'] == 'assistant' %}Answer: {{ m['content'] }}\n\n"
        "{% else %}{{ m['content'] }}\n\n{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}Answer:{% endif %}"
    ),
    # Only the messages, one per line.
    "bare": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
}
"""Templates that a config can name instead of jinja text."""

_MARKER = re.compile(r"<[|\uff5c].+[|\uff5c]>|\[/?[A-Z_]+\]|<(unused|reserved)[^>]*>")
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
"""Private-use characters around placeholders for control strings while a template is rendered."""
TEMPLATE_SECONDS = 10.0
LEAST_SCORE = -100.0
"""The median log-probability of a Unigram model's tokens is far above this."""
_DAY = datetime(2024, 7, 26)
"""The date for templates that write one: a prompt must not change with the day of the run."""


@dataclass(frozen=True)
class RenderSettings:
    """How an agent is prompted.

    Example: RenderSettings(system="Be brief.", template="plain", reply_start=" The answer is")
    """

    system: str | None = None  # system message before the problem's messages
    template: str | None = None
    """A name of TEMPLATES or jinja text; None: the tokenizer's chat template."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template, e.g. {"enable_thinking": False}."""
    reply_start: str = ""  # beginning of the reply: part of the prompt, continued by the model


def load_tokenizer(model: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model folder or hub name. A `tokenizer.json` is loaded without the
    class named in the config: transformers 5 would read DeepSeek's file as a SentencePiece one."""
    path = Path(model)
    if path.is_dir() and not any(path.glob("tokenizer*")) and not any(path.glob("vocab*")):
        raise UserError(
            f"model folder {str(model)!r} has no tokenizer (no tokenizer.json): "
            "copy the tokenizer files of the base model into it"
        )
    try:
        tokenizer = _load_tokenizer(path, str(model), trust_remote_code)
    except (OSError, ValueError) as problem:
        raise UserError(f"tokenizer of {str(model)!r} cannot be loaded: {problem}") from problem
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and isinstance(backend.model, Unigram):
        _check_scores(backend, str(model))
    return tokenizer


def _load_tokenizer(path: Path, model: str, trust_remote_code: bool) -> Any:
    if (path / "tokenizer.json").is_file() or not path.is_dir():
        try:
            return PreTrainedTokenizerFast.from_pretrained(model)
        except (OSError, ValueError):
            if path.is_dir():
                raise  # on the hub there may be other files
    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def _check_scores(backend: Tokenizer, model: str) -> None:
    """Refuse a BPE tokenizer that was converted to Unigram: its scores are ranks of merges, and it
    splits words into many short tokens that the model has seldom seen."""
    typical = median(score for _, score in json.loads(backend.to_str())["model"]["vocab"])
    if typical < LEAST_SCORE:
        raise UserError(
            f"tokenizer of {model!r} is a Unigram model whose scores are no log-probabilities (median "
            f"{typical:.0f}). It was probably converted wrongly from a GGUF file: use the "
            "tokenizer.json of the original model"
        )


class Renderer:
    """Prompts and replies of one agent as token ids.

    Example: Renderer(load_tokenizer("Qwen/Qwen3-1.7B"), RenderSettings()).prompt(problem.messages)
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: RenderSettings | None = None,
        end_ids: Sequence[int] | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UserError(
                f"tokenizer {type(tokenizer).__name__} is not a fast tokenizer, which hacrl needs to "
                "control special tokens: convert it and save a tokenizer.json"
            )
        self.tokenizer = tokenizer
        self.settings = settings or RenderSettings()
        self.template = _find_template(tokenizer, self.settings)
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._added: dict[int, AddedToken] = self._backend.get_added_tokens_decoder()
        self._check_template_ends()
        self._template_end = self._find_template_end()
        self.end_ids: Ids = self._find_end_ids(end_ids)
        pad = tokenizer.pad_token_id
        self.pad_id: int = int(pad) if pad is not None else self.end_ids[0]
        """Rows are masked by length, so the pad token may equal an end token."""
        control = self._find_control()
        self._coder = LiteralCoder(self._backend, control)
        self._markers = {self._added[i].content: i for i in control if i in self._added}
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._marker_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._hidden_pattern = re.compile(f"{self._marker_pattern.pattern}|{_OPEN}")
        if self._marker_pattern.search(self.settings.reply_start):
            raise UserError(
                f"reply_start {self.settings.reply_start!r} contains a control token: write it "
                "into `template` instead"
            )
        self._bos = self._find_bos()
        self._cached_prompt = lru_cache(maxsize=4096)(self._render_prompt)

    def prompt(self, messages: Sequence[Message]) -> Ids:
        """The ids of system text, messages and `reply_start`, with at most one BOS. Control tokens
        written inside a message stay plain text."""
        return self._cached_prompt(tuple(messages))

    def _render_prompt(self, messages: tuple[Message, ...]) -> Ids:
        turns = [{"role": m.role, "content": m.content} for m in messages]
        if self.settings.system is not None:
            system = self.settings.system
            if turns and turns[0]["role"] == "system":  # the agent's system text, then the task's
                system = f"{system}\n\n{turns.pop(0)['content']}"
            turns.insert(0, {"role": "system", "content": system})
        hidden: list[str] = []
        for turn in turns:
            turn["content"] = self._hide(turn["content"], hidden)
        text = self._apply(turns, add_generation_prompt=True)
        text += self._hide(self.settings.reply_start, hidden)
        ids = self._encode_hidden(text, hidden) if hidden else self._encode(text)
        if self._bos is not None and ids[:1] != (self._bos,):
            ids = (self._bos, *ids)
        return ids

    def _hide(self, content: str, hidden: list[str]) -> str:
        """Replace control strings by placeholders and append them to `hidden`."""

        def swap(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"{_OPEN}{len(hidden) - 1}{_CLOSE}"

        return self._hidden_pattern.sub(swap, content)

    def _encode_hidden(self, text: str, hidden: list[str]) -> Ids:
        """Encode a rendered prompt whose messages contain control strings.

        Only control strings of the template become control tokens. The text is split at them, as
        the tokenizer does, and each stretch between them is encoded as plain text.
        """
        ids: list[int] = []
        start, strip = 0, False
        for match in [*self._marker_pattern.finditer(text), None]:
            stretch = text[start : match.start()] if match else text[start:]
            marker = self._markers[match.group()] if match else None
            stretch = stretch.lstrip() if strip else stretch
            if marker is not None and self._added[marker].lstrip:
                stretch = stretch.rstrip()
            stretch = re.sub(f"{_OPEN}([0-9]+){_CLOSE}", lambda m: hidden[int(m[1])], stretch)
            if stretch:
                ids += self._encode_stretch(stretch, first=not ids)
            if match and marker is not None:
                ids.append(marker)
                start, strip = match.end(), self._added[marker].rstrip
        return tuple(ids)

    def _encode_stretch(self, text: str, *, first: bool) -> Sequence[int]:
        """Plain text between control tokens, as the tokenizer splits it there."""
        ids: Sequence[int] = self._coder.encode(text)
        # Some tokenizers add a space only at the start of a text, others after every control
        # token: test with a letter.
        marker = next(iter(self._markers), "")
        if not first and self._encode(marker + "x")[1:] != tuple(self._coder.encode("x")):
            ids = self._coder.encode_behind([text], "a")[0] or ids
        if self._coder.control.isdisjoint(ids) or len(text) == 1:
            return ids
        # A unigram model may find a control token in plain letters: encode letter by letter.
        done = [*self._encode_stretch(text[0], first=first)]
        for letter in text[1:]:
            done += self._coder.continuations([(done, letter)])[0] or self._coder.encode(letter)
        return done

    def _encode(self, text: str) -> Ids:
        """The tokenizer's encoding: control tokens parsed, none added, no warning about length."""
        options = {"add_special_tokens": False, "split_special_tokens": False, "verbose": False}
        return tuple(self.tokenizer.encode(text, **options))

    def _apply(self, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                turns,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **{"strftime_now": _DAY.strftime, **self.settings.template_args},
            )
        except MemoryError:
            raise
        except Exception as problem:  # a template can raise anything, e.g. 1 / 0
            roles = [t["role"] for t in turns]
            raise UserError(
                f"the chat template rejects messages with the roles {roles}: {describe(problem)}. "
                "Remove `system` if the template has no system turn, or set another `template`"
            ) from problem

    def text(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> tuple[str, bool]:
        """The reply without its end token, and whether the text reproduces the reply (`shareable`)."""
        return self.texts([(prompt_ids, token_ids)])[0]

    def texts(self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[str, bool]]:
        """`text` for many (prompt ids, reply ids) at once, which is much faster."""
        return self.whole_texts((p, r[:-1] if r and r[-1] in self.end_ids else r) for p, r in pairs)

    def whole_texts(
        self, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]
    ) -> list[tuple[str, bool]]:
        """`texts` of replies without their end token: a control token is not shareable anywhere."""
        return self._coder.texts(pairs)

    def is_control(self, token_id: int) -> bool:
        return token_id in self._coder.control

    def continuation(self, prompt_ids: Sequence[int], text: str) -> Ids | None:
        """The ids of a peer's text after this prompt; None if the rendering law cannot be kept."""
        return self.continuations([(prompt_ids, text)])[0]

    def continuations(self, pairs: Iterable[tuple[Sequence[int], str]]) -> list[Ids | None]:
        """`continuation` for many (prompt ids, text) at once, which is much faster."""
        return self._coder.continuations(pairs)

    def shorten(self, prompt_ids: Sequence[int], token_ids: Sequence[int], limit: int) -> Ids:
        """The first `limit` ids of a reply, or a few less so that the last character is complete."""
        return self._coder.shorten(prompt_ids, token_ids, limit)

    def end_token(self, rollouts: Iterable[Rollout]) -> int:
        """The end token for peers' replies: the most frequent one of the learner's own rollouts (ties:
        the smaller id), else the chat template's, else the tokenizer's."""
        seen = Counter(
            r.completion.token_ids[-1]
            for r in rollouts
            if r.completion.finish is Finish.STOP and r.completion.token_ids
        )
        own = [i for i in seen if i in self.end_ids]
        if own:
            return min(own, key=lambda i: (-seen[i], i))
        if self._template_end is not None:
            return self._template_end
        eos = self.tokenizer.eos_token_id
        return eos if eos in self.end_ids else self.end_ids[0]

    @cached_property
    def vocabulary_hash(self) -> str:
        """Equal for tokenizers with equal vocabulary, merges and added tokens."""
        spec = self._backend.to_str()
        digest = hashlib.sha256(spec[spec.index('"model":{') :].encode())
        for i, token in sorted(self._added.items()):
            digest.update(f"\n{i} {token.content} {int(token.special)}".encode())
        return f"sha256:{digest.hexdigest()}"

    def _check_template_ends(self) -> None:
        """Apply the template once, in a thread, with a time limit."""

        def apply() -> None:
            with suppress(UserError, SystemExit):  # `_find_control` reports an error
                self._apply([{"role": "user", "content": "hi"}], add_generation_prompt=True)

        thread = threading.Thread(target=apply, daemon=True)
        thread.start()
        thread.join(TEMPLATE_SECONDS)
        if thread.is_alive():
            ident, stop = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, stop)
            raise UserError(
                f"template: the chat template does not end within {TEMPLATE_SECONDS:g} seconds. Look "
                "for loops over large ranges"
            )

    def _find_template_end(self) -> int | None:
        """The token that the template writes directly after a finished reply, if any."""
        probe = "zqxj"
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": probe}]
        try:
            text = self._apply(turns, add_generation_prompt=False)
        except UserError:
            return None  # the template has no assistant turn
        after = text.rpartition(probe)[2] if probe in text else ""
        first = self._encode(after)[:1] if after else ()
        return next((i for i in first if i in self._added and not after[0].isspace()), None)

    def _find_end_ids(self, given: Sequence[int] | None) -> Ids:
        eos = self.tokenizer.eos_token_id
        ends = list(given) if given else ([eos] if eos is not None else [])
        if self._template_end is not None:
            # The generation config of a base model may not list it.
            ends.append(self._template_end)
        if not ends:
            raise UserError(
                "tokenizer without end token: set eos_token in tokenizer_config.json or "
                "eos_token_id in generation_config.json to the token that ends a reply"
            )
        return tuple(dict.fromkeys(int(i) for i in ends))

    def _find_control(self) -> set[int]:
        control = {i for i, t in self._added.items() if t.special or _MARKER.fullmatch(t.content)}
        frame = self._apply([{"role": "user", "content": "hi"}], add_generation_prompt=False)
        in_frame = {i for i in self._encode(frame) if i in self._added}
        blank = {i for i in in_frame if self._added[i].content.isspace()}
        return control | set(self.end_ids) | (in_frame - blank)

    def _find_bos(self) -> int | None:
        """The BOS id if the tokenizer puts one before a text; `prompt` checks whether the template
        has already written it."""
        bos = self.tokenizer.bos_token_id
        adds = bos is not None and self.tokenizer.encode("x")[:1] == [bos]
        return int(bos) if adds else None


def _find_template(tokenizer: Any, settings: RenderSettings) -> str:
    given = settings.template
    if given is not None:
        if given not in TEMPLATES and "{" not in given:
            raise UserError(
                f"template = {given!r} is neither jinja text nor one of {sorted(TEMPLATES)}"
            )
        return TEMPLATES.get(given, given)
    own = tokenizer.chat_template
    if not own:
        raise UserError(
            "the tokenizer has no chat template: set `template` to one of "
            f"{sorted(TEMPLATES)} or to jinja text"
        )
    return own["default"] if isinstance(own, dict) else own
