"""The page's server by plain HTTP: permissions and refusals."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import web as made
from gpusched.cli.main import COMMANDS
from gpusched.client.context import Client
from gpusched.model.commands import RecordAudit
from gpusched.queue.inbox import Inbox, ReceivedCommand
from gpusched.queue.store import Store
from gpusched.web import feed
from tests import commands
from tests.testbed.waiting import wait_until
from tests.web.conftest import NASTY, SECRET, Served, build, move


def everything(page: Served, jobs: list[str], **headers: str) -> str:
    """All that can be asked for."""
    paths = ["/", "/app.js", "/api/state", "/api/forecast", "/api/usage", "/api/me"]
    paths += [f"/api/job/{job}{more}" for job in jobs for more in ("", "/log", "/log?rank=0&attempt=1")]
    return "\n".join(page.get(path, **headers).body.decode() for path in paths)


def test_an_anonymous_client_sees_what_status_shows(served: Served, named: dict[str, str]) -> None:
    jobs = [row["id"] for row in served.get("/api/state").json["jobs"]]
    assert named["own"] in jobs
    assert SECRET not in everything(served, [*jobs[:20], named["own"]])
    assert served.get(f"/api/job/{named['own']}/log").status == 403
    page = served.get(f"/api/job/{named['own']}").json
    assert page["private"] is None
    assert page["job"]["state"] == "COMPLETED"


def test_a_header_counts_only_from_the_proxy(served: Served, behind: Served, named: dict[str, str]) -> None:
    """The first page knows no proxy; of the second our own account is it, and nobody's is not."""
    own = named["own"]
    assert served.get(f"/api/job/{own}/log", X_Remote_User="amira").status == 403
    assert behind.get(f"/api/job/{own}/log", X_Remote_User="amira").json["text"].startswith("epoch 1")
    if os.getuid() == 0:
        assert _as_nobody(behind, f"/api/job/{own}/log", "amira") == 403
        assert _as_nobody(behind, f"/api/job/{own}", "amira") == 200


def _as_nobody(page: Served, path: str, user: str) -> int:
    """The status that another account of this machine gets."""
    code = (
        "import encodings.idna, http.client as h, os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "c = h.HTTPConnection('127.0.0.1', int(sys.argv[1]));"
        "c.request('GET', sys.argv[2], headers={'X-Remote-User': sys.argv[3]}); print(c.getresponse().status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(page.port), path, user], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.parametrize(
    ("user", "sees"),
    [("amira", True), ("root", True), ("chen", False), ("", False), ("am ira", False), ("amira, root", False)],
)
def test_only_its_user_and_admins_see_what_a_job_prints(
    behind: Served, named: dict[str, str], user: str, sees: bool
) -> None:
    page = behind.get(f"/api/job/{named['own']}", X_Remote_User=user).json
    assert (SECRET in json.dumps(page)) is sees
    log = behind.get(f"/api/job/{named['own']}/log", X_Remote_User=user)
    assert (log.status == 200) is sees
    assert SECRET not in behind.get("/api/state", X_Remote_User=user).body.decode()


def test_a_header_that_comes_twice_names_no_user(behind: Served, named: dict[str, str]) -> None:
    with socket.create_connection(("127.0.0.1", behind.port)) as sock:
        sock.sendall(
            f"GET /api/job/{named['own']}/log HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            "X-Remote-User: amira\r\nX-Remote-User: root\r\n\r\n".encode()
        )
        assert sock.makefile("rb").readline().split()[1] == b"403"


@pytest.mark.parametrize("more", ["Content-Length: {}", "Content-Length: 0\r\nContent-Length: {}",
                                  "Transfer-Encoding: chunked", "X-A: b\rX-Remote-User: amira\r\rc"])  # fmt: skip
def test_what_a_proxy_forwards_as_a_body_is_no_request(behind: Served, named: dict[str, str], more: str) -> None:
    """Else its sender would write the header that names the user himself."""
    body = f"GET /api/job/{named['own']}/log HTTP/1.1\r\nX-Remote-User: amira\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", behind.port)) as sock:
        sock.sendall(f"GET /api/me HTTP/1.1\r\n{more.format(len(body))}\r\nX-Remote-User: chen\r\n\r\n{body}".encode())
        answer = sock.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"epoch 1" not in answer


def test_environment_values_are_never_shown(behind: Served, named: dict[str, str]) -> None:
    private = dict(behind.get(f"/api/job/{named['own']}", X_Remote_User="amira").json["private"])
    assert private["env"] == f"TOKEN_{SECRET}"
    assert SECRET in private["command"]


def test_no_file_is_read_with_the_servers_rights(behind: Served, named: dict[str, str]) -> None:
    """A job's ``-o`` may name, or link to, what its user must not read and the server's account may."""
    log = behind.get(f"/api/job/{named['reaching']}/log", X_Remote_User="amira").json
    assert log["text"] == ""
    assert "cannot be read from here" in log["note"]


def test_output_is_plain_text(behind: Served, named: dict[str, str]) -> None:
    text = behind.get(f"/api/job/{named['own']}/log", X_Remote_User="amira").json["text"]
    assert text == "epoch 1\nstep 3\nloss 0.25 <b>&\n"


@pytest.mark.parametrize(
    "path", ["/", "/app.js", "/style.css", "/api/state", "/api/job/nothing", "/nothing", "/icon.svg"]
)
def test_every_answer_says_what_browsers_may_do(served: Served, path: str) -> None:
    headers = served.get(path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:1", 200), ("localhost:8765", 200), ("[::1]:80", 200), (socket.gethostname(), 200),
     ("evil.example", 421), ("127.0.0.1.evil.example", 421), ("", 421)],
)  # fmt: skip
def test_other_names_are_refused(served: Served, host: str, status: int) -> None:
    """DNS rebinding: a page of evil.example whose name leads here all of a sudden must get nothing."""
    assert served.get("/api/state", Host=host).status == status


def test_requests_of_other_sites_pages_are_refused(served: Served) -> None:
    assert served.get("/api/state", Sec_Fetch_Site="cross-site").status == 403
    assert served.get("/api/state", Sec_Fetch_Site="same-site").status == 403  # another port of this machine
    assert served.get("/%61pi/state", Sec_Fetch_Site="cross-site").status == 403
    assert served.get("/api/state", Sec_Fetch_Site="same-origin").status == 200
    assert served.get("/", Sec_Fetch_Site="cross-site").status == 200  # a link to us


def test_refusals_are_recorded_in_the_audit_log(served: Served) -> None:
    inbox = Inbox(served.folder / "state")
    inbox.create()

    def is_reported() -> bool:
        assert served.get("/api/state?a", Host="evil.example").status == 421
        found = [item.command for item in inbox.waiting() if isinstance(item, ReceivedCommand)]
        reported = [(c.via, c.user, c.origin, c.subject) for c in found if isinstance(c, RecordAudit)]
        return ("page", "unknown", "http 127.0.0.1", ("/api/state?a",)) in reported

    wait_until(is_reported, 30, "its turn: other tests' refusals may have used up those of the first seconds")


@pytest.mark.parametrize("path", ["/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "/data.js/", "/x.js"])
def test_no_other_files(served: Served, path: str) -> None:
    assert served.get(path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_only_reads(served: Served, method: str) -> None:
    assert served.get("/api/state", method=method).status >= 400


def test_wrong_jobs_are_one_line(served: Served) -> None:
    for text in ("nothing", "%3Cscript%3E", "zzzzzzzzzzz", "%00", "a" * 79):
        answer = served.get(f"/api/job/{text}")
        assert answer.status == 404, text
        assert list(answer.json) == ["error"]
        assert "\n" not in answer.json["error"]


def test_responses_are_compressed_and_cached(served: Served) -> None:
    plain, packed = served.get("/style.css"), served.get("/style.css", Accept_Encoding="gzip")
    assert gzip.decompress(packed.body) == plain.body
    assert served.get("/style.css", If_None_Match=plain.headers["etag"]).status == 304
    assert served.get("/api/state", "HEAD").body == b""
    assert served.get("/api/state").headers["cache-control"] == "no-store"


def test_waiting_tasks_of_an_array_are_one_row(served: Served, named: dict[str, str]) -> None:
    found = [row for row in served.get("/api/state").json["jobs"] if row.get("array_id") == named["array"]]
    assert [(row["array_count"], row["array_tasks"]) for row in found] == [(40, "0-39")]


PAGE_ONLY = {
    "key", "allocation", "node_count", "limit_end", "progress_end", "step", "of", "group", "qos", "reservation",
}  # fmt: skip


def test_rows_are_what_status_shows(served: Served) -> None:
    env = os.environ | {
        "GPUSCHED_STATE": f"{served.folder}/state",
        "GPUSCHED_INVENTORY": f"{served.folder}/inventory.yaml",
    }
    said = json.loads(commands.run("status", "-s", "running,pending", "--json", env=env).stdout)
    rows = served.get("/api/state").json["jobs"]
    assert {
        (j["id"], j["state"], j["gpus"], j["reason"] or "", tuple(j["nodes"])) for j in said if not j["array_id"]
    } == {
        (j["id"], j["state"], j["gpus"], j.get("reason", ""), tuple(part[0] for part in j.get("allocation", [])))
        for j in rows
        if j["state"] in ("RUNNING", "PENDING") and not j.get("array_id")
    }
    assert any(j.get("reason") == NASTY for j in rows)
    by_id, same = {job["id"]: job for job in said}, ("partition", "time_limit_s", "priority", "energy_j", "held_by")
    for row in rows:
        assert not row.keys() - said[0].keys() - PAGE_ONLY
        if (shown := by_id.get(row["id"])) is not None:
            assert [row[key] for key in same if key in row] == [shown[key] for key in same if key in row]


@pytest.fixture
def changing(tmp_path: Path) -> Served:
    build(tmp_path)
    found = Served(tmp_path, *made.serving(tmp_path))
    yield found
    found.stop()


def test_changes_lead_to_the_same_as_everything(changing: Served) -> None:
    """A client that applies the changes has what a new client gets; one from elsewhere gets everything."""
    mine = changing.get("/api/state").json
    for seed in range(3):
        move(changing.folder, seed)
        _until_newer(changing, mine)
        news = changing.get(f"/api/state?since={mine['feed']}-{mine['v']}").json
        assert "jobs" not in news
        _apply(mine, news)
    while (fresh := changing.get("/api/state").json)["v"] != mine["v"]:  # a controller that ticks late is news, too
        _apply(mine, changing.get(f"/api/state?since={mine['feed']}-{mine['v']}").json)
    assert {j.get("key", j["id"]): j for j in mine["jobs"]} == {j.get("key", j["id"]): j for j in fresh["jobs"]}
    assert mine["nodes"] == fresh["nodes"]
    assert mine["head"] == fresh["head"]
    for strange in (f"other-{mine['v']}", f"{mine['feed']}-999", f"{mine['feed']}-0", "", "-", f"{mine['feed']}-x"):
        assert changing.get(f"/api/state?since={strange}").json["jobs"]


def _until_newer(page: Served, mine: dict) -> None:  # type: ignore[type-arg]
    wait_until(lambda: page.get(f"/api/state?since={mine['feed']}-{mine['v']}").json.get("changes"), what="news")


def _apply(mine: dict, news: dict) -> None:  # type: ignore[type-arg]
    jobs = {j.get("key", j["id"]): j for j in mine["jobs"]}
    nodes = {n["name"]: n for n in mine["nodes"]}
    for change in news["changes"]:
        mine["head"] = change.get("head", mine["head"])
        nodes |= {n["name"]: n for n in change.get("nodes", [])}
        for key in change.get("gone", []):
            del jobs[key]
        jobs |= {j.get("key", j["id"]): j for j in change.get("jobs", [])}
    mine |= {"v": news["v"], "jobs": list(jobs.values()), "nodes": list(nodes.values())}


def test_the_time_is_that_of_the_answer(changing: Served) -> None:
    """The page sets its clock by it, however long nothing has changed."""
    clock, client = [time.time()], Client(changing.folder / "state", changing.folder / "inventory.yaml")
    served = feed.Feed(feed.SiteReader(client), clock=lambda: clock[0])
    served.refresh_view(strict=True)
    first = json.loads(served.since("", 0).plain)
    assert served.since("", 0) is served.since("", 0)
    clock[0] += 3600.0
    later = json.loads(served.since("", 0).plain)
    assert later["now"] - first["now"] == pytest.approx(3600.0)
    assert later["v"] == first["v"]
    assert json.loads(served.since(served.name, later["v"]).plain)["now"] == later["now"]


def test_it_says_when_not_all_ended_jobs_of_the_day_are_shown(
    changing: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(changing.folder / "state", changing.folder / "inventory.yaml")
    assert json.loads(feed.view_of(client, time.time()).head)["last_ended"] is None
    monkeypatch.setattr(feed, "ENDED_SHOWN", 1)
    view = feed.view_of(client, time.time())
    assert json.loads(view.head)["last_ended"] == 1
    assert sum(json.loads(row)["state"] == "COMPLETED" for row in view.jobs.values()) == 1


def test_news_come_as_events(changing: Served) -> None:
    with socket.create_connection(("127.0.0.1", changing.port), timeout=300) as sock:
        sock.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        lines = sock.makefile("rb")
        signs = _signs(lines)
        made.tick(changing.folder, 1)
        while signs == (later := _signs(lines)) or later["v"] == signs["v"]:
            signs = later
        assert later["feed"] == signs["feed"]
        assert later["v"] > signs["v"]


def _signs(lines) -> dict:  # type: ignore[type-arg,no-untyped-def]
    while not (line := lines.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line[6:])  # type: ignore[no-any-return]


def test_a_broken_inventory_leaves_the_page_as_it_was(changing: Served) -> None:
    before = changing.get("/api/state").json
    file = changing.folder / "inventory.yaml"
    file.write_text(file.read_text() + "nonsense: [\n")
    _until_newer(changing, before)
    now = changing.get("/api/state").json
    assert now["nodes"] == before["nodes"]
    assert len(now["jobs"]) == len(before["jobs"])
    assert re.match(r"this page cannot be updated: .*inventory.yaml:\d+", now["head"]["warning"])


def test_before_there_is_a_store(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(
        "defaults: {runtime: process, gpus: 2, cores: 4, memory: 8G}\n"
        "partitions: {small: {nodes: [n1], flavors: {one: {gpus: 1, cores: 1, memory: 1G, time: 1h}}}}\n"
    )
    page = Served(tmp_path, *made.serving(tmp_path))
    try:
        state = page.get("/api/state").json
        assert [n["gpus"] for n in state["nodes"]] == ["UU"]
        assert state["jobs"] == []
        assert "gpusched controller" in state["head"]["warning"]
        store = Store.create_or_open(tmp_path / "state")
        store.set_meta("heartbeat", str(time.time()))
        store.close()
        _until_newer(page, state)
    finally:
        page.stop()


def test_the_command_is_there() -> None:
    assert "web" in COMMANDS
