"""Benchmarks: evaluate each agent alone, keep every reply.

OUT/BENCHMARK/AGENT/settings.json   the settings, written first
OUT/BENCHMARK/AGENT/replies.jsonl   every reply with its verdict
OUT/BENCHMARK/AGENT/result.json     the figures, written last: the benchmark is finished
OUT/summary.json, OUT/summary.md    all benchmarks and agents in one table
OUT/times.jsonl                     seconds and tokens, chunk by chunk
"""
