"""The log of the sum of exp() over each row of scores, which turns a score into a log-probability.

    log_normalizers(scores [N, V]) -> (best [N] float32, log_sums [N] float32)

The log-probability of a token is score - best - log_sums: the greatest score is taken away first, as log_softmax does.
A row's result does not depend on other rows. torch.logsumexp would share a single long row out among blocks, which
changes its last bits. CPU tensors use the reference below.
"""

from torch import Tensor


def log_normalizers_reference(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Do what log_normalizers() does, with torch."""
    scores = scores.float()
    best = scores.amax(dim=-1)
    log_probs = scores.log_softmax(dim=-1)
    return best, -log_probs.amax(dim=-1)


def log_normalizers(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the greatest score of each row, and the log of its sum of exp(score - greatest)."""
    if not scores.is_cuda:
        return log_normalizers_reference(scores)
    from kernels.sampling.log_normalizers_triton import log_normalizers_triton  # noqa: PLC0415 - a CPU has no triton

    return log_normalizers_triton(scores)


def top_scores(scores: Tensor, count: int, group_size: int = 128) -> tuple[Tensor, Tensor]:
    """Return the `count` greatest scores of each row and their token ids, [N, count] each; of equal ones any.

    They lie in the `count` groups whose best scores are greatest: a row is read once, and few groups are sorted.
    """
    num_rows, vocab_size = scores.shape
    if vocab_size % group_size or count * group_size >= vocab_size or not scores.is_contiguous():
        found = scores.topk(count, dim=-1)
        return found.values, found.indices
    groups = scores.view(num_rows, -1, group_size)
    chosen = groups.amax(dim=-1).topk(count, dim=-1).indices
    candidates = groups.gather(1, chosen[:, :, None].expand(-1, -1, group_size)).view(num_rows, -1)
    found = candidates.topk(count, dim=-1)
    group = chosen.gather(1, found.indices // group_size)
    return found.values, group * group_size + found.indices % group_size
