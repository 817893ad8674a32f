"""The page in a real Chromium: at three widths, by keyboard, as things change, as files."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from benchmarks import web as made
from gpusched.config.inventory import load_inventory
from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from gpusched.model.slices import MigSlice, slice_index
from gpusched.queue.store import Store
from tests import commands
from tests.study.png import pixels
from tests.web.browser import Browser
from tests.web.conftest import NASTY, SECRET, Served, build, move

PAGES = ("", "jobs", "nodes", "timeline", "usage", "job/{own}", "job/{nasty}", "node/gpu0001", "jobs?of=ended&q=amira")
WIDTHS = [390, 820, 1440]
LIVE = "document.querySelector('#live').className === 'live'"
WORLD = "import('./data.js').then(m => {body})"

CELLS = """{
const b = document.querySelector('.partition canvas').getBoundingClientRect();
const style = getComputedStyle(document.documentElement);
const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const of = name => {
  c.fillStyle = style.getPropertyValue('--' + name).trim(); c.fillRect(0, 0, 1, 1);
  return [...c.getImageData(0, 0, 1, 1).data].slice(0, 3); };
const tone = (letter, use) => letter === 'F' ? 'free'
  : use < 5 ? 'idle' : use < 35 ? 'held-1' : use < 70 ? 'held-2' : 'held-3';
const nodes = [...m.world.nodes.values()].slice(0, 4);
const at = (n, i) => ({x: b.left + n * 176 + i * 20 + 9, y: b.top + 17 + 9});
return nodes.flatMap((node, n) => [...node.gpus].map((letter, i) => (
  {...at(n, i), wanted: of(tone(letter, node.util[i]))}))); }"""


def look(browser: Browser, url: str, page: str = "") -> None:
    """Open a page of ours, and wait until it stands."""
    browser.load(f"{url}#/{page}", "performance.getEntriesByName('first-view').length")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_its_width(browser: Browser, served: Served, named: dict[str, str], width: int) -> None:
    browser.size(width, 844, phone=width < 500)
    look(browser, served.url)
    for page in PAGES:
        browser.go(f"{served.url}#/{page.format(**named)}")
        browser.until("document.querySelector('main h1')")
        browser.until("!document.querySelector('main').innerText.includes('Reading')")
        assert browser.run("document.documentElement.scrollWidth - innerWidth") <= 0, page
        cut = browser.run(
            "[...document.querySelectorAll('main h1, main h2, .tile .big, .choice button, nav a')]"
            ".filter(e => e.offsetParent && !e.closest('nav, .tabs, .unseen') && !e.matches('.unseen') && "
            "e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"
        )
        assert cut == [], page
        outside = browser.run(
            "[...document.querySelectorAll('.list')].flatMap(l => [...l.querySelectorAll('.row > span')].filter("
            "s => s.getBoundingClientRect().right > l.getBoundingClientRect().right - 8).map(s => s.className))"
        )
        assert outside == [], page
    assert browser.run("window.hacked") is None


def test_tiles_say_what_the_store_says(browser: Browser, served: Served) -> None:
    store = Store.create_or_open(served.folder / "state")
    held = sum(len(p.gpus) for job in store.active() for p in job.allocation.parts)  # type: ignore[union-attr]
    waiting, running = len(store.pending()), len(store.active())
    store.close()
    look(browser, served.url)
    tiles = browser.run("[...document.querySelectorAll('.tile')].map(t => t.innerText.replace(/\\n+/g, '\\n'))")
    assert tiles[0].split("\n")[1].split() == [str(held), "of", "48"]
    assert tiles[1].split("\n")[1].startswith(f"{waiting} pending")
    assert f"{running} running" in tiles[1]
    browser.until("document.querySelectorAll('.tile .spark path').length === 4")  # figures of the last day are there
    browser.until("document.querySelector('.tile:nth-child(2)').innerText.includes('next start')")


def test_groups_and_users_add_up_to_the_same(browser: Browser, served: Served) -> None:
    look(browser, served.url)
    browser.run("document.querySelector('[aria-label=subject] [data-value=group]').click()")
    shown = browser.run(
        "[...document.querySelectorAll('.users li')].map(l => [l.querySelector('.what').innerText, "
        "+l.querySelector('.num').firstChild.data.replace(',', '')])"
    )
    assert {name for name, _ in shown} == {"vision", "language", "biology"}
    held = int(browser.run("document.querySelector('.tile .big').firstChild.data"))
    assert sum(count for _, count in shown) == held > 0


def test_names_are_never_markup(browser: Browser, served: Served, named: dict[str, str]) -> None:
    look(browser, served.url)
    for page in ("", "jobs?of=waiting", f"job/{named['nasty']}", "timeline"):
        browser.go(f"{served.url}#/{page}")
        browser.until("document.querySelector('main h1')")
        assert browser.run("document.querySelectorAll('main img, main script').length") == 0
    browser.go(f"{served.url}#/job/{named['nasty']}")
    browser.until(f"document.querySelector('h1').innerText.includes({json.dumps(NASTY)})")
    assert browser.run("window.hacked") is None


@pytest.mark.parametrize(("scheme", "ground"), [("light", (245, 246, 245)), ("dark", (14, 18, 20))])
def test_cells_have_the_colours_of_what_the_gpus_do(
    browser: Browser, served: Served, scheme: str, ground: tuple[int, ...]
) -> None:
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    look(browser, served.url)
    shot = pixels(browser.shot())
    assert tuple(shot[-2, 2]) == ground
    cells = browser.run(WORLD.format(body=CELLS))
    assert len(cells) == 32
    for cell in cells:
        assert tuple(shot[round(cell["y"]), round(cell["x"])]) == tuple(cell["wanted"])
    assert len({tuple(c["wanted"]) for c in cells}) > 1
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])


def test_by_keyboard(browser: Browser, served: Served, named: dict[str, str]) -> None:
    look(browser, served.url)
    browser.press("g")
    browser.press("j")
    browser.until("location.hash === '#/jobs' && document.querySelector('h1').innerText === 'Jobs'")
    browser.press("/")
    browser.until("document.activeElement.type === 'search'")
    browser.type("sweep chen priority")
    browser.until("document.querySelectorAll('.jobs .body .row').length === 1")
    assert "× 40" in browser.text()
    browser.press("Escape")
    browser.press("j")
    browser.until("document.activeElement.matches('a.open')")
    browser.press("Enter")
    browser.until(f"location.hash === '#/job/{named['array']}_0'")
    browser.press("Escape")
    browser.until("location.hash.startsWith('#/jobs')")
    browser.press("?")
    browser.until("document.querySelector('dialog').open")
    browser.press("Escape")
    browser.go(f"{served.url}#/")
    browser.until("document.querySelector('.partition canvas')")
    browser.run("document.querySelector('.partition canvas').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    browser.until("document.querySelector('#spoken').innerText.startsWith('gpu0002, ')")
    browser.press("Enter")
    browser.until("location.hash === '#/node/gpu0002'")


def cut_gpus(folder: Path, name: str) -> list[str]:
    """Cut two GPUs of a node, of the first of which two jobs have slices; return these jobs' ids."""
    store = Store.create_or_open(folder / "state")
    record = store.node_records()[name]
    assert record.reading is not None
    layout = {0: (("1g.10gb", 0), ("1g.10gb", 1), ("2g.20gb", 2), ("3g.40gb", 4)), 1: (("1g.10gb", 0),)}
    gpus = tuple(
        msgspec.structs.replace(
            gpu, mig_mode=True, utilization_pct=None, processes=(),
            slices=tuple(MigSlice(gpu=gpu.index, start=start, profile=profile, uuid=f"MIG-{gpu.index}-{start}")
                         for profile, start in layout[gpu.index]),
        ) if gpu.index in layout else gpu
        for gpu in record.reading.gpus
    )  # fmt: skip
    gone = [job for job in store.active() if job.allocation and any(p.node == name for p in job.allocation.parts)]
    made_up = [job for job in store.active() if job not in gone][:2]
    with store.transaction():
        store.put_nodes([msgspec.structs.replace(record, reading=msgspec.structs.replace(record.reading, gpus=gpus))])
        store.put_jobs(msgspec.structs.replace(job, state=JobState.COMPLETED, end_time=time.time()) for job in gone)
        for job, held in zip(made_up, ((0, 1), (4,)), strict=True):
            numbers = tuple(slice_index(0, start) for start in held)
            part = NodeAllocation(rank=0, node=name, gpus=numbers, cores=1, memory_mib=1)
            spec = msgspec.structs.replace(
                job.spec, name="train-" * 30, nodes=1, gpus_per_node=len(held),
                profile="3g.40gb" if held == (4,) else "1g.10gb", partition=record_partition(folder, name),
            )  # fmt: skip
            store.put_jobs([msgspec.structs.replace(job, spec=spec, allocation=Allocation(job.id, (part,)))])
    store.close()
    return [job.id for job in made_up]


def record_partition(folder: Path, name: str) -> str:
    """The partition of a node."""
    inventory = load_inventory(folder / "inventory.yaml")
    return next(node.partition for node in inventory.nodes if node.name == name)


def test_a_gpu_that_is_cut_has_its_slices_and_their_jobs(browser: Browser, tmp_path: Path) -> None:
    build(tmp_path, 6, 60)
    jobs = cut_gpus(tmp_path, "gpu0005")
    served = Served(tmp_path, *made.serving(tmp_path))
    try:
        look(browser, served.url, "node/gpu0005")
        browser.until("document.querySelectorAll('.gpu.slice').length === 5")
        lines = browser.run("[...document.querySelectorAll('.gpu')].map(e => e.innerText.replace(/\\s+/g, ' ').trim())")
        assert "1 of 4 MIG slices free" in lines[0]
        held = [line for line in lines if line.startswith(("1g.10gb@", "2g.20gb@", "3g.40gb@"))]
        assert [("·" in line, line.split()[0]) for line in held] == [
            (True, "1g.10gb@0"), (True, "1g.10gb@1"), (False, "2g.20gb@2"), (True, "3g.40gb@4"), (False, "1g.10gb@0")
        ]  # fmt: skip
        assert "1 of 1 MIG slice free" in lines[5]
        shown = browser.run("[...document.querySelectorAll('.jobs .open')].map(e => e.innerText)")
        assert set(jobs) <= set(shown), "both are on one GPU"
        browser.size(1440)
        asked = browser.run(
            "[...document.querySelectorAll('.jobs .name small')].map(s => [s.innerText.trim(), "
            "s.getBoundingClientRect().right <= s.parentNode.getBoundingClientRect().right])"
        )
        assert sorted(asked) == [["1g.10gb:2", True], ["3g.40gb:1", True]], "a long name is cut, its slices are not"
        condition = "[...document.querySelectorAll('.panel li')].map(e => e.innerText)[0]"
        assert browser.run(condition).startswith("GPU 2 8 lanes")
        browser.go(f"{served.url}#/")
        browser.until("document.querySelector('.tile .under')?.innerText.includes('1 cut into slices, all free')")
        browser.go(f"{served.url}#/job/{jobs[0]}")
        browser.until("document.querySelector('.facts')?.innerText.includes('1g.10gb:2')")
    finally:
        browser.go("about:blank")
        served.stop()


def test_holders_of_idle_gpus_are_named(browser: Browser, served: Served) -> None:
    look(browser, served.url, "usage")
    panel = "[...document.querySelectorAll('section')].find(s => s.innerText.startsWith('Idle GPUs held now'))"
    browser.until(f"{panel}?.querySelector('tbody tr')")
    shown = browser.run(f"[...{panel}.querySelectorAll('tbody tr')].map(r => r.innerText).join()")
    held = served.get("/api/usage").json["idle"]
    assert held
    assert all(row["name"] in shown and row["user"] in shown for row in held)


def test_everything_that_can_be_used_has_a_name_and_takes_the_focus(browser: Browser, served: Served) -> None:
    look(browser, served.url)
    for page in ("", "jobs", "nodes", "timeline", "usage"):
        browser.go(f"{served.url}#/{page}")
        browser.until("document.querySelector('main h1')")
        nameless = browser.run(
            "[...document.querySelectorAll('a, button, input, canvas[tabindex], [role=region]')]"
            ".filter(e => !(e.innerText || e.getAttribute('aria-label') || '').trim()).map(e => e.outerHTML)"
        )
        assert nameless == [], page
        assert browser.run("[...document.querySelectorAll('main [onclick]')].length") == 0
    seen = set()
    for _ in range(12):
        browser.press("Tab")
        seen.add(browser.run("document.activeElement.outerHTML.slice(0, 60)"))
    assert len(seen) == 12


def test_pointing_says_what_is_there(browser: Browser, served: Served) -> None:
    look(browser, served.url)
    box = browser.run("(b => [b.left, b.top])(document.querySelector('.partition canvas').getBoundingClientRect())")
    browser.mouse(box[0] + 8, box[1] + 25)
    browser.until("!document.querySelector('#tip').hidden")
    assert browser.run("document.querySelector('#tip').innerText").startswith("gpu0001, GPU 0\n")
    browser.mouse(box[0] + 8, box[1] + 25, click=True)
    browser.until("location.hash === '#/node/gpu0001'")
    browser.until("document.querySelector('#tip').hidden")


def test_days_begin_at_midnight_where_clocks_were_set_forward(browser: Browser, served: Served) -> None:
    browser.go(served.url)
    browser.call("Emulation.setTimezoneOverride", timezoneId="Europe/Berlin")  # on Sunday, 29 March 2026
    days = browser.run(
        "import('./charts.js').then(({chart}) => { const to = Date.UTC(2026, 2, 31, 12) / 1000, from = to - 7 * 86400;"
        " return [...chart({series: [], read: v => v, top: 1, label: '', from, to}).querySelectorAll('text')]"
        ".slice(3).map(text => [text.textContent, Math.round((+text.getAttribute('x') - 56) / 654 * 168)]); })"
    )
    browser.call("Emulation.setTimezoneOverride", timezoneId="")
    assert days == [["25 Wed", 11], ["26 Thu", 35], ["27 Fri", 59], ["28 Sat", 83], ["29 Sun", 107], ["30 Mon", 130],
                    ["31 Tue", 154]]  # fmt: skip


def test_a_job_of_many_nodes_and_weeks_has_curves(browser: Browser, served: Served, named: dict[str, str]) -> None:
    browser.go(served.url)
    browser.run(
        "const plain = fetch; window.fetch = (path, more) => plain(path, more).then(async answer => {"
        " if (!String(path).startsWith('api/job/')) return answer;"
        " const found = await answer.json(), points = [...Array(4000).keys()].map(n => [1.79e9 + n * 300, .5, 300]);"
        " found.curves = [...Array(40).keys()].map(n => ({node: `n${n}`, points}));"
        " return new Response(JSON.stringify(found)); })"
    )
    browser.run(f"location.hash = '#/job/{named['own']}'")
    browser.until("document.body.innerText.includes('The first 8 of 40 nodes')")


def test_output_is_shown_to_users_named_by_the_proxy(browser: Browser, behind: Served, named: dict[str, str]) -> None:
    for user, sees in (("amira", True), ("chen", False)):
        browser.call("Network.setExtraHTTPHeaders", headers={"X-Remote-User": user})
        look(browser, behind.url, f"job/{named['own']}")
        browser.until(f"document.querySelector('#who').innerText === '{user}'")
        browser.until("document.querySelector('main').innerText.includes('Output')")
        if sees:
            browser.until("document.querySelector('pre')?.innerText.includes('loss 0.25 <b>&')")
            assert SECRET in browser.text()
        else:
            browser.until("document.querySelector('main').innerText.includes('Only amira and admins')")
            assert SECRET not in browser.run("document.documentElement.outerHTML")


def test_a_node_s_conditions_are_listed_with_what_to_do(browser: Browser, served: Served) -> None:
    look(browser, served.url, "node/gpu0005")
    browser.until("[...document.querySelectorAll('h2')].some(h => h.innerText === 'Conditions')")
    (text,) = browser.run("[...document.querySelectorAll('main ul.rows li')].map(e => e.innerText)")
    assert text.startswith("GPU 2")
    assert f"8 lanes {NASTY}, since " in text
    assert text.endswith("reseat the GPU or the riser")
    browser.go(f"{served.url}#/nodes?of=odd")
    browser.until("document.querySelector('main').innerText.includes('gpu0005')")


def test_the_timeline_reaches_its_last_node(browser: Browser, served: Served) -> None:
    """In a low window one scrolls; pointing at the last node's row, right of now, names the job that runs there."""
    browser.size(1440, 380)
    look(browser, served.url, "timeline")
    sizes = "(e => [e.scrollHeight, e.clientHeight])(document.querySelector('.scroll'))"
    assert browser.run(sizes) == [6 * 34 + 24, 180]
    browser.run("document.querySelector('.scroll').scrollTop = 1000")
    last = "[...m.world.jobs.values()].find(j => j.state === 'RUNNING' && j.allocation[0][0] === 'gpu0006')"
    name, user, gpu = browser.run(WORLD.format(body=f"(j => [j.name, j.user, j.allocation[0][1]])({last})"))
    edges = "(b => [b.left, b.bottom, b.width])(document.querySelector('.scroll canvas').getBoundingClientRect())"
    box = browser.run(edges)
    x, y = box[0] + 92 + (box[2] - 92) / 5 + 3, box[1] - 34 + 1.5 + (gpu + 0.5) * 31 / 8
    browser.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    browser.mouse(x, y)
    browser.until(f"document.querySelector('#tip').innerText.startsWith({json.dumps(f'{name} of {user}')})")


# -- as things change


@pytest.fixture
def changing(tmp_path: Path) -> Iterator[Served]:
    build(tmp_path, nodes=8, jobs=400)
    found = Served(tmp_path, *made.serving(tmp_path))
    yield found
    found.stop()


def test_changes_are_shown_at_once(browser: Browser, changing: Served) -> None:
    """After changes the page holds what it would hold had it begun anew, and only the rows in sight are drawn."""
    look(browser, changing.url, "jobs?of=waiting")
    browser.until(LIVE)
    before = browser.run("document.querySelector('.tabs').innerText")
    for seed in range(3):
        version = browser.run(WORLD.format(body="m.world.version"))
        move(changing.folder, seed)
        browser.until(f"await {WORLD.format(body=f'm.world.version > {version}')}")
    assert browser.run("document.querySelector('.tabs').innerText") != before
    held = browser.run(
        WORLD.format(body="[[...m.world.jobs.values()], [...m.world.nodes.values()], m.world.head, m.world.version]")
    )
    fresh = changing.get("/api/state").json
    assert held[3] == fresh["v"]
    assert sorted(held[0], key=lambda j: j.get("key", j["id"])) == sorted(
        fresh["jobs"], key=lambda j: j.get("key", j["id"])
    )
    assert held[1] == fresh["nodes"]
    assert held[2] == fresh["head"]
    rows, drawn = browser.run(
        "[+document.querySelector('.jobs').ariaRowCount, document.querySelectorAll('.jobs .body .row').length]"
    )
    assert rows > 200
    assert drawn < 60
    browser.run("scrollTo(0, document.body.scrollHeight)")
    browser.until(f"[...document.querySelectorAll('.jobs .body .row')].some(r => r.ariaRowIndex == {rows})")


def test_it_comes_back_when_the_server_does(browser: Browser, changing: Served) -> None:
    browser.expected = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE", "ERR_EMPTY", "ERR_CONTENT")
    look(browser, changing.url)
    browser.until(LIVE)
    changing.stop()
    browser.until("document.querySelector('#live').innerText.startsWith('offline since')")
    assert browser.run("document.querySelectorAll('.tile').length") == 4  # what was known stays
    made.tick(changing.folder, 5)
    again = Served(changing.folder, *made.serving(changing.folder, "--port", str(changing.port)))
    try:
        browser.until(LIVE)
        feed = again.get("/api/state").json["feed"]
        browser.until(f"await {WORLD.format(body='m.world.feed')} === '{feed}'")
    finally:
        again.stop()


def test_one_failed_request_does_not_leave_it_offline(browser: Browser, changing: Served) -> None:
    """Its source of news still stands: until something else changes, nothing would make the page ask again."""
    browser.expected = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_INCOMPLETE", "ERR_EMPTY")  # at the end
    look(browser, changing.url)
    browser.until(LIVE)
    browser.run(
        "const real = [fetch, EventSource]; window.opened = 0; window.back = () => { window.fetch = real[0]; };"
        "window.fetch = () => Promise.reject(new TypeError('lost'));"
        "window.EventSource = class extends real[1] { constructor(path) { super(path); window.opened += 1; } };"
    )
    made.tick(changing.folder, 5)
    browser.until("document.querySelector('#live').innerText.startsWith('offline since')")
    browser.until("window.opened > 0")  # before requests succeed: news of the old source would make it live, too
    browser.run("window.back()")
    browser.until(LIVE)


# -- as files


@pytest.fixture(scope="module")
def files(built: tuple[Path, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The exported page, handed out by a web server that knows nothing of it."""
    folder, out = built[0], tmp_path_factory.mktemp("files")
    env = os.environ | {"GPUSCHED_STATE": str(folder / "state")}
    for _ in range(2):  # again over the first, as cron does
        done = commands.run("web", "--export", str(out / "page"), cwd=folder, env=env)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    handler = functools.partial(_Quiet, directory=str(out))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield out / "page", f"http://127.0.0.1:{server.server_port}/page/"
        server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_the_files_show_the_same(
    browser: Browser, files: tuple[Path, str], served: Served, named: dict[str, str]
) -> None:
    """In a folder of the site, not at its top; without anything that only some may see."""
    folder, url = files
    look(browser, url)
    browser.until("document.querySelector('#live').innerText.startsWith('as of ')")
    tiles = "[...document.querySelectorAll('.tile .big')].map(t => t.innerText)"
    ours = browser.run(tiles)
    browser.go(f"{url}#/job/{named['own']}")
    browser.until("document.querySelector('.facts').innerText.includes('amira')")
    browser.until("document.querySelector('main').innerText.includes('not included in these files')")
    some = browser.run(WORLD.format(body="[...m.world.jobs.values()].find(j => j.state === 'RUNNING').id"))
    browser.go(f"{url}#/job/{some}")
    browser.until("document.querySelectorAll('.story li').length === 3")
    have = [path.stem for path in (folder / "data" / "jobs").iterdir()]
    other = f"[...m.world.jobs.values()].find(j => j.state === 'PENDING' && !{have}.includes(j.id.slice(0, 4))).id"
    browser.expected = ("404",)
    browser.go(f"{url}#/job/{browser.run(WORLD.format(body=other))}")
    browser.until("document.querySelector('main').innerText.includes('no history of this job')")
    assert not any(SECRET.encode() in path.read_bytes() for path in folder.rglob("*") if path.is_file())
    look(browser, served.url)
    assert browser.run(tiles) == ours


def test_old_files_say_so(browser: Browser, files: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(files[0], tmp_path / "page")
    state = tmp_path / "page" / "data" / "state.json"
    content = json.loads(state.read_bytes())
    state.write_text(json.dumps(content | {"now": time.time() - 7262}))
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        look(browser, f"http://127.0.0.1:{server.server_port}/page/")
        browser.until("document.querySelector('#notes').innerText.match(/these files are 2 h [0-5][0-9] old/)")
        server.shutdown()


def test_a_users_colour_follows_from_the_name_alone(browser: Browser, served: Served) -> None:
    """The same in every view and after a reload, whatever else is there; who shares it has another fill or a name."""
    look(browser, served.url)
    words = "import('./words.js').then(m => ['giulia', 'ines', 'daria'].map(n => JSON.stringify(m.look(n))).join())"
    first = browser.run(words)
    browser.go("about:blank")
    look(browser, served.url, "jobs")
    browser.run("import('./words.js').then(m => { for (let i = 0; i < 99; i++) m.look(`other${i}`); })")
    assert browser.run(words) == first == (
        '{"hue":108,"mark":"dots"},{"hue":0,"mark":"stripes"},{"hue":216,"mark":"dots"}'
    )
    browser.until("document.querySelector('.jobs .body .user i.who')")
    own = "(e => [e.className, getComputedStyle(e).backgroundColor].join())(document.querySelector('{}'))"
    name = browser.run("document.querySelector('.jobs .body .user').innerText")
    shown = browser.run(own.format(".jobs .body .user i.who"))
    browser.go(f"{served.url}#/timeline")
    browser.until("document.querySelector('.legend.users a')")
    legend = "[...document.querySelectorAll('.legend.users a')].find(a => a.innerText === {})"
    look_of = "(e => [e.className, getComputedStyle(e).backgroundColor].join())"
    assert browser.run(f"{look_of}({legend.format(json.dumps(name))}.firstChild)") == shown
    assert not browser.troubles


def test_choices_outlive_a_reload(browser: Browser, served: Served) -> None:
    look(browser, served.url, "jobs")
    browser.run("document.querySelector('.jobs .heads .gpus button').click()")
    browser.run("document.querySelector('[aria-label=which] [data-value=waiting]').click()")
    assert browser.run("location.hash") == "#/jobs?of=waiting&sort=gpus"
    look(browser, served.url)
    browser.run("document.querySelector('[aria-label=colour] [data-value=user]').click()")
    browser.run("document.querySelector('[aria-label=\"how far ahead\"] [data-value=\"24\"]').click()")
    browser.go("about:blank")
    look(browser, served.url)
    pressed = "[...document.querySelectorAll('[aria-pressed=true]')].map(b => b.dataset.value).join()"
    assert browser.run(pressed) == "user,24,user"
    look(browser, served.url, "jobs")
    browser.until("document.querySelector('.jobs .heads [aria-sort=ascending]')?.classList.contains('gpus')")
    assert browser.run(pressed) == "waiting"


def test_my_jobs_are_chosen_once(browser: Browser, served: Served, behind: Served) -> None:
    """Without a login proxy the browser keeps whose they are; with one it is who is logged in."""
    users = "[...new Set([...document.querySelectorAll('.jobs .body .user')].map(e => e.innerText))].join()"
    look(browser, served.url, "jobs")
    browser.run("document.querySelector('.mine .toggle').click()")
    browser.run("(s => { s.value = 'amira'; s.dispatchEvent(new Event('change')); })"
                "(document.querySelector('.mine select'))")  # fmt: skip
    browser.until(f"{users} === 'amira'")
    browser.go("about:blank")
    look(browser, served.url, "jobs")
    browser.until(f"{users} === 'amira'")
    browser.call("Network.enable")
    browser.call("Network.setExtraHTTPHeaders", headers={"X-Remote-User": "chen"})
    look(browser, behind.url, "jobs?mine=1")
    browser.until(f"{users} === 'chen' && !document.querySelector('.mine select')")


def test_live_means_that_a_controller_is(browser: Browser, changing: Served) -> None:
    store = Store.create_or_open(changing.folder / "state")
    with store.transaction():
        store.set_meta("heartbeat", str(time.time() - 7200))
    look(browser, changing.url)
    browser.until("document.querySelector('#live').innerText.startsWith('no controller since ')")
    assert browser.run("document.querySelector('#live').className") == "lost"
    with store.transaction():
        store.set_meta("heartbeat", str(time.time() + 3600))
    store.close()
    browser.until(LIVE)


def test_start_times_have_their_range(browser: Browser, served: Served) -> None:
    """Of the page's own forecast, from the earliest to the latest; one time where they are the same."""
    look(browser, served.url)
    said = browser.run("""import('./overview.js').then(m => { const at = Date.now() / 1000;
        return [m.range([at + 900, at + 600, at + 3600]), m.range([at + 900, at + 900, at + 900]),
          m.starts([at - 900, at, at])].join('|'); })"""
    ).split("|")  # fmt: skip
    assert re.fullmatch(r" \((\w{3} )?\d\d:\d\d–(\w{3} )?\d\d:\d\d\)", said[0])
    assert said[1:] == ["", "any moment"]
