"""Log-probabilities of the tokens of one step, for rows that request them.

Each row reports the chosen token's, and those of the top tokens or of tokens that the request names. They are the
log-softmax of the model's logits before bias, penalties, temperature, and truncation, as in OpenAI's API and vLLM.
Among equal ones the chosen token comes first, then the lower token id.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.execution.sampling.sampling_inputs import LogprobRows
from kernels.sampling.log_normalizers import log_normalizers, top_scores
from shared.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    asked: LogprobRows
    rows: Tensor  # [P] int64
    token_ids: Tensor  # [P] int64, the chosen
    chosen: Tensor  # [P] float32
    top: Tensor  # [P, K] float32, descending; K = the largest number that a row requests
    top_token_ids: Tensor  # [P, K] int64
    named: Tensor  # [P, A] float32; A = 0 if no request names tokens

    def to_host(self) -> "DeviceLogprobs":
        """Enqueue the copies to the host, without a wait."""
        tensors = (self.rows, self.token_ids, self.chosen, self.top, self.top_token_ids, self.named)
        return DeviceLogprobs(self.asked, *(tensor.to("cpu", non_blocking=True) for tensor in tensors))

    def per_row(self, num_rows: int) -> list[TokenLogprobs | None]:
        """Return the log-probabilities of each row of the piece, None for rows without. Call on a to_host() value."""
        answers: list[TokenLogprobs | None] = [None] * num_rows
        top = self.top.numpy()
        # top_scores() returns equal ones in any order.
        has_ties = (top[:, :-1] <= top[:, 1:]).any(axis=1)
        # numpy builds lists faster: torch takes 5 us per row, even for an empty one.
        tensors = (self.rows, self.token_ids, self.chosen, self.top, self.top_token_ids, self.named)
        columns = (has_ties.tolist(), *(tensor.numpy().tolist() for tensor in tensors))
        values = zip(self.asked.num_top, self.asked.named, *columns, strict=True)
        for num_top, names, is_tied, row, token_id, chosen, scores, top_token_ids, named in values:
            if names:
                answers[row] = TokenLogprobs(chosen, tuple(names), tuple(named[: len(names)]))
                continue
            ranked = _ranked(token_id, scores, top_token_ids) if is_tied else (scores, top_token_ids)
            answers[row] = TokenLogprobs(chosen, tuple(ranked[1][:num_top]), tuple(ranked[0][:num_top]))
        return answers


def _ranked(token_id: int, scores: list[float], token_ids: list[int]) -> tuple[list[float], list[int]]:
    pairs = zip(scores, token_ids, strict=True)
    ranked = sorted(pairs, key=lambda pair: (-pair[0], pair[1] != token_id, pair[1]))
    return [score for score, _ in ranked], [other for _, other in ranked]


def launch_logprobs(logits: Tensor, token_ids: Tensor, asked: LogprobRows) -> DeviceLogprobs:
    """Enqueue the computation.

    Args:
        logits: [N, V], as computed by the model.
        token_ids: [N], int64, the chosen tokens.
        asked: The rows that report log-probabilities.
    """
    raw = logits if len(asked.num_top) == len(logits) else logits[asked.rows]
    best, log_sums = log_normalizers(raw)

    def log_probs(scores: Tensor) -> Tensor:
        return scores.float() - best[:, None] - log_sums[:, None]

    ids = token_ids[asked.rows, None]
    chosen = raw.gather(1, ids)
    top, top_token_ids = top_scores(raw, max(asked.num_top))
    # Among equal log-probabilities at the end of the list any may be in it, so the chosen token takes the last place.
    is_left_out = (chosen >= top[:, -1:]) & (top_token_ids != ids).all(dim=1, keepdim=True)
    top_token_ids[:, -1:] = torch.where(is_left_out, ids, top_token_ids[:, -1:])
    named = raw[:, :0] if asked.named_token_ids is None else raw.gather(1, asked.named_token_ids)
    return DeviceLogprobs(
        asked, asked.rows, ids.squeeze(1), log_probs(chosen).squeeze(1), log_probs(top), top_token_ids, log_probs(named)
    )
