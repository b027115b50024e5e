# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr watch --serve`: the pages that a real watch answers with."""

from __future__ import annotations

import http.client
from pathlib import Path
from socket import getfqdn, gethostname

import pytest

from ckptmgr.cli.exits import UsageProblem
from ckptmgr.cli.serve import ReportServer, parse_address
from tests.cli.running import run
from tests.cli.test_report import Page
from tests.cli.watching import Watch, watching
from tests.support.saved import save_run

SERVE = ("--serve", "127.0.0.1:0", "--poll", "1d")


def port_of(watch: Watch) -> int:
    """Return the port that the watch names before anything else."""
    message = watch.reports[0]["message"]
    address = message.removeprefix("the reports are at http://127.0.0.1:")
    return int(address.removesuffix("/"))


def ask(
    port: int, path: str = "/", method: str = "GET", host: str | None = None
) -> tuple[int, str]:
    """Return the status and the content of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_page_is_that_of_report_and_asks_to_be_fetched_again(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    with watching(tmp_path, *SERVE) as watch:
        status, text = ask(port_of(watch))
        assert watch.stop() == 0
    assert status == 200
    assert '<meta http-equiv="refresh"' in text
    page = Page(text)
    assert "script" not in page.tags
    assert {"svg", "table"} <= set(page.tags)
    assert "net-2_10.ckpt" in page.texts


def test_several_directories_have_a_page_of_links(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_run(tmp_path / name, [10], series=name)
    with watching(tmp_path / "a", tmp_path / "b", *SERVE) as watch:
        port = port_of(watch)
        assert [one for one in Page(ask(port)[1]).addresses if one != "data:,"] == ["/1/", "/2/"]
        assert "b-1_10.ckpt" in ask(port, "/2/")[1]
        assert watch.stop() == 0


def test_nothing_else_is_answered(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    with watching(tmp_path, *SERVE) as watch:
        port = port_of(watch)
        assert ask(port, "/../../etc/passwd")[0] == 404
        assert ask(port, "/net-1_10.ckpt")[0] == 404
        assert ask(port, method="POST")[0] == 501
        assert ask(port, method="HEAD") == (200, "")
        assert ask(port, host="evil.example")[0] == 421  # a name of another site that leads here
        assert ask(port, host="localhost")[0] == 200
        assert watch.stop() == 0


def test_report_that_cannot_be_made_is_an_error_of_the_page_alone() -> None:
    made = iter(["first"])

    def page() -> str:
        return next(made, "") or str(1 // 0)

    with ReportServer("0", {"/": page, "/other": lambda: str(1 // 0)}) as server:
        port = int(server.url.rpartition(":")[2].rstrip("/"))
        assert ask(port) == (200, "first")
        status, text = ask(port, "/other")
        assert ask(port) == (200, "first")  # kept for some seconds
    assert (status, "by zero" in text) == (500, True)


@pytest.mark.parametrize("text", ["", "x", "host:80", "127.0.0.1", "127.0.0.1:99999", "1.2.3.4:x"])
def test_address_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    result = run("watch", tmp_path, "--serve", text)
    assert result.exit_code == 2
    assert "--serve takes an IP address and a port" in result.stderr


def test_address_in_use_is_refused_with_the_way_out() -> None:
    with ReportServer("0", {}) as server, pytest.raises(UsageProblem, match="in use"):
        ReportServer(server.url.rpartition(":")[2].rstrip("/"), {})


def test_host_is_loopback_unless_named() -> None:
    assert parse_address("8000") == parse_address("localhost:8000") == ("127.0.0.1", 8000)
    assert parse_address("10.0.0.5:80") == ("10.0.0.5", 80)


def test_watch_that_ends_at_once_serves_nothing(tmp_path: Path) -> None:
    result = run("watch", tmp_path, "--serve", "0", "--once")
    assert result.exit_code == 2
    assert "--serve needs a watch that goes on" in result.stderr


@pytest.mark.parametrize(
    ("path", "host"), [("/", "[::1"), ("/", ""), ("http://[::1/", "localhost")]
)
def test_request_that_names_no_page_of_this_machine_is_refused(path: str, host: str) -> None:
    with ReportServer("0", {"/": lambda: "page"}) as server:
        port = int(server.url.rpartition(":")[2].rstrip("/"))
        assert ask(port, path, host=host)[0] in (404, 421)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
def test_name_of_another_site_that_leads_here_is_refused_on_each_address(address: str) -> None:
    with ReportServer(address, {"/": lambda: "page"}) as server:
        port = int(server.url.rpartition(":")[2].rstrip("/"))
        for host in ("node7.example", "127.0.0.1.example", "localhost.example:8000"):
            status, text = ask(port, host=host)
            assert (status, "by the IP address" in text) == (421, True)
        for host in ("10.0.0.5:8000", "[::1]:80", "LOCALHOST", gethostname(), getfqdn()):
            assert ask(port, host=host) == (200, "page")


def test_address_of_version_6_is_shown_in_brackets() -> None:
    try:
        server = ReportServer("[::1]:0", {"/": lambda: "page"})
    except UsageProblem:
        pytest.skip("this machine has no IPv6")
    with server:
        assert server.url.startswith("http://[::1]:")
