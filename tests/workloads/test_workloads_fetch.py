import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slo_bench.workloads.errors import SloBenchError, UnknownNameError
from slo_bench.workloads.fetch import Original, cache_folder, fetch, find, originals

CONTENT = bytes(range(256)) * 20_000  # 5 MB
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server:
    """Serves `content` at any path but /404; `cut_after` closes the connection early."""

    def __init__(self):
        self.content = CONTENT
        self.cut_after = None
        self.ranges = True
        self.requested_ranges = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                owner.answer(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def answer(self, request):
        byte_range = request.headers.get("Range")
        self.requested_ranges.append(byte_range)
        if request.path == "/404":
            request.send_error(404)
            return
        begin = (
            int(byte_range.removeprefix("bytes=").rstrip("-")) if byte_range and self.ranges else 0
        )
        size = len(self.content)
        if begin >= size:
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{size}")
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        body = self.content[begin:]
        request.send_response(206 if begin else 200)
        request.send_header("Content-Length", str(len(body)))
        if begin:
            request.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
        request.end_headers()
        if self.cut_after is not None:
            body = body[: self.cut_after]
            request.close_connection = True
        request.wfile.write(body)

    def original(self, path="/data/trace.csv", sha256=DIGEST):
        url = f"http://127.0.0.1:{self.http.server_port}{path}"
        return Original("trace", url, "CC0", "for the test", sha256)


@pytest.fixture
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.http.server_close()
    server.thread.join()


def test_fetch_downloads_once_and_keeps_the_file(server, tmp_path):
    progress = []
    first = fetch(server.original(), tmp_path, lambda done, total: progress.append((done, total)))
    assert first.path == tmp_path / "trace" / "trace.csv"
    assert first.path.read_bytes() == CONTENT
    assert (first.sha256, first.pinned, first.downloaded) == (DIGEST, True, True)
    assert progress[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    second = fetch(server.original(), tmp_path)
    assert not second.downloaded
    assert len(server.requested_ranges) == 1
    assert not list(tmp_path.rglob("*.part"))


def test_fetch_continues_an_interrupted_download(server, tmp_path):
    server.cut_after = 2_000_000
    with pytest.raises(SloBenchError, match=r"interrupted after 2,000,000 bytes.*run it again"):
        fetch(server.original(), tmp_path)
    assert not (tmp_path / "trace" / "trace.csv").exists()
    server.cut_after = None
    assert fetch(server.original(), tmp_path).path.read_bytes() == CONTENT
    assert server.requested_ranges == [None, "bytes=2000000-"]


def test_fetch_from_a_server_without_ranges_starts_over(server, tmp_path):
    server.cut_after = 1_000_000
    with pytest.raises(SloBenchError, match="interrupted"):
        fetch(server.original(), tmp_path)
    server.cut_after, server.ranges = None, False
    assert fetch(server.original(), tmp_path).path.read_bytes() == CONTENT


def test_fetch_takes_a_complete_part_file(server, tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "trace.csv.part").write_bytes(CONTENT)
    assert fetch(server.original(), tmp_path).path.read_bytes() == CONTENT


def test_fetch_discards_a_part_of_another_file(server, tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "trace.csv.part").write_bytes(CONTENT + b"more")
    with pytest.raises(SloBenchError, match=r"delete the \.part file"):
        fetch(server.original(), tmp_path)


def test_fetch_discards_a_download_with_a_wrong_checksum(server, tmp_path):
    with pytest.raises(SloBenchError, match=f"sha256 {DIGEST}, not 00"):
        fetch(server.original(sha256="00"), tmp_path)
    assert not list(tmp_path.rglob("trace.csv*"))


def test_fetch_notices_a_damaged_cached_file(server, tmp_path):
    fetch(server.original(), tmp_path).path.write_bytes(b"damaged")
    with pytest.raises(SloBenchError, match="delete it to fetch it again"):
        fetch(server.original(), tmp_path)


def test_fetch_keeps_and_compares_an_unknown_checksum(server, tmp_path):
    original = server.original(sha256=None)
    first = fetch(original, tmp_path)
    assert not first.pinned
    recorded = tmp_path / "trace" / "trace.csv.sha256"
    assert recorded.read_text() == f"{DIGEST}  trace.csv\n"
    first.path.unlink()
    server.content = b"something else"
    with pytest.raises(SloBenchError, match="the original has changed"):
        fetch(original, tmp_path)


def test_fetch_of_a_missing_file_is_an_error(server, tmp_path):
    with pytest.raises(SloBenchError, match="/404 answered 404"):
        fetch(server.original("/404"), tmp_path)


def test_fetch_without_a_server_is_an_error(server, tmp_path):
    original = server.original()
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(SloBenchError, match="cannot fetch"):
        fetch(original, tmp_path)


def test_fetch_into_an_unwritable_cache_is_an_error(server, tmp_path):
    (tmp_path / "trace").write_text("a file where the folder should be")
    with pytest.raises(SloBenchError, match="cannot write to"):
        fetch(server.original(), tmp_path)


def test_list_of_originals_is_complete_and_well_formed():
    names = {
        "azure-2023-conv",
        "azure-2023-code",
        "azure-2024-conv",
        "azure-2024-code",
        "burstgpt",
        "mooncake-conversation",
        "mooncake-toolagent",
        "sharegpt",
        "alpaca",
        "longbench",
    }
    assert names <= set(originals())
    for original in originals().values():
        assert original.url.startswith("https://")
        assert original.file_name
        assert original.sha256 is None or len(bytes.fromhex(original.sha256)) == 32
    with pytest.raises(UnknownNameError, match="did you mean burstgpt"):
        find("burst-gpt")


def test_fetch_cache_folder_can_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setenv("SLO_BENCH_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SLO_BENCH_CACHE")
    assert cache_folder().name == "slo-bench"
