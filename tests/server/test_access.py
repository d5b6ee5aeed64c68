"""Who may use the server: hosts, origins, keys, sizes; and what is logged."""

import hmac
import logging
import os
import socket
import stat

import httpx
import pytest

from mlxrt import EngineConfig
from mlxrt.cli import main
from mlxrt.cli.flags import Parser
from mlxrt.cli.serve import add_flags, read_options
from mlxrt.errors import BadRequest
from mlxrt.server.access import AccessRules
from mlxrt.server.run import Address, ServeOptions

from .conftest import running, wait_for

KEY = "a-secret-key-of-some-length"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "127.9.9.9", "[::1]:80", "app.localhost:1"])
def test_loopback_names_are_known(server, host):
    assert server.get("/health", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil"]
)
def test_other_names_are_refused(server, host):
    """DNS rebinding: a page of another site makes its own name point here."""
    assert server.get("/health", headers={"host": host}).status_code == 403


def test_pages_of_other_origins_are_refused_before_the_body_is_read(server):
    for headers in ({"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert server.post("/v1/chat/completions", {}, headers=headers).status_code == 403
    own = server.get("/v1/models", headers={"origin": server.url})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


def test_named_origins_may_call():
    rules = AccessRules(origins=("http://app.example",), keys=(KEY,))
    with running(rules) as server:
        origin = {"origin": "http://app.example"}
        wanted = "authorization, anthropic-version, x-stainless-lang, x-request-timeout"
        asked = httpx.options(server.url + "/v1/models", headers=origin | {"access-control-request-headers": wanted})
        assert asked.status_code == 204 and asked.headers["access-control-allow-origin"] == "http://app.example"
        assert asked.headers["access-control-allow-headers"] == wanted
        refused = server.get("/v1/models", headers=origin)
        assert refused.status_code == 401
        exposed = refused.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "x-mlxrt-ignored", "retry-after"} <= {*exposed}
        others = server.get("/health", headers={"access-control-request-headers": wanted}).headers
        assert not [name for name in others if name.startswith("access-control-")]


def read_flags(*flags: str) -> ServeOptions:
    parser = Parser()
    add_flags(parser)
    return read_options(parser.parse_args(flags))


def test_hosts_that_are_named_are_the_only_ones_on_any_address():
    beyond = ("--host", "0.0.0.0", "--insecure")
    assert not read_flags(*beyond).rules.check_host and read_flags().rules.check_host
    rules = read_flags(*beyond, "--allow-host", "Box.example").rules
    with running(rules) as server:
        for host, status in (("box.example:8080", 200), ("localhost", 200), ("evil.example", 403), ("10.0.0.1", 403)):
            assert server.get("/health", headers={"host": host}).status_code == status, host


def test_an_address_is_a_host_and_a_port_or_a_socket():
    assert read_flags().address == Address("127.0.0.1", 8080)
    assert read_flags("--host", "::1", "--port", "0").address == Address("::1", 0)
    assert read_flags("--uds", "/run/socket").address == Address(path="/run/socket")


def test_keys_open_everything_but_the_page_and_health():
    with running(AccessRules(keys=(KEY, "another-secret-key"))) as server:
        assert server.get("/health").status_code == 200 and server.get("/ready").json() == {"status": "ready"}
        for path in ("/v1/models", "/metrics", "/v1/cache", "/api/tags"):
            assert server.get(path).status_code == 401, path
        assert server.get("/v1/models", headers={"authorization": "Bearer wrong-key-here"}).status_code == 401
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": "another-secret-key"}):
            assert server.get("/v1/models", headers=headers).status_code == 200


def test_every_key_is_compared_in_constant_time(monkeypatch):
    """Whether the first key matches, a later one or none: the same comparisons of digests of one length."""
    compared: list[int] = []
    compare = hmac.compare_digest
    monkeypatch.setattr(
        "mlxrt.server.access.hmac.compare_digest",
        lambda a, b: (compared.append(len(a) if len(a) == len(b) else 0), compare(a, b))[1],
    )
    with running(AccessRules(keys=(KEY, "another-secret-key", "a-third-secret-key"))) as server:
        for key, status in ((KEY, 200), ("a-third-secret-key", 200), ("x", 401), ("y" * 500, 401)):
            compared.clear()
            assert server.get("/v1/models", headers={"x-api-key": key}).status_code == status
            assert compared == [32, 32, 32]


def test_no_url_of_a_client_is_fetched(server):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/secret.png"
        ask = {"model": "toy", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}

        def say(part) -> dict:
            return ask | {"messages": [{"role": "user", "content": [part]}]}

        schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"$ref": url}}}
        image, source = {"type": "input_image", "image_url": url}, {"type": "url", "url": url}
        bodies = [
            ("/v1/chat/completions", say({"type": "image_url", "image_url": {"url": url}})),
            ("/v1/chat/completions", ask | {"response_format": schema}),
            ("/v1/responses", {"model": "toy", "input": [{"role": "user", "content": [image]}]}),
            ("/v1/messages", say({"type": "image", "source": source})),
            ("/v1/messages", say({"type": "document", "source": source})),
            ("/api/chat", {"model": "toy", "messages": [{"role": "user", "content": "x", "images": [url]}]}),
            ("/api/generate", {"model": "toy", "prompt": "x", "images": [url]}),
        ]
        for path, body in bodies:
            assert server.post(path, body).status_code == 400, path
        assert server.post("/api/pull", {"model": url}).status_code == 501
        assert server.post("/v1/chat/completions", ask | {"model": url}).status_code == 404
        with pytest.raises(BlockingIOError):  # nobody has called
            listening.accept()


def test_it_listens_on_this_machine_only_unless_told_otherwise(tmp_path):
    assert Address().loopback and Address().host == "127.0.0.1" and Address("::1").loopback
    assert not any(Address(host).loopback for host in ("0.0.0.0", "::", "192.168.1.5", "a-name"))
    path = str(tmp_path / "socket")
    Address(path=path).open().close()  # as a server that was killed leaves it
    with Address(path=path).open():
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with pytest.raises(BadRequest, match="--uds"):  # another server answers there
            Address(path=path).open()


def test_a_socket_replaces_no_file(tmp_path):
    kept = tmp_path / "letters"
    kept.write_text("mine")
    (tmp_path / "link").symlink_to(kept)
    for path in (kept, tmp_path / "link", tmp_path):
        with pytest.raises(BadRequest, match=r"cannot listen on .*--uds"):
            Address(path=str(path)).open()
    assert kept.read_text() == "mine" and (tmp_path / "link").is_symlink()


def test_a_body_over_the_limit_is_413_announced_or_not():
    with running(AccessRules(max_body=1000)) as server:
        assert server.post("/v1/chat/completions", {"x": "y" * 2000}).status_code == 413
        chunked = httpx.post(server.url + "/api/chat", content=iter([b"a" * 600, b"b" * 600]))
        assert chunked.status_code == 413 and "error" in chunked.json()
        assert server.chat().status_code == 200


def test_request_ids_are_kept_or_made(server):
    assert server.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = server.get("/health", headers={"x-request-id": "a b\tc" * 50}).headers["x-request-id"]
    assert made.startswith("req_")


def test_the_log_has_no_prompt(server, caplog):
    caplog.set_level(logging.DEBUG, "mlxrt.server")
    logging.getLogger("mlxrt").propagate = True
    server.chat("my secret question")
    # The line is written after the answer's last byte has left: the client may be here before it.
    wait_for(lambda: any("POST /v1/chat/completions 200" in record.getMessage() for record in caplog.records))
    assert not any("secret" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--allow-origin", "*"], "every web page"),
        (["--api-key-file", "/nonexistent"], "--api-key-file"),
        (["--model", "a=b", "--model", "a=c"], "twice"),
        (["--model", "=x"], "NAME=MODEL"),
        (["--isolate"], "--api-key-file"),
        (["--uds", "socket", "--port", "8080"], "leave out --port, or --uds"),
        (["--uds", "socket", "--host", "127.0.0.1", "--port", "0"], "leave out --host and --port, or --uds"),
        (["--allow-origin", "http://app.example/"], "expected what browsers send"),
        (["--allow-origin", "app.example"], "expected what browsers send"),
        (["--max-models", "0"], "--max-models must be"),
        (["--grace", "-1"], "--grace must be"),
        (["--idle-unload", "0"], "--idle-unload must be"),
        (["--port", "70000"], "--port must be"),
    ],
)
def test_flags_that_cannot_be_right(capsys, flags, text):
    assert main(["serve", *flags]) == 2
    assert text in capsys.readouterr().err


def test_prompts_are_logged_where_the_operator_wants_it(caplog):
    caplog.set_level(logging.INFO, "mlxrt.server")
    logging.getLogger("mlxrt").propagate = True
    with running(log_prompts=True) as server:
        id = server.chat("my open question").headers["x-request-id"]
    assert any(id in r.getMessage() and "my open question" in r.getMessage() for r in caplog.records)


def ask_as(server, key: str, **options) -> int:
    """A question of one key; how many of its tokens came from the cache."""
    body = {"model": "toy", "messages": [{"role": "user", "content": "the same long question " * 4}], "max_tokens": 4}
    answer = server.post("/v1/chat/completions", body | options, headers={"x-api-key": key})
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("disk", [False, True])
def test_isolated_keys_share_no_prefix(tmp_path, disk):
    config = EngineConfig(chunk=16, **({"disk_cache": str(tmp_path)} if disk else {}))
    with running(AccessRules(keys=(KEY, "another-secret-key"), isolate=True), config) as server:
        assert ask_as(server, KEY) == 0 and ask_as(server, KEY) > 64
        assert ask_as(server, "another-secret-key") == 0 and ask_as(server, "another-secret-key") > 64
        server.engine.clear_prefix_cache()
        assert (ask_as(server, KEY) > 64) == disk  # each finds its own on disk
        shown = server.get("/v1/cache", headers={"x-api-key": KEY}).json()["models"]["toy"]["disk"]
        assert shown["records"] > 0 if disk else shown is None
        warmed = {"model": "toy", "prompt": "something to warm " * 5}
        for key in (KEY, "another-secret-key"):
            server.post("/v1/cache/warm", warmed, headers={"x-api-key": key})
    if disk:  # another process, other keys
        with running(AccessRules(keys=(KEY, "a-third-secret-key"), isolate=True), config) as server:
            assert ask_as(server, "a-third-secret-key") == 0 and ask_as(server, KEY) > 64


def test_a_salt_of_the_client_separates_prefixes_too():
    with running() as server:
        assert ask_as(server, "", cache_salt="a") == 0 and ask_as(server, "", cache_salt="a") > 64
        assert ask_as(server, "", cache_salt="b") == 0 and ask_as(server, "") == 0
        server.engine.clear_prefix_cache()
        assert ask_as(server, "", cache_salt="a") == 0
