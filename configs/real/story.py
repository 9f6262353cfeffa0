"""The reward of configs/real/long.toml."""

from fractions import Fraction

from hacrl.verify.number import numbers_in

MIN_WORDS = 32


def score(completion: str, answer: str, **columns: object) -> float:
    """1 if the first number after "The answer is" is right and MIN_WORDS words or more stand before."""
    story, _, rest = completion.partition("The answer is")
    right = next(numbers_in(rest), None) == Fraction(answer)
    return float(right and len(story.split()) >= MIN_WORDS)
