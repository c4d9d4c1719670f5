"""What kvstow reports while it runs: events as JSON lines, and metrics for Prometheus.

`MetricsCollector` needs `prometheus_client`, the extra `metrics`.

May import: kvstow._core, kvstow.arguments, kvstow.closing, kvstow.transfer.
"""

from typing import TYPE_CHECKING

from kvstow.observability.events import BlockEvent, EventFile, TransferEvent, event_fields

if TYPE_CHECKING:
    from kvstow.observability.metrics import MetricsCollector
else:

    def __getattr__(name: str) -> object:
        """Import the collector on first use, because it needs an extra."""
        if name != "MetricsCollector":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from kvstow.observability.metrics import MetricsCollector  # noqa: PLC0415

        return MetricsCollector


__all__ = ["BlockEvent", "EventFile", "MetricsCollector", "TransferEvent", "event_fields"]
