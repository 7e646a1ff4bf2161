"""Log-probabilities of the tokens of one step, for the rows that ask: the chosen token's, and the likeliest tokens' or
those of tokens that the request names.

They are the log-softmax of the model's own logits: before bias, penalties, temperature and truncation, which is what
OpenAI and vLLM report. Knows nothing of how a token was chosen.
"""

from dataclasses import dataclass

from torch import Tensor

from engine_worker.execution.sampling_inputs import LogprobRows
from shared.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    asked: LogprobRows
    rows: Tensor  # [P] int64
    chosen: Tensor  # [P] float32
    top: Tensor  # [P, K] float32, descending; K = the most that a row asks for
    top_token_ids: Tensor  # [P, K] int64
    named: Tensor  # [P, A] float32; A = 0 where nobody names tokens

    def to_host(self) -> "DeviceLogprobs":
        """Enqueues the copies; nothing waits."""
        tensors = (self.rows, self.chosen, self.top, self.top_token_ids, self.named)
        return DeviceLogprobs(self.asked, *(tensor.to("cpu", non_blocking=True) for tensor in tensors))

    def per_row(self, num_rows: int) -> list[TokenLogprobs | None]:
        answers: list[TokenLogprobs | None] = [None] * num_rows
        columns = (self.rows, self.chosen, self.top, self.top_token_ids, self.named)
        values = zip(self.asked.num_top, self.asked.named, *(column.tolist() for column in columns), strict=True)
        for num_top, names, row, chosen, top, top_token_ids, named in values:
            if names:
                answers[row] = TokenLogprobs(chosen, list(names), named[: len(names)])
            else:
                answers[row] = TokenLogprobs(chosen, top_token_ids[:num_top], top[:num_top])
        return answers


def launch_logprobs(logits: Tensor, token_ids: Tensor, asked: LogprobRows) -> DeviceLogprobs:
    """`logits` [N, V] as the model gave them, `token_ids` [N] int64 as they were chosen."""
    raw = logits[asked.rows].float()
    log_mass = raw.logsumexp(dim=-1, keepdim=True)
    chosen = raw.gather(1, token_ids[asked.rows, None]) - log_mass
    top, top_token_ids = raw.topk(max(asked.num_top), dim=-1)
    named = raw[:, :0] if asked.named_token_ids is None else raw.gather(1, asked.named_token_ids) - log_mass
    return DeviceLogprobs(asked, asked.rows, chosen.squeeze(1), top - log_mass, top_token_ids, named)
