"""The service over HTTP: what a client can rely on, and what it cannot break."""

import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import driftfilter as df
from driftfilter.app.run.reader import Form
from driftfilter.storage.sealed import parse_object

pytest.importorskip("starlette", reason="the extra serve is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="the extra serve is not installed")
httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("prometheus_client", reason="the extra serve is not installed")


from driftfilter.app.serve.batching import Batcher  # noqa: E402
from driftfilter.app.serve.bodies import read_body  # noqa: E402
from driftfilter.app.serve.command import serve  # noqa: E402
from driftfilter.app.serve.http import Rules, make_app  # noqa: E402
from driftfilter.app.serve.limits import Flight, Rate, Tokens  # noqa: E402
from driftfilter.app.serve.options import ServeOptions  # noqa: E402
from driftfilter.app.serve.problems import ProblemError  # noqa: E402
from driftfilter.app.serve.shard import Shard  # noqa: E402
from driftfilter.app.serve.store import FolderStore  # noqa: E402
from driftfilter.app.terminal import Output  # noqa: E402
from small import tabular  # noqa: E402

NPY = {"content-type": "application/x-npy"}
BODY = 20_000


@contextmanager
def _client(
    folder: Path, tokens: Path | None = None, rate: float = 0.0, body: int = BODY
) -> Iterator[Any]:
    """A client of a service in another thread."""
    shard = Shard(df.adapt(tabular().eval(), "center"), FolderStore(folder, sync=False), limit=50)
    rules = Rules(Form(torch.float32), Tokens(tokens), Rate(rate), body, Flight(2 * body))
    app = make_app(Batcher(shard), rules)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Any]:
    with _client(tmp_path / "store") as found:
        yield found


def _npy(array: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def _inputs(seed: int = 0, n: int = 6) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(n, 4)).astype(np.float32)


def _problem(response: Any, status: int, field: str) -> dict[str, Any]:
    found: dict[str, Any] = response.json()
    assert response.status_code == status, found
    assert response.headers["content-type"] == "application/problem+json"
    assert found["field"] == field
    assert found["status"] == status
    assert found["allowed"]
    assert found["detail"]
    return found


def test_a_tenant_is_served_as_an_adapter_serves(client: Any) -> None:
    adapter, url = df.adapt(tabular().eval(), "center"), "/v1/tenants/north"
    for step in range(1, 4):
        inputs = _inputs(step)
        expected = adapter(torch.from_numpy(inputs))
        if step == 2:
            body = {"inputs": inputs.tolist(), "sequence": step}
            found = client.post(f"{url}/predict", json=body).json()
            assert found["labels"] == expected.argmax(1).tolist()
            logs = torch.tensor(found["log_probabilities"])
        else:
            headers = {**NPY, "sequence": str(step), "accept": "application/x-npy"}
            response = client.post(f"{url}/predict", content=_npy(inputs), headers=headers)
            assert response.headers["sequence"] == str(step)
            logs = torch.from_numpy(np.load(io.BytesIO(response.content)))
        torch.testing.assert_close(logs, expected)
    peek = client.post(f"{url}/predict?adapt=false", content=_npy(_inputs(9)), headers=NPY).json()
    said = adapter.predict(torch.from_numpy(_inputs(9))).log_probabilities
    torch.testing.assert_close(torch.tensor(peek["log_probabilities"]), said)
    facts = client.get(url).json()
    assert (facts["sequence"], facts["steps"], facts["parameters"]) == (3, 3, 1)
    assert client.post(f"{url}/reset").json()["sequence"] == 4
    assert client.get(url).json()["steps"] == 0
    assert client.delete(url).status_code == 200
    _problem(client.get(url), 404, "tenant")


def test_a_large_body_is_read_and_answered_beside_others(tmp_path: Path) -> None:
    adapter, inputs = df.adapt(tabular().eval(), "center"), _inputs(0, 20_000)
    with _client(tmp_path / "store", body=1 << 20) as client:
        found = client.post("/v1/tenants/a/predict", content=_npy(inputs), headers=NPY).json()
        expected = adapter(torch.from_numpy(inputs))
        torch.testing.assert_close(torch.tensor(found["log_probabilities"]), expected)
        _problem(
            client.post("/v1/tenants/a/predict", content=_npy(inputs)[:-1], headers=NPY),
            400,
            "body",
        )


def test_a_number_again_gets_the_same_bytes(client: Any) -> None:
    headers = {**NPY, "sequence": "1", "accept": "application/x-npy"}
    ask = {"url": "/v1/tenants/a/predict", "content": _npy(_inputs()), "headers": headers}
    first, again = client.post(**ask), client.post(**ask)
    assert first.content == again.content
    assert "repeated" not in first.headers
    assert again.headers["repeated"] == "true"
    assert client.get("/v1/tenants/a").json()["steps"] == 1
    headers["sequence"] = "5"
    found = _problem(client.post(**ask), 409, "sequence")
    assert found["last"] == 1


def test_health_metrics_and_the_page(client: Any) -> None:
    client.post("/v1/tenants/a/predict", content=_npy(_inputs()), headers=NPY)
    assert client.get("/healthz").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}
    metrics = client.get("/metrics").text
    assert 'driftfilter_requests_total{kind="predict",status="200"} 1.0' in metrics
    assert "driftfilter_steps 1.0" in metrics
    _problem(client.post("/v1/workers?count=2"), 501, "workers")
    paths = client.get("/openapi.json").json()["paths"]
    assert "/v1/tenants/{tenant}/predict" in paths
    page = client.get("/").text
    assert "http://" not in page
    assert "https://" not in page


def test_tokens_limits_and_names(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("first\n  second \n\nthird and more\nschlüssel", encoding="utf-8-sig")
    with _client(tmp_path / "store", tokens, rate=2) as client:
        _problem(client.get("/v1/tenants/a"), 401, "Authorization")
        own = {"authorization": "Bearer schlüssel".encode()}
        assert client.get("/metrics", headers=own).status_code == 200
        client.headers["authorization"] = "Bearer first"
        assert client.get("/metrics").status_code == 200
        client.headers["authorization"] = "bearer third and more"
        assert client.get("/metrics").status_code == 200
        del client.headers["authorization"]
        for wrong in ("Bearer", "Bearer third", "Basic first", "Bearer firstsecond", "Bearer ü"):
            headers = {"authorization": wrong.encode()}
            _problem(client.get("/v1/tenants/a", headers=headers), 401, "Authorization")
            _problem(client.get("/metrics", headers=headers), 401, "Authorization")
        client.headers["authorization"] = "Bearer second"
        assert client.get("/readyz").status_code == 200
        _problem(client.get("/v1/tenants/" + "x" * 201), 400, "tenant")
        _problem(client.get("/v1/tenants/a%00b"), 400, "tenant")
        _problem(client.get("/v1/tenants/a%ff"), 400, "tenant")  # else the same as a%fe
        _problem(client.get("/v1/tenants/..%2f..%2fetc"), 404, "path")
        method = client.put("/v1/tenants/a")
        _problem(method, 405, "method")
        assert "GET" in method.headers["allow"]
        _problem(client.get("/v1/tenants/.."), 404, "path")
        large = client.post("/v1/tenants/b/predict", content=b"x" * (BODY + 1), headers=NPY)
        _problem(large, 413, "body")
        statuses = [client.get("/v1/tenants/c").status_code for _ in range(8)]
        assert statuses[:4] == [404] * 4
        assert 429 in statuses


def _head(shape: str) -> bytes:
    """The header of a .npy file, and nothing behind it."""
    line = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line


CASES: list[tuple[Any, dict[str, str], int, str]] = [
    (b"{}", {"content-type": "text/plain"}, 415, "Content-Type"),
    (b"", NPY, 400, "body"),
    (b"\x93NUMPY\x03\x00", NPY, 400, "body"),
    (_npy(np.array([{"a": 1}], object), allow_pickle=True), NPY, 400, "dtype"),
    (_npy(np.array(["text"])), NPY, 400, "dtype"),
    (_npy(np.zeros(3, "M8[s]")), NPY, 400, "dtype"),
    (_npy(np.zeros((2, 4)))[:-8], NPY, 400, "body"),
    (_npy(np.zeros((2, 4))).replace(b"(2, 4)", b"(9, 4)"), NPY, 400, "body"),
    (_npy(np.zeros((2, 4))).replace(b"(2, 4)", b"(-2,-4)"[:6]), NPY, 400, "body"),
    (_npy(np.zeros((0, 4))), NPY, 422, "inputs"),
    (_head(f"(0, {2**70})"), NPY, 400, "body"),
    (_head(f"(0, {2**40}, {2**40})"), NPY, 400, "body"),
    (_head(f"({'9' * 4000}, {'9' * 4000})"), NPY, 400, "body"),
    (_head(f"({'0,' * 80})"), NPY, 400, "body"),
    (_head("(-1, -4)"), NPY, 400, "body"),
    (_head("(True, 0)"), NPY, 400, "body"),
    (_npy(np.zeros((2, 5))), NPY, 422, "inputs"),
    (_npy(np.full((2, 4), np.nan)), NPY, 422, "inputs"),
    (_npy(np.zeros(())), NPY, 422, "inputs"),
    (_npy(np.zeros((2, 4))), {**NPY, "sequence": "-1"}, 400, "Sequence"),
    (_npy(np.zeros((2, 4))), {**NPY, "sequence": "9" * 30}, 400, "Sequence"),
    ({"inputs": "text"}, {}, 400, "inputs"),
    ({"inputs": [[1, 2], [3]]}, {}, 400, "inputs"),
    ({"inputs": [["a"]]}, {}, 400, "inputs"),
    ({"inputs": [[None]]}, {}, 400, "inputs"),
    ({"inputs": {}}, {}, 400, "inputs"),
    ({"inputs": {"nobody": [[1.0]]}}, {}, 422, "inputs"),
    ({"sequence": 1}, {}, 400, "inputs"),
    ({"inputs": [[0, 0, 0, 0]], "sequence": "1"}, {}, 400, "sequence"),
    ({"inputs": [[0, 0, 0, 0]], "sequence": True}, {}, 400, "sequence"),
    ({"inputs": [[0, 0, 0, 0]], "sequence": 0}, {}, 400, "sequence"),
    ({"inputs": [[0, 0, 0, 0]], "labels": [0]}, {}, 400, "labels"),
    (b'{"inputs": [[0, 0, 0, 0]], "sequence": NaN}', {}, 400, "sequence"),
    (b'{"inputs": [[0, 0, 0, 0]], "sequence": -Infinity}', {}, 400, "sequence"),
    (b'{"inputs": [[0, 0, 0, 0]], "sequence": "\\ud800"}', {}, 400, "sequence"),
    (b'{"inputs": {"\\ud800": 1}}', {}, 400, "\\ud800"),
    (b'{"inputs": {"\\ud800": [[0, 0, 0, 0]]}}', {}, 422, "inputs"),
    (b'{"\\ud800": 1, "\\ud800": 1}', {}, 400, "body"),
    ([1, 2], {}, 400, "body"),
    (b'{"inputs": [[1, 2, 3, NaN]]}', {}, 422, "inputs"),
    (b'{"inputs": 1, "inputs": 2}', {}, 400, "body"),
    (b"[" * 5000, {}, 400, "body"),
    (b'{"inputs":' + b"[" * 3000, {}, 400, "body"),
    (b"\xff\xfe", {}, 400, "body"),
    (b'{"inputs": [[1e999, 0, 0, 0]]}', {}, 422, "inputs"),
    ({"inputs": [[1, 2, True, 3]]}, {}, 400, "inputs"),
    ({"inputs": [[1, 2, "3", 4]]}, {}, 400, "inputs"),
    ({"inputs": [[1, 2, 3, 4], 5]}, {}, 400, "inputs"),
    (b'{"inputs": [[' + b"9" * 6000 + b"]]}", {}, 400, "body"),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_malformed_body_is_refused_by_name(case: int, client: Any) -> None:
    body, headers, status, field = CASES[case]
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    _problem(client.post("/v1/tenants/a/predict", content=content, headers=headers), status, field)
    _problem(client.get("/v1/tenants/a"), 404, "tenant")


def test_a_name_that_stands_twice_is_found_soon() -> None:
    """In time that grows as the text does: else one body keeps the service busy for hours."""
    names = ",".join(f'"{number}":0' for number in range(30_000))
    begun = time.process_time()
    with pytest.raises(ValueError, match="'0'] twice"):
        parse_object(f'{{{names},"0":1}}')
    assert time.process_time() - begun < 1


def test_a_text_among_numbers_takes_no_memory() -> None:
    """NumPy would give every number the room of the longest text: 800 MB of a body of 30 kB."""
    body = {"inputs": [[0] * 10_000 + ["x" * 20_000]]}
    tracemalloc.start()
    with pytest.raises(ProblemError, match="inputs must be an array"):
        read_body(json.dumps(body).encode(), "application/json", None, Form(), frozenset())
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_a_body_that_does_not_come_is_given_up(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that hangs keeps its share of what may wait for good, and holds up the end."""
    monkeypatch.setattr("driftfilter.app.serve.http._PATIENCE", 0.3)
    with socket.create_connection(("127.0.0.1", client.base_url.port)) as own:
        head = f"POST /v1/tenants/a/predict HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY}\r\n\r\n"
        own.sendall(head.encode() + b"x")
        own.settimeout(10)
        answer = own.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"application/problem+json" in answer


def test_a_failure_of_the_service_is_told_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError("not to be told")

    monkeypatch.setattr("driftfilter.app.serve.bodies.write_json", fail)
    with _client(tmp_path / "store") as client:
        ask = {"url": "/v1/tenants/a/predict", "content": _npy(_inputs()), "headers": NPY}
        found = client.post(**ask)
        assert "not to be told" not in found.text
        _problem(found, 500, "the service")


def test_bodies_that_wait_are_bounded_together(client: Any) -> None:
    """One that has been announced counts, too; what is answered or given up makes room again."""
    port, open_ones = client.base_url.port, list[socket.socket]()
    head = f"POST /v1/tenants/a/predict HTTP/1.1\r\nHost: x\r\nContent-Length: {BODY}\r\n\r\n"
    for _ in range(2):
        own = socket.create_connection(("127.0.0.1", port))
        own.sendall(head.encode() + b"x")
        open_ones.append(own)
    ask = {"url": "/v1/tenants/a/predict", "content": _npy(_inputs()), "headers": NPY}
    until = time.monotonic() + 10
    while (found := client.post(**ask)).status_code == 200 and time.monotonic() < until:
        pass
    assert _problem(found, 503, "body")["value"] == len(_npy(_inputs()))
    assert found.headers["retry-after"] == "1"
    for own in open_ones:
        own.close()
    while (found := client.post(**ask)).status_code == 503 and time.monotonic() < until:
        pass
    assert found.status_code == 200


def test_fuzzed_bodies_never_break_it(client: Any) -> None:
    """Mutations of good bodies: refused or served, never a 500, and what is refused steps
    nothing. Ten thousand: benchmarks/serve.py.
    """
    draws, steps = random.Random(0), 0
    good = [_npy(_inputs(n=2)), json.dumps({"inputs": _inputs(n=2).tolist()}).encode()]
    kinds = ["application/x-npy", "application/json"]
    for _ in range(300):
        place = draws.randrange(2)
        body = bytearray(good[place])
        for _ in range(draws.randint(1, 4)):
            spot = draws.randrange(len(body) + 1)
            if draws.random() < 0.3:
                del body[spot : spot + draws.randint(1, 20)]
            elif draws.random() < 0.5:
                body[spot:spot] = draws.randbytes(draws.randint(1, 8))
            elif spot < len(body):
                body[spot] = draws.randrange(256)
        headers = {"content-type": kinds[place]}
        found = client.post("/v1/tenants/a/predict", content=bytes(body), headers=headers)
        assert found.status_code in (200, 400, 422), found.text
        steps += found.status_code == 200
    if steps:
        assert client.get("/v1/tenants/a").json()["steps"] == steps


def test_a_termination_is_an_end_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "driftfilter.app.cli", "serve", "resnet20"]
    env = {**os.environ, "PYTHONPATH": str(Path(df.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    options = ["--preset", "center", "--store", str(tmp_path / "store"), "--port", "0"]
    with subprocess.Popen(
        command + options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as service:
        assert service.stdout is not None
        assert "serving at" in service.stdout.readline()
        service.terminate()
        _, told = service.communicate(timeout=60)
    assert service.returncode == 0
    assert "what was answered is in the store" in told


def test_a_port_that_is_taken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for whole in ("driftfilter.app.serve.command.keep_memory", "sys.setswitchinterval"):
        monkeypatch.setattr(whole, lambda *_: None)  # of the whole process
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ServeOptions(
            "resnet20", preset="center", store=str(tmp_path / "store"), port=port
        )
        with pytest.raises(ValueError, match=rf"--port must be .* free, got 127.0.0.1:{port}"):
            serve(options, Output(quiet=True))
