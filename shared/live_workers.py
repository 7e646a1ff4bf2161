"""Which workers of a model live, for a program that starts and has seen none of their beats."""

from redis.exceptions import RedisError

from shared.redis_scripts import RedisScripts


class LiveWorkers:
    """The workers that beat while they are watched. A dead one's last beat stays until it is reaped."""

    def __init__(self, scripts: RedisScripts) -> None:
        self._scripts = scripts
        self._first: dict[str, float] | None = None

    async def ids(self) -> set[str]:
        """Return the workers that have beaten since the first call; none while the store does not answer."""
        try:
            beats = await self._scripts.beats()
        except (RedisError, OSError):
            return set()
        if self._first is None:
            self._first = beats
        return {worker_id for worker_id, seconds in beats.items() if seconds != self._first.get(worker_id)}
