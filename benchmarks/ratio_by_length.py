"""HACPO's ratio s of peers' replies by reply length, without training.

    python benchmarks/ratio_by_length.py configs/real/arithmetic.toml --limits 8,32,128 [key=value]

One step of naive sharing for each limit of reply tokens, with a learning rate that moves nothing. A
reward that depends on the text alone gives every group two rewards, so that no reply is left out. Each
line: the learner, the source, the range of reply lengths in the source's tokens, the number of replies,
the 10th, 50th and 90th percentile of s, and the percentage inside hacpo's [0.8, 1].
"""

import argparse
import tempfile
from collections import defaultdict
from hashlib import blake2b
from pathlib import Path

import hacrl
from hacrl.config import dump_config, load_config
from hacrl.store.reader import RunReader
from hacrl.study.inspect.samples import find_samples

OVERRIDES = (
    "steps=1 algorithm.name=naive agents.*.learning_rate=1e-12 evaluation.problems=0 log.samples=true "
    "log.tensorboard=false checkpoint.save=false verifier.kind=function"
)
EDGES = (1, 5, 9, 17, 33, 65, 129, 257, 513)


def coin(completion: str, **columns: object) -> float:
    """0 or 1 by a hash of the text."""
    return float(blake2b(completion.encode(), digest_size=1).digest()[0] % 2)


def ratios(run: Path) -> dict[tuple[str, str, int], list[float]]:
    """(learner, source, first length of its range) -> ratios of the replies."""
    found: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    step = find_samples(RunReader.open(run), None, None, None, print)
    for group in step.groups:
        for t in group.judged:
            for learner, rows in step.learners.items():
                row = rows.get((t.problem_id, t.agent, t.index))
                if learner != t.agent and row is not None and row["ratio"] is not None:
                    low = max(e for e in EDGES if e <= t.num_tokens)
                    found[learner, t.agent, low].append(row["ratio"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--limits", default="8,32,128")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args()
    path = f"{Path(__file__).resolve().with_suffix('')}:coin"
    for limit in map(int, given.limits.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            overrides = [*OVERRIDES.split(), f"max_response_tokens={limit}", *given.overrides]
            config = load_config(given.config, [*overrides, f'verifier.options={{path="{path}"}}'])
            toml = Path(folder) / "config.toml"
            toml.write_text(dump_config(config))
            hacrl.train(str(toml), f"{folder}/run")
            print(f"replies of at most {limit} tokens")
            for (learner, source, low), s in sorted(ratios(Path(folder) / "run").items()):
                s.sort()
                at = (s[int(q * (len(s) - 1))] for q in (0.1, 0.5, 0.9))
                inside = 100 * sum(0.8 <= x <= 1 for x in s) / len(s)
                row = " ".join(f"{x:.3f}" for x in at)
                high = EDGES[EDGES.index(low) + 1] - 1 if low != EDGES[-1] else "."
                print(
                    f"{learner} reads {source}, {low}-{high} tokens, {len(s)}: {row}; {inside:.1f} %"
                )


if __name__ == "__main__":
    main()
