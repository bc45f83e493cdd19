import numpy as np
import pytest

from slo_bench.harness.load_generator.http import Endpoint, HttpOptions, RequestFault
from slo_bench.harness.load_generator.http.request_columns import (
    FAULTS,
    RequestColumns,
    SenderResult,
    joined_gaps,
)
from slo_bench.harness.load_generator.routed_load import client_figures, invalid_because
from slo_bench.workloads.errors import SloBenchError


@pytest.mark.parametrize(
    ("url", "endpoint", "written"),
    [
        ("http://localhost:8000", Endpoint("localhost", 8000), "http://localhost:8000"),
        ("localhost:8000/", Endpoint("localhost", 8000), "http://localhost:8000"),
        ("http://h/v1", Endpoint("h", 80), "http://h"),
        ("https://h/api/v1/", Endpoint("h", 443, True, "/api"), "https://h/api"),
        ("http://[::1]:81", Endpoint("::1", 81), "http://[::1]:81"),
        ("http://h/api/v3", Endpoint("h", 80, prefix="/api", version="/v3"), "http://h/api/v3"),
        (
            "https://h/v1beta/openai/",
            Endpoint("h", 443, True, version="/v1beta/openai"),
            "https://h/v1beta/openai",
        ),
        (
            "https://h/openai/deployments/d?api-version=2024-10-21",
            Endpoint("h", 443, True, "/openai/deployments/d", "", "api-version=2024-10-21"),
            "https://h/openai/deployments/d?api-version=2024-10-21",
        ),
        ("unix:/run/s.sock", Endpoint("localhost", 80, socket="/run/s.sock"), "unix:/run/s.sock"),
        (
            "http+unix://%2Frun%2Fs.sock/api/v3",
            Endpoint("localhost", 80, prefix="/api", version="/v3", socket="/run/s.sock"),
            "unix:/run/s.sock:/api/v3",
        ),
    ],
)
def test_endpoint_parses_addresses(url, endpoint, written):
    assert Endpoint.parse(url) == endpoint
    assert endpoint.url == written
    assert Endpoint.parse(written) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://h", "http://", "http://h:x", "http://h#q", "http://h/a b", "h:99999"),
        *("http://a..b", f"http://{'a' * 64}.b"),
    ],
)
def test_endpoint_refuses_malformed_addresses(url):
    with pytest.raises(SloBenchError, match="should look like"):
        Endpoint.parse(url)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://h", "/v1/chat/completions"),
        ("http://h/v1/", "/v1/chat/completions"),
        ("http://h/llm", "/llm/v1/chat/completions"),
        ("http://h/api/v3", "/api/v3/chat/completions"),
        ("http://h/api/v3/chat/completions", "/api/v3/chat/completions"),
        ("http://h/serving/chat/completions/", "/serving/chat/completions"),
        ("http://h/v1?a=b&c=d", "/v1/chat/completions?a=b&c=d"),
        ("http://h/v1/openai/compat", "/v1/openai/compat/chat/completions"),
    ],
)
def test_endpoint_target_keeps_path_and_query(url, target):
    assert Endpoint.parse(url).target("/chat/completions") == target


def test_endpoint_page_is_beside_the_api_and_has_the_query():
    assert Endpoint.parse("http://h/a/v3/completions?k=1").page("/metrics?x=2") == (
        "/a/metrics?x=2&k=1"
    )


def test_endpoint_refuses_a_key_in_its_query():
    with pytest.raises(SloBenchError, match=r"api-key in this one looks like a secret") as refused:
        Endpoint.parse("https://host/v1?api-version=1&api-key=sesame")
    assert "sesame" not in str(refused.value)
    assert Endpoint.parse("https://host/v1?api-version=1&key=").query == "api-version=1&key="


def test_endpoint_error_does_not_repeat_the_password():
    with pytest.raises(SloBenchError, match="api-key-env") as raised:
        Endpoint.parse("https://user:secret@h/v1")
    assert "secret" not in str(raised.value)


def test_api_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("A_KEY", "sesame")
    monkeypatch.setenv("B_KEY", "open")
    options = HttpOptions(headers={"x-api-key": "$A_KEY", "x-team": "b"}, api_key_env="B_KEY")
    assert options.header_fields() == {
        "authorization": "Bearer open",
        "x-api-key": "sesame",
        "x-team": "b",
    }
    assert "sesame" not in repr(options)
    assert "open" not in repr(options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"headers": {"Authorization": "Bearer x"}}, "looks like a secret"),
        ({"headers": {"bad name": "x"}}, "is no header"),
        ({"headers": {"x": "a\r\nb: c"}}, "is no header"),
        ({"api_key_env": "NO_SUCH_KEY"}, "NO_SUCH_KEY is not set"),
    ],
)
def test_header_fields_refuse_malformed_headers(options, problem, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(SloBenchError, match=problem):
        HttpOptions(**options).header_fields()


def figures(late_s=0.0, lag_s=0.0, client_errors=0, stretch=1.0, n=100):
    columns = RequestColumns.empty(n)
    columns.arrival_s[:] = np.arange(n) * 0.01
    columns.started_s[:] = columns.arrival_s * stretch + late_s
    columns.fault[:client_errors] = FAULTS.index(RequestFault.CLIENT)
    lags_s = np.full(50, lag_s)
    part = SenderResult(0.0, np.arange(n), columns, joined_gaps([]), lags_s, 1.0, 1)
    return client_figures(columns, [part], 1)


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (figures(), None),
        (figures(late_s=0.009), None),
        (figures(late_s=-0.0005), None),  # the half millisecond that we may be early
        (figures(late_s=0.011), "sent late: 11.0 ms at p99, 10 ms is the limit"),
        (figures(lag_s=0.02), "event loop lagged 20.0 ms"),
        (figures(client_errors=1), "1 requests failed on our side"),
        (figures(n=1), None),
        (figures(n=0), None),
    ],
)
def test_invalid_because_names_the_reason(client, reason):
    problem = invalid_because(client, 100, send_delay_limit_s=0.01, rate_limit_share=0.02)
    assert (problem is None) if reason is None else (reason in problem)


def test_invalid_because_rate_was_not_reached():
    client = figures(stretch=1.05)
    problem = invalid_because(client, 100, send_delay_limit_s=1.0, rate_limit_share=0.02)
    assert problem == "95.24 req/s were sent where 100 were due"
    assert invalid_because(client, 10, send_delay_limit_s=1.0, rate_limit_share=0.02) is None
