"""Where metrics of a running server are read: its own `/metrics`, or a Prometheus server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

from ...workloads.errors import SloBenchError
from ...workloads.parsing import number, parse_json
from .http.endpoint import Endpoint
from .http.single_request import NoAnswerError, get
from .server_metrics import MetricsByServer, MetricsSnapshot, names_in, read_text, snapshot

_MOST_BYTES = 64 << 20
_MOST_POINTS = 2000


class MetricsSource:
    """The metrics of one server: its own `/metrics`, or those that a Prometheus server has of it.

    Args:
        url: address of the server, or of a Prometheus server.
        only: labels that samples must have.
        by_server: names of the servers' metrics.
        headers: sent as well; names in lower case.
        limit_s: time for an answer.

    Raises:
        SloBenchError: nothing answers there, or what answers has no metrics of vLLM or SGLang.
    """

    def __init__(
        self,
        url: str,
        only: Mapping[str, str],
        by_server: MetricsByServer,
        headers: Mapping[str, str] | None = None,
        limit_s: float = 10.0,
    ) -> None:
        self._limit_s = limit_s
        self._endpoint = Endpoint.parse(url.rstrip("/").removesuffix("/metrics"))
        self._only = only
        self._by_server = by_server
        self._headers = headers
        text = self._get("/metrics", needed=False)
        self.is_prometheus = text is None or names_in(text, by_server) is None
        if not self.is_prometheus:
            return
        now = self._prometheus("/api/v1/query?query=time()", needed=False)
        if not isinstance(now, list) or len(now) != 2:
            raise SloBenchError(
                f"{self._endpoint.url}/metrics has no metrics of vLLM or SGLang (start SGLang with "
                "--enable-metrics), and it is no Prometheus server either"
            )
        self._now_s = number(now[0])
        if math.isnan(self._now_s):
            raise SloBenchError(f"the answer of {self._endpoint.url} is none of Prometheus")

    def read(self, time_s: float) -> MetricsSnapshot:
        """What the server's metrics say now.

        Raises:
            SloBenchError: it does not answer, or its answer cannot be read.
        """
        metrics = read_text(self._get("/metrics") or "", time_s, self._only, self._by_server)
        if metrics is None:
            raise self._none()
        return metrics

    def history(self, duration_s: float, interval_s: float) -> Iterator[MetricsSnapshot]:
        """What the Prometheus server has of the last `duration_s` seconds, oldest first.

        Raises:
            SloBenchError: it has nothing of vLLM or SGLang, or its answer cannot be read.
        """
        if duration_s / interval_s > _MOST_POINTS:
            raise SloBenchError(
                f"{duration_s / interval_s:,.0f} points are more than {_MOST_POINTS:,}; take a "
                "longer --interval"
            )
        prefixes = "|".join(names.pattern for names in self._by_server.values())
        series_of_servers = quote(f'{{__name__=~"({prefixes}).+"}}')
        query = f"query={series_of_servers}&start={self._now_s - duration_s}&end={self._now_s}"
        response = self._prometheus(f"/api/v1/query_range?{query}&step={interval_s}")
        samples_by_time: dict[float, list[tuple[str, Mapping[str, str], float]]] = {}
        try:
            for series in response["result"]:
                labels = {str(k): str(v) for k, v in series["metric"].items()}
                for time_s, value in series["values"]:
                    samples_by_time.setdefault(float(time_s), []).append(
                        (labels["__name__"], labels, float(value))
                    )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"the answer of {self._endpoint.url} is none of Prometheus: {error!r:.80}"
            raise SloBenchError(problem) from None
        shots = [
            snapshot(samples_by_time[t], t, self._only, self._by_server)
            for t in sorted(samples_by_time)
        ]
        snapshots = [shot for shot in shots if shot is not None]
        if not snapshots:
            raise self._none()
        yield from snapshots

    def _none(self) -> SloBenchError:
        chosen = "".join(f" with {label}={value}" for label, value in self._only.items())
        return SloBenchError(f"{self._endpoint.url} has no metrics of vLLM or SGLang{chosen}")

    def _get(self, path: str, *, needed: bool = True) -> str | None:
        """The text at a path; None where there is none and it is not `needed`."""
        where = f"{self._endpoint.url}{path.partition('?')[0]}"
        try:
            status, body = get(
                self._endpoint,
                self._endpoint.page(path),
                self._headers,
                limit_s=self._limit_s,
                most_bytes=_MOST_BYTES,
            )
        except NoAnswerError as error:
            raise SloBenchError(f"{where} does not answer: {error}") from None
        if status in (401, 403):
            raise SloBenchError(
                f"{self._endpoint.url} answers with status {status}: it needs an API key; "
                "--api-key-env names the environment variable that holds it"
            )
        if status != 200:
            if not needed:
                return None
            raise SloBenchError(f"{where} answers with status {status}")
        return body.decode("utf-8", "replace")

    def _prometheus(self, path: str, *, needed: bool = True) -> Any:
        """`data` of an answer of Prometheus' HTTP API; of a scalar its (time, value)."""
        text = self._get(path, needed=needed)
        try:
            response = None if text is None else parse_json(text)
        except ValueError:
            response = None
        if not isinstance(response, dict) or not isinstance(response.get("data"), dict):
            if not needed:
                return None
            raise SloBenchError(f"the answer of {self._endpoint.url} is none of Prometheus")
        data = response["data"]
        return data.get("result") if data.get("resultType") == "scalar" else data
