"""All kinds of answers by name."""

from gateway.apis.anthropic.kinds import MESSAGE
from gateway.apis.chat.kinds import CHAT, COMPLETION
from gateway.apis.responses.kinds import COMPACTION, RESPONSE

ALL_KINDS = {kind.name: kind for kind in (CHAT, COMPLETION, MESSAGE, RESPONSE, COMPACTION)}
