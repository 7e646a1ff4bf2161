"""What batch requests leave to interactive ones: running slots, prefill steps, short steps, and KV blocks."""

from typing import Any

from msgspec import structs

from engine_worker.engine import Engine
from engine_worker.scheduling.background_share import ALONE_AFTER_STEPS, BackgroundShare
from engine_worker.scheduling.batch import ScheduledBatch
from engine_worker.scheduling.scheduler_config import SchedulerConfig
from shared.messages import FinishReason, GenerationRequest, Pooling
from tests.builders import FakeModelRunner, make_engine, make_request

SETTINGS: dict[str, Any] = {"num_blocks": 401, "block_size": 4, "max_num_seqs": 32, "max_num_batched_tokens": 128}


class Watched:
    """An engine that records the tokens of its last step by request id."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}
        shape = {name: SETTINGS[name] for name in ("num_blocks", "block_size")}
        self.engine: Engine = make_engine(FakeModelRunner(before_step=self._look, **shape), **SETTINGS)

    def _look(self, batch: ScheduledBatch) -> None:
        self.tokens = {item.sequence.request_id: item.num_new_tokens for item in batch.sequences}

    def add(self, *names: str, prompt: int = 8) -> None:
        """Add requests; names that begin with "b" are batch requests."""
        for name in names:
            request: GenerationRequest = make_request(prompt, name, max_tokens=40, ignore_eos=True)
            self.engine.add_request(
                structs.replace(request, priority_class="batch" if name.startswith("b") else "interactive")
            )

    def add_vectors(self, number: int, prompt: int) -> None:
        """Add batch requests that end with their prompts."""
        for index in range(number):
            request = make_request(prompt, f"v{index}", max_tokens=1)
            self.engine.add_request(structs.replace(request, priority_class="batch", pooling=Pooling()))

    def step(self) -> dict[str, int]:
        self.engine.step()
        self.engine.check_integrity()
        return self.tokens


def test_batch_alone_takes_three_quarters_of_slots() -> None:
    watched = Watched()
    assert (watched.engine.claim_budget.room, watched.engine.background_claim_budget.room) == (32, 24)
    watched.add(*(f"b{number}" for number in range(26)), prompt=4)
    assert len(watched.step()) == 24
    assert (watched.engine.claim_budget.room, watched.engine.background_claim_budget.room) == (8, -2)  # two wait


def test_interactive_prompt_gets_a_step_without_batch() -> None:
    watched = Watched()
    watched.add("b0", "b1", "b2")
    watched.step()
    watched.add("b3", "i0")
    assert watched.step() == {"i0": 8}
    assert watched.step() == {"i0": 1, "b0": 1, "b1": 1}  # from now on a sixteenth of the slots
    watched.add("i1", prompt=200)
    assert watched.step() == {"i0": 1, "i1": 127}
    assert watched.step() == {"i0": 1, "i1": 73}
    assert watched.step() == {"i0": 1, "i1": 1, "b0": 1, "b1": 1}


def test_batch_prompt_beside_interactive_is_chunked_small() -> None:
    watched = Watched()
    watched.add("i0")
    watched.step()
    watched.add("b0", prompt=30)
    assert [watched.step()["b0"] for _ in range(5)] == [8, 8, 8, 6, 1]


def test_single_batch_request_runs_whatever_its_size() -> None:
    watched = Watched()
    watched.add("i0")
    watched.step()
    request = make_request(8, "b0", n=4, max_tokens=3, ignore_eos=True)
    watched.engine.add_request(structs.replace(request, priority_class="batch"))
    assert "b0" in watched.step()


def test_batch_leaves_blocks_for_interactive() -> None:
    watched = Watched()
    watched.add(*(f"b{number}" for number in range(10)), prompt=150)  # 38 blocks each
    for _ in range(20):
        watched.step()
    assert watched.engine.stats().num_waiting == 2  # an eighth of 400 blocks is reserved; the ninth would need it
    watched.add("i0", prompt=100)
    assert watched.step() == {"i0": 100}


def test_background_share_grows_after_interactive_ends() -> None:
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=128, max_model_len=100)
    share = BackgroundShare(config, num_usable_blocks=80)
    assert (share.num_slots, share.prefill_budget(8), share.reserved_blocks) == (24, 120, 10)
    share.count_step(has_interactive=True)
    for _ in range(ALONE_AFTER_STEPS - 1):
        share.count_step(has_interactive=False)
    assert (share.num_slots, share.prefill_budget(8)) == (2, 8)
    share.count_step(has_interactive=False)
    assert (share.num_slots, share.prefill_budget(8)) == (24, 120)


def test_vectors_do_not_delay_a_chat() -> None:
    watched = Watched()
    watched.add_vectors(40, prompt=100)
    assert sum(watched.step().values()) == 128
    watched.add("i0", prompt=120)
    assert watched.step() == {"i0": 120}  # no prompt of a vector beside the chat's
    steps = [watched.step() for _ in range(39)]
    assert all(tokens["i0"] == 1 and 0 < sum(tokens.values()) - 1 <= 8 for tokens in steps)
    while watched.engine.has_work:
        watched.step()
    assert watched.engine.stats().counters.finished[FinishReason.LENGTH] == 41
