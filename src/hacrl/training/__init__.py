"""One training run: start with loop.py (the team) and agent.py (one agent)."""
