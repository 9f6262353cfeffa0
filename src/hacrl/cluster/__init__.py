"""Agents as Ray actors, on one machine or on many."""
