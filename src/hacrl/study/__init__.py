"""Everything that reads finished runs or asks models questions."""
