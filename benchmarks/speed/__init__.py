"""The benchmarks of rollouts, scoring, updates and steps; run by benchmarks/bench.py."""
