"""Log-probabilities of the tokens of one step, for the rows that ask: the chosen token's, and the likeliest tokens' or
those of tokens that the request names.

They are the log-softmax of the model's own logits: before bias, penalties, temperature and truncation, which is what
OpenAI and vLLM report. Of equal ones the chosen token is listed first, then the one of the lower id. Knows nothing of
how a token was chosen. It is used by the sampler on a token's way back, in steps where a row asks.
"""

import math
from dataclasses import dataclass
from operator import le

from torch import Tensor

from engine_worker.execution.sampling_inputs import LogprobRows
from shared.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    asked: LogprobRows
    rows: Tensor  # [P] int64
    token_ids: Tensor  # [P] int64, the chosen
    chosen: Tensor  # [P] float32
    top: Tensor  # [P, K] float32, descending; K = the most that a row asks for
    top_token_ids: Tensor  # [P, K] int64
    named: Tensor  # [P, A] float32; A = 0 where nobody names tokens

    def to_host(self) -> "DeviceLogprobs":
        """Enqueues the copies; nothing waits."""
        tensors = (self.rows, self.token_ids, self.chosen, self.top, self.top_token_ids, self.named)
        return DeviceLogprobs(self.asked, *(tensor.to("cpu", non_blocking=True) for tensor in tensors))

    def per_row(self, num_rows: int) -> list[TokenLogprobs | None]:
        answers: list[TokenLogprobs | None] = [None] * num_rows
        columns = (self.rows, self.token_ids, self.chosen, self.top, self.top_token_ids, self.named)
        values = zip(self.asked.num_top, self.asked.named, *(column.tolist() for column in columns), strict=True)
        for num_top, names, row, token_id, chosen, top, top_token_ids, named in values:
            if names:
                answers[row] = TokenLogprobs(chosen, tuple(names), tuple(named[: len(names)]))
            else:
                answers[row] = _ranked(token_id, chosen, top_token_ids, top, num_top)
        return answers


def _ranked(token_id: int, chosen: float, top_token_ids: list[int], top: list[float], num_top: int) -> TokenLogprobs:
    if any(map(le, top, top[1:])):  # topk() has equal ones in any order, and the chosen one a step before its place
        ranked = sorted(zip(top, top_token_ids, strict=True), key=lambda pair: (-pair[0], pair[1] != token_id, pair[1]))
        top, top_token_ids = [value for value, _ in ranked], [other for _, other in ranked]
    return TokenLogprobs(chosen, tuple(top_token_ids[:num_top]), tuple(top[:num_top]))


def launch_logprobs(logits: Tensor, token_ids: Tensor, asked: LogprobRows) -> DeviceLogprobs:
    """`logits` [N, V] as the model gave them, `token_ids` [N] int64 as they were chosen."""
    raw = logits[asked.rows].float()  # a copy
    # Not logsumexp(): torch shares a single row out among threads or blocks, which changes the last bits.
    log_probs = raw.log_softmax(dim=-1)
    ids = token_ids[asked.rows, None]
    named = raw[:, :0] if asked.named_token_ids is None else log_probs.gather(1, asked.named_token_ids)
    # topk() takes any of equal scores: the chosen token's is one step greater, so that the list has it.
    raw.scatter_(1, ids, raw.gather(1, ids).nextafter(raw.new_tensor(math.inf)))
    top_token_ids = raw.topk(max(asked.num_top), dim=-1).indices
    chosen, top = log_probs.gather(1, ids), log_probs.gather(1, top_token_ids)
    return DeviceLogprobs(asked, asked.rows, ids.squeeze(1), chosen.squeeze(1), top, top_token_ids, named)
