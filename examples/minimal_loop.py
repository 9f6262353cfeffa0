"""HACPO on one page: two tiny models learn from each other's replies.

    python examples/minimal_loop.py

Each step, both agents answer the same problems, a verifier rewards the replies, and each agent makes
two updates: one on its own replies, one on the replies of its peer. Models, tokenizers, problems and
verifier come from hacrl; sampling, credit, loss and updates are written out here. There is no KV
cache, no batching, no journal, no pool and no checkpoint. `hacrl train` computes the same losses
(tests/test_examples.py) and is much faster. Equation numbers are those of arXiv 2603.02604.
"""

from dataclasses import dataclass
from statistics import mean, stdev

import torch
from transformers import AutoModelForCausalLM

from hacrl.noise import exponential_noise, stream_key
from hacrl.pocket import pocket_path
from hacrl.tasks.arithmetic import ArithmeticTask
from hacrl.text.render import Renderer, load_tokenizer
from hacrl.types import Problem
from hacrl.verify.number import NumberVerifier

SEED = 0
TEAM = ("wren", "finch")  # models that come with hacrl, with different tokenizers
STEPS = 3
PROMPTS = 6  # problems per step
SAMPLES = 8  # replies of each agent to a problem
MAX_TOKENS = 48  # longest reply
LEARNING_RATE = 2e-4
EPSILON_LOW, EPSILON_HIGH = 3e-3, 4e-3  # clip of an agent's own samples
FLOOR = 0.875  # a peer's sample counts if its ratio is between FLOOR and 1
ALPHA = 1.0  # exponent of a peer's ratio
WINDOW = 5  # steps that capability is averaged over


@dataclass
class Reply:
    """A reply to a problem, with what its author publishes about it."""

    problem: Problem
    author: str
    ids: list[int]  # tokens of the author; they mean nothing to other agents
    text: str
    exact: bool  # the text determines the tokens (no control token, no broken character)
    finished: bool  # ended with an end token, not at MAX_TOKENS
    mean_logprob: float
    reward: float


class Agent:
    def __init__(self, name: str) -> None:
        self.name = name
        self.model = AutoModelForCausalLM.from_pretrained(pocket_path(name)).float().eval()
        self.renderer = Renderer(load_tokenizer(pocket_path(name)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.rewards: list[float] = []  # mean reward of each step

    @torch.no_grad()
    def answer(self, problem: Problem, step: int, index: int, verifier: NumberVerifier) -> Reply:
        """Sample one reply and let the verifier reward it."""
        prompt = list(self.renderer.prompt(problem.messages))
        key = torch.tensor([stream_key(SEED, self.name, step, problem.id, index)])
        ids: list[int] = []
        while len(ids) < MAX_TOKENS and not (ids and ids[-1] in self.renderer.end_ids):
            logits = self.model(torch.tensor([prompt + ids])).logits[:, -1]
            # argmax(p / exponential noise) is a draw from p (Gumbel-max without logarithms).
            noise = exponential_noise(key, torch.tensor([len(ids)]), logits.shape[1])
            ids.append(int((logits.softmax(1) / noise).argmax()))
        text, exact = self.renderer.text(prompt, ids)
        return Reply(
            problem=problem,
            author=self.name,
            ids=ids,
            text=text,
            exact=exact,
            finished=ids[-1] in self.renderer.end_ids,
            mean_logprob=self.mean_logprob(problem, ids).item(),
            reward=verifier.judge(text, problem).reward,
        )

    def mean_logprob(self, problem: Problem, ids: list[int]) -> torch.Tensor:
        """Mean log-probability of a reply's tokens at the current weights."""
        prompt = list(self.renderer.prompt(problem.messages))
        logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(1).gather(1, torch.tensor(ids)[:, None]).mean()

    def learn(self, replies: list[Reply], capability: dict[str, float]) -> list[float]:
        """One update on own replies, then one on peers' replies. Returns the two losses."""
        own = [reply for reply in replies if reply.author == self.name]
        peers = [reply for reply in replies if reply.author != self.name]
        return [self.update(part, replies, capability) for part in (own, peers)]

    def update(
        self, part: list[Reply], replies: list[Reply], capability: dict[str, float]
    ) -> float:
        """One optimizer step on the mean loss of `part`. `replies` are all replies of the step."""
        samples = [(reply, ids) for reply in part if (ids := self.tokenize(reply)) is not None]
        total = 0.0
        for reply, ids in samples:
            a = self.advantage(reply, replies, capability)
            s = (self.mean_logprob(reply.problem, ids) - reply.mean_logprob).exp()  # (11)
            if reply.author == self.name:
                objective = torch.min(s * a, s.clamp(1 - EPSILON_LOW, 1 + EPSILON_HIGH) * a)  # (47)
            else:
                weight = ratio(capability[reply.author], capability[self.name])  # (8)
                t = s.clamp(FLOOR, 1.0)  # (13): no gradient outside of [FLOOR, 1]
                objective = t * t.detach() ** ALPHA * weight * a  # (10, 12)
            loss = -objective / len(samples)  # (53)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def tokenize(self, reply: Reply) -> list[int] | None:
        """The reply in this agent's tokens: its own as sampled, a peer's from the text. None if no
        exact tokens exist, or too many."""
        if reply.author == self.name:
            return reply.ids
        prompt = self.renderer.prompt(reply.problem.messages)
        ids = self.renderer.continuation(prompt, reply.text) if reply.exact else None
        if ids is None:
            return None
        ids = [*ids, *self.renderer.end_ids[:1]] if reply.finished else list(ids)
        return ids if 0 < len(ids) <= MAX_TOKENS else None

    def advantage(self, reply: Reply, replies: list[Reply], capability: dict[str, float]) -> float:
        """The reward relative to all replies to the problem, each scaled to this agent's level."""
        group = [other for other in replies if other.problem.id == reply.problem.id]
        rewards = [other.reward for other in group]
        if min(rewards) == max(rewards):
            return 0.0
        level = {name: ratio(capability[self.name], p) for name, p in capability.items()}
        baseline = mean(level[other.author] * other.reward for other in group)  # (7)
        if baseline > 1.0:  # above the largest reward: even a right reply would be punished
            baseline = mean(other.reward for other in group if other.author == self.name)
        return (reply.reward - baseline) / (stdev(rewards) + 1e-6)  # (6)


def ratio(p_a: float, p_b: float) -> float:
    """Capability of one agent relative to another, clamped to [0.1, 10] (8)."""
    return min(max(max(p_a, 1e-8) / max(p_b, 1e-8), 0.1), 10.0)


def train(steps: int = STEPS) -> list[dict[str, list[float]]]:
    """Train the team. Returns {agent: [loss on own replies, loss on peers' replies]} of each step."""
    task, verifier, team = ArithmeticTask(SEED), NumberVerifier(), [Agent(name) for name in TEAM]
    history = []
    for step in range(steps):
        problems = task.batch(step, PROMPTS)
        replies = [
            agent.answer(problem, step, i, verifier)
            for agent in team
            for problem in problems
            for i in range(SAMPLES)
        ]
        for agent in team:
            agent.rewards.append(mean(r.reward for r in replies if r.author == agent.name))
        capability = {agent.name: mean(agent.rewards[-WINDOW:]) for agent in team}  # (9)
        history.append({agent.name: agent.learn(replies, capability) for agent in team})
        for agent in team:
            own, peers = history[-1][agent.name]
            print(f"step {step + 1}  {agent.name:6} reward {agent.rewards[-1]:.2f}", end="  ")
            print(f"loss on own replies {own:+.4f}, on peers' {peers:+.4f}")
    return history


if __name__ == "__main__":
    train()
