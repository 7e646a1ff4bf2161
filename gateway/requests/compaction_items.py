"""Items that stand for a conversation: a summary as text that clients hand back as it is. Pure.

OpenAI encrypts it. Here it is the client's own conversation, summed up by its own request, so it is only wrapped: any
gateway of any release can read it, and no key has to be kept for it.

Used at both ends of /v1/responses: responses_items.py unwraps it on a request's way in, answers/compaction_format.py
wraps it on an answer's way out. It knows nothing of prompts, templates or the store.
"""

import base64
import binascii

_PREFIX = "pagestream1."


def wrapped(summary: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(summary.encode()).decode()


def unwrapped(content: str) -> str:
    """Raises ValueError for what is not made by wrapped()."""
    if not content.startswith(_PREFIX):
        raise ValueError("not made by this server")
    try:
        return base64.b64decode(content[len(_PREFIX) :], altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ValueError("damaged") from error
