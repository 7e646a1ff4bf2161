"""Duration of one step on the simulated machine.

    step = fixed + sequences * per_sequence + context tokens read * per_context_token
           + (tokens computed - hidden tokens) * per_token

Hidden tokens are computed while the weights are read, which is part of `fixed`. Swaps run beside a step, both ways
independently, and a step ends no earlier than the transfers that started with it.
"""
# A100_OPT_13B, the paper's machine, is computed from data sheets and the model's shape:
#     26 GB of weights at 80 % of 1,555 GB/s
#     26 GFLOP per token at 60 % of 312 TFLOP/s
#     819,200 bytes of KV per context token at 60 % of the bandwidth
# One constant is fitted to figure 13: 0.17 ms of host work per sequence. By Little's law, the figure implies
# 45 ms per step for 30.42 sequences (2 requests/s of 338 tokens), and 75 ms for 132.44 (30 requests/s of 58 tokens).
# H200_LLAMA_8B is fitted to measured decode steps of 1 to 256 sequences of 1k tokens and a prefill of 8192 (vLLM 0.26,
# bf16). It gives 4.8, 9.9 and 17.2 ms for 1, 128 and 256 sequences; 4.8, 10.2 and 17.1 ms were measured.

from dataclasses import dataclass

from engine_worker.scheduling.batch import ScheduledBatch


@dataclass(frozen=True, slots=True)
class StepCost:
    name: str
    fixed_seconds: float
    per_sequence_seconds: float
    per_token_seconds: float
    per_context_token_seconds: float
    hidden_tokens: int = 0
    per_swapped_block_seconds: float = 0.0  # 16 tokens

    def seconds(self, batch: ScheduledBatch) -> float:
        moves = batch.transfers.kv
        transfers = max(len(moves.swap_out), len(moves.swap_in)) * self.per_swapped_block_seconds
        return max(transfers, self._step_seconds(batch)) if batch.sequences else transfers

    def _step_seconds(self, batch: ScheduledBatch) -> float:
        num_context_tokens = sum(scheduled.start + scheduled.num_new_tokens for scheduled in batch.sequences)
        return (
            self.fixed_seconds
            + len(batch.sequences) * self.per_sequence_seconds
            + max(0, batch.num_tokens - self.hidden_tokens) * self.per_token_seconds
            + num_context_tokens * self.per_context_token_seconds
        )


A100_OPT_13B = StepCost(
    "OPT-13B on one A100-40GB",
    fixed_seconds=26e9 / (0.8 * 1555e9),
    per_sequence_seconds=0.17e-3,
    per_token_seconds=26e9 / (0.6 * 312e12),
    per_context_token_seconds=819_200 / (0.6 * 1555e9),
    per_swapped_block_seconds=16 * 819_200 / 25e9,  # what 16 lanes of PCIe 4 achieve, of 31.5 GB/s
)
H200_LLAMA_8B = StepCost(
    "Llama-3.1-8B on one H200",
    fixed_seconds=4.7e-3,
    per_sequence_seconds=8e-6,
    per_token_seconds=218e-3 / 8192,
    per_context_token_seconds=131_072 / 4.3e12,
    hidden_tokens=177,  # 4.7 ms of computation
    per_swapped_block_seconds=16 * 131_072 / 50e9,
)
