"""OpenAI's text completions."""

from gateway.apis.completions.kinds import COMPLETION
from gateway.apis.completions.schema import CompletionBody
from gateway.apis.completions.shapes import TextCompletionBody
from gateway.pipeline.api import Api
from gateway.pipeline.submit import generating

API = Api(
    operations=(
        generating(
            "/v1/completions",
            COMPLETION,
            "Complete texts or token ids; with `stream`, as events",
            body=CompletionBody,
            shape=TextCompletionBody,
        ),
    ),
    kinds=(COMPLETION,),
)
