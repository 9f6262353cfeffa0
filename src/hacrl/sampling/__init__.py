"""Sampling replies: the interface (base.py), the built-in engine (engine.py), and vLLM (vllm.py)."""
