"""The open ResponseStreams of a gateway by request id: one, or several where clients attached to the same request."""

from collections.abc import Iterator

from gateway.store.response_stream import ResponseStream


class StreamTable:
    def __init__(self) -> None:
        self._by_request_id: dict[str, tuple[ResponseStream, ...]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_request_id.values()))

    def __iter__(self) -> Iterator[ResponseStream]:
        """As they are now: streams may come and go while the caller iterates."""
        return iter([stream for streams in self._by_request_id.values() for stream in streams])

    def __contains__(self, stream: ResponseStream) -> bool:
        return any(open_stream is stream for open_stream in self.of(stream.request_id))

    @property
    def num_waiting_tokens(self) -> int:
        """Of prompts of which nothing has come yet."""
        return sum(len(stream.request.prompt_token_ids) for stream in self if not stream.num_tokens)

    def of(self, request_id: str) -> tuple[ResponseStream, ...]:
        return self._by_request_id.get(request_id, ())

    def add(self, stream: ResponseStream) -> None:
        self._by_request_id[stream.request_id] = (*self.of(stream.request_id), stream)

    def discard(self, *streams: ResponseStream) -> None:
        for stream in streams:
            left = tuple(other for other in self.of(stream.request_id) if other is not stream)
            if left:
                self._by_request_id[stream.request_id] = left
            else:
                self._by_request_id.pop(stream.request_id, None)
