"""Metrics of a worker under load."""

from engine_worker.metrics import EngineInfo, WorkerMetrics
from engine_worker.status import WorkerStatus
from tests.builders import make_engine, make_request


class LoadedWorker:
    """A real engine on a fake model, with more requests than its few blocks hold."""

    def __init__(self) -> None:
        self._engine = make_engine(num_blocks=12)
        self._status = WorkerStatus("worker-1", "0")
        self.metrics = WorkerMetrics("worker-1", "model", "0", self._status)
        self.metrics.engine_is_ready(
            EngineInfo(
                device="cpu",
                dtype="float32",
                kv_cache_dtype="float32",
                block_size_bytes=1,
                max_model_len=1,
                memory_bytes=lambda: {"kv": 1},
            )
        )
        self.work()

    def work(self) -> None:
        for _ in range(3):
            self._engine.add_request(make_request(10, max_tokens=20))
        for _ in range(10):
            self._engine.step()
            self.metrics.observe_step(self._engine.last_step, publish_seconds=0.001)
        self._status.stats = self._engine.stats()
