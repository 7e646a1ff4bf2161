"""The texts that `pagestream serve` prints at its start and when it is ready, with commands to copy."""

import json
from collections.abc import Sequence

from pagestream.gateway_count import GatewayCount
from shared.version import VERSION

_QUESTION = "What is the capital of France?"


def opening(model_names: Sequence[str], gateways: GatewayCount, workers: int) -> str:
    names = ", ".join(model_names)
    lines = f"pagestream {VERSION}: {names}, {_count(gateways.number, 'gateway')}, {_count(workers, 'engine worker')}"
    if gateways.reason:
        lines += f"\n  gateways  {gateways.number}: {gateways.reason}"
    return lines


def _of_workers(ports: Sequence[int]) -> str:
    named = [str(port) for port in ports if port]
    return f"; of workers on 127.0.0.1: port {', '.join(named)}" if named else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ready(url: str, model_name: str, seconds: float, metrics_ports: Sequence[int]) -> str:
    body = json.dumps(
        {"model": model_name, "messages": [{"role": "user", "content": _QUESTION}], "temperature": 0, "stream": True}
    )
    return f"""
Ready after {seconds:.1f} s: {url}   (Ctrl-C stops everything)
Metrics: {url}/metrics{_of_workers(metrics_ports)}

  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{body}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="unused")
  stream = client.chat.completions.create(
      model="{model_name}", stream=True, messages=[{{"role": "user", "content": "{_QUESTION}"}}]
  )
  for chunk in stream:
      print(chunk.choices[0].delta.content or "", end="", flush=True)
"""
