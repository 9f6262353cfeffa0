"""Lengths and rewards of the benchmarks, and what is sampled for them."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hacrl.noise import stream_key
from hacrl.sampling.base import Request

FILE = Path(__file__).parents[1] / "workload.json"
GROUP = 8


@dataclass(frozen=True)
class Trace:
    """Replies to write: for each prompt its ids, and for each of its replies a length and a reward.

    Example: Trace("short", prompts=((5, 9),), lengths=((3, 7),), rewards=((0, 1),))
    """

    name: str
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    rewards: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> list[tuple[tuple[int, ...], int]]:
        """(prompt ids, reply length) of every reply, group by group."""
        return [(p, n) for p, ns in zip(self.prompts, self.lengths, strict=True) for n in ns]

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counted once."""
        return sum(map(len, self.prompts))

    @property
    def reply_tokens(self) -> int:
        return sum(map(sum, self.lengths))

    @property
    def tokens(self) -> int:
        """Of all sequences, prompts and replies."""
        return sum(len(p) + n for p, n in self.rows)

    def requests(self, seed: int, agent: str = "bench") -> list[Request]:
        """With the length of a reply as its limit: a random model does not stop by itself."""
        return [
            Request(prompt, stream_key(seed, agent, 0, str(p), i), n)
            for p, (prompt, ns) in enumerate(zip(self.prompts, self.lengths, strict=True))
            for i, n in enumerate(ns)
        ]


def make_trace(
    variant: str,
    prompts: int,
    vocabulary: int,
    *,
    agent: int = 0,
    group: int = GROUP,
    length: int | None = None,
    scale: float = 1.0,
) -> Trace:
    """The first `prompts` of a variant with the replies of one agent (0 or 1); prompt ids are drawn.

    `length`: all replies this long. `scale`: shorter prompts and replies, for slow machines.
    """
    columns = json.loads(FILE.read_text())[variant]
    first = agent * GROUP

    def scaled(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(max(2, round(v * scale)) for v in values)

    drawn = random.Random(7)
    prompt_ids = tuple(
        tuple(drawn.randrange(vocabulary) for _ in range(n))
        for n in scaled(columns["prompt_tokens"][:prompts])
    )
    replies = [row[first : first + group] for row in columns["reply_tokens"][:prompts]]
    name = (
        f"{variant}{'' if scale == 1 else f' x {scale:g}'}" if length is None else f"{length} each"
    )
    return Trace(
        name=name,
        prompts=prompt_ids,
        lengths=tuple(scaled(r) if length is None else (length,) * group for r in replies),
        rewards=tuple(tuple(row[first : first + group]) for row in columns["rewards"][:prompts]),
    )
