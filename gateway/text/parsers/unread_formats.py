"""Chat formats whose answers no parser here reads yet, by a marker in the chat template."""

UNREAD_FORMATS = {"harmony": "<|channel|>"}  # gpt-oss: thoughts, calls and answers are channels


def unread_format(template_source: str) -> str:
    """Return the format of a chat template if its answers cannot be read, else an empty string."""
    return next((name for name, marker in UNREAD_FORMATS.items() if marker in template_source), "")
