"""Agents side by side: in processes of this machine (processes.py), or as Ray actors (executor.py)."""
