"""Chat-format rows: a column of messages, [{"role": "user", "content": "17 + 25?"}, ...]."""

from typing import Any

from hacrl.errors import UserError
from hacrl.types import Message

ROLES = ("system", "user", "assistant")


def read_messages(value: Any, where: str) -> tuple[tuple[Message, ...], str | None]:
    """Return the conversation up to the reply, and the reply if the row ends with one.

    The conversation ends with a message of the user; a system message stands first. `where` names
    row and column in a UserError.
    """
    if not isinstance(value, list) or not value:
        raise UserError(
            f"{where}: must be a list of messages {{role, content}}, not {_short(value)}"
        )
    messages = tuple(_message(part, f"{where}, message {i}") for i, part in enumerate(value, 1))
    reply = None
    if messages[-1].role == "assistant":
        reply, messages = messages[-1].content, messages[:-1]
    if not messages or messages[-1].role != "user":
        raise UserError(f"{where}: no message of the user before the reply; the last one asks")
    if any(message.role == "system" for message in messages[1:]):
        raise UserError(f"{where}: a system message must be the first one")
    return messages, reply


def _message(part: Any, where: str) -> Message:
    if not isinstance(part, dict) or not {"role", "content"} <= part.keys():
        raise UserError(f"{where}: needs role and content, not {_short(part)}")
    role, content = part["role"], part["content"]
    if role not in ROLES:
        raise UserError(f"{where}: role {role!r} is not one of {', '.join(ROLES)}")
    if not isinstance(content, str) or not content.strip():
        raise UserError(f"{where}: content must be text, not {_short(content)}")
    return Message(role, content)


def _short(value: Any) -> str:
    return f"{value!r:.80}"
