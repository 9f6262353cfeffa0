"""The last of something: answers stand at the end of a reply."""

from __future__ import annotations

import re
from collections import deque


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of a pattern, or None.

    Example: last_match(re.compile("[0-9]"), "1 2 3").group() == "3"
    """
    tail = deque(pattern.finditer(text), maxlen=1)
    return tail[0] if tail else None
