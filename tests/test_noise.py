from math import sqrt

import torch

from hacrl.noise import exponential_noise, order_key, stream_key


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([stream_key(seed, "wren", 0, f"p{i}", 0) for i in range(count)])


def gumbel(keys_B: torch.Tensor, positions_B: torch.Tensor, words: int) -> torch.Tensor:
    return exponential_noise(keys_B, positions_B, words).log_().neg_()


def test_every_part_of_the_name_changes_the_key() -> None:
    base = (0, "wren", 3, "p", 1)
    others = [(1, "wren", 3, "p", 1), (0, "heron", 3, "p", 1), (0, "wren", 4, "p", 1)]
    others += [(0, "wren", 3, "q", 1), (0, "wren", 3, "p", 2)]
    assert len({stream_key(*name) for name in [base, *others]}) == 6
    assert stream_key(0, "ab", 1, "c", 0) != stream_key(0, "a", 1, "bc", 0)
    assert order_key(0, 1, "p") != order_key(0, 2, "p")


def test_noise_does_not_depend_on_the_batch() -> None:
    k = keys(6)
    positions = torch.tensor([0, 5, 2, 9, 1, 3])
    whole = gumbel(k, positions, 300)
    for row in (4, 1):
        alone = gumbel(k[row : row + 1], positions[row : row + 1], 300)
        assert torch.equal(alone[0], whole[row])
    assert torch.equal(gumbel(k, positions, 100), whole[:, :100])


def test_moments_are_gumbels() -> None:
    """Mean 0.5772, variance pi^2 / 6 = 1.6449; 600,000 draws, so +-5 standard errors are +-0.0083
    and (kurtosis 5.4 of the Gumbel) +-0.022."""
    noise = gumbel(keys(2000), torch.zeros(2000, dtype=torch.long), 300).double()
    assert abs(noise.mean().item() - 0.5772) < 0.0083
    assert abs(noise.var().item() - 1.6449) < 0.023
    assert torch.isfinite(noise).all()


def test_neighbours_are_independent() -> None:
    """Correlation between positions, between words and between rows: under 5 / sqrt(n)."""
    k = keys(200)
    zero = torch.zeros(200, dtype=torch.long)
    a, b = gumbel(k, zero, 300), gumbel(k, zero + 1, 300)

    def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
        return abs(torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1].item())

    bound = 5 / sqrt(200 * 299)
    assert correlation(a, b) < bound
    assert correlation(a[:, 1:], a[:, :-1]) < bound
    assert correlation(a[1:], a[:-1]) < bound


def test_gumbel_max_draws_the_softmax() -> None:
    """40,000 draws from p = (0.5, 0.3, 0.15, 0.04, 0.01): each fraction within 5 standard errors."""
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    k = keys(400).repeat_interleave(100)
    positions = torch.arange(100).repeat(400)
    drawn = (p.log() + gumbel(k, positions, 5)).argmax(1)
    fraction = torch.bincount(drawn, minlength=5) / len(drawn)
    for expected, seen in zip(p.tolist(), fraction.tolist(), strict=True):
        assert abs(expected - seen) < 5 * sqrt(expected * (1 - expected) / len(drawn))
