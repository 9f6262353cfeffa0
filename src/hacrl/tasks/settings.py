"""STUB by the lead, to be overwritten by helper realmodels."""
from __future__ import annotations
from pydantic import BaseModel, ConfigDict
class TaskConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    kind: str = "arithmetic"
    operations: tuple[str, ...] = ("add", "sub", "mul")
