"""One gateway's counts of a model's deliveries; read at a scrape (gateway/metrics.py), never acted on.

Beside a token's way back. It knows no request.
"""

from dataclasses import dataclass


@dataclass
class DeliveryCounts:
    num_journal_reads: int = 0
    num_bad_messages: int = 0
    num_restored_requests: int = 0
    num_gaps: int = 0
    num_torn_streams: int = 0
