"""Refused launches, and values that must not affect the scripts: no node needed."""

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.errors import UsageError
from gpusched.model.jobs import Mount
from gpusched.model.resources import RuntimeName
from gpusched.nodes.runtimes import AttemptRef, LaunchRequest, runtime_for, secret_name_error
from gpusched.nodes.runtimes.listing import parse_listing
from gpusched.nodes.runtimes.shell import FUNCTIONS, heredoc

EVERY = [runtime_for(name) for name in RuntimeName]
text = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=60)


def request(**changes: object) -> LaunchRequest:
    defaults: dict[str, object] = {
        "name": "gpusched-j-1-0", "cluster_id": "c", "node": "n", "job_id": "j", "attempt": 1, "rank": 0, "image": "i",
        "command": ("true",), "cores": 1, "memory_mib": 64,
    }  # fmt: skip
    return LaunchRequest(**(defaults | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("runtime", EVERY, ids=list(RuntimeName))
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"command": ("a", "b\0c")}, "argument 1 of the command contains a NUL byte"),
        ({"command": ("\ud800",)}, "argument 0 of the command is not valid UTF-8"),
        ({"env": {"A": "x\0"}}, "environment variable A contains a NUL byte"),
        ({"env": {"A": "x" * 130_000}}, "environment variable A has 130000 bytes"),
        ({"env": {"A-B": "x"}}, "environment variable 'A-B' is not a name"),
        ({"command": tuple("y" * 100_000 for _ in range(11))}, "bytes together, more than 1000000"),
        ({"secrets": {"LD_PRELOAD": "x"}}, "secret 'LD_PRELOAD' would affect"),
        ({"secrets": {"S": "\0"}}, "secret S contains a NUL byte"),
        ({"hostfile": "a\0"}, "the hostfile contains a NUL byte"),
        ({"workdir": "relative"}, "workdir 'relative' is not absolute"),
        ({"output": "relative"}, "output 'relative' is not absolute"),
        ({"image": "--privileged"}, "'--privileged' is not an image"),
        ({"network": "--privileged"}, "is not a network"),
        ({"mounts": (Mount("/a,readonly=false", "/b"),)}, "holds a comma"),
        ({"mounts": (Mount("a", "/b"),)}, "not absolute"),
        ({"name": "../x"}, "container name '../x'"),
        ({"node": "a/b"}, "node name 'a/b'"),
        ({"cluster_id": ".."}, "cluster id '..'"),
    ],
)
def test_requests_a_runtime_cannot_take_are_refused(runtime: object, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=r".") as error:
        runtime.launch(request(**changes))  # type: ignore[attr-defined]
    assert words in error.value.line()


STEERING = (
    "PATH HOME ld_preload XDG_RUNTIME_DIR DOCKER_HOST https_proxy CONTAINER_HOST IFS ENV GODEBUG SSL_CERT_FILE TMPDIR "
    "BASH_ENV GPUSCHED_X PODMAN_USERNS UID A-B 1A"
)


@pytest.mark.parametrize("name", STEERING.split())
def test_secrets_that_would_steer_the_engine(name: str) -> None:
    assert secret_name_error(name)


@pytest.mark.parametrize("name", "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY x _X PASSWORD".split())
def test_secrets_that_are_welcome(name: str) -> None:
    assert secret_name_error(name) is None


@pytest.mark.parametrize("runtime", EVERY, ids=list(RuntimeName))
def test_nothing_of_a_launch_is_in_its_argv(runtime: object) -> None:
    script = runtime.launch(request(secrets={"TOKEN": "s3"}))  # type: ignore[attr-defined]
    assert script.argv == ("sh", "-s")
    assert b"s3" in script.stdin


@pytest.mark.parametrize("runtime", EVERY, ids=list(RuntimeName))
@pytest.mark.parametrize("signal", ["TERM; id", "", "-9", "SIG"])
def test_a_signal_that_is_none_is_refused(runtime: object, signal: str) -> None:
    with pytest.raises(UsageError):
        runtime.signal(AttemptRef("c", "n", "x"), signal)  # type: ignore[attr-defined]


@pytest.mark.parametrize("runtime", EVERY, ids=list(RuntimeName))
@given(words=st.lists(text, min_size=1, max_size=4), value=text, secret=text)
@settings(max_examples=25, deadline=None)
def test_every_script_parses_whatever_it_holds(runtime: object, words: list[str], value: str, secret: str) -> None:
    script = runtime.launch(request(command=tuple(words), env={"V": value}, secrets={"S": secret}))  # type: ignore[attr-defined]
    done = subprocess.run(["sh", "-n"], input=script.stdin, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@given(content=text, words=st.lists(text, max_size=3))
@settings(max_examples=25, deadline=None)
def test_a_here_document_is_exact(content: str, words: list[str]) -> None:
    script = f"dir=/dev\nset -- {shlex.join(words)}\n{heredoc(content, 'stdout')}printf '%s\\0' \"$@\""
    done = subprocess.run(["sh", "-s"], input=script.encode(), capture_output=True, check=True)
    expected = content if content.endswith("\n") else content + "\n"
    assert done.stdout.decode() == expected + "".join(w + "\0" for w in words or [""])


def test_a_list_of_attempts_that_breaks_off_is_no_list() -> None:
    with pytest.raises(ValueError, match="breaks off"):
        parse_listing("attempt gpusched-j-1-0\nmeta runtime=process\n", "c", "process")


def test_an_engine_that_answers_nonsense_is_an_error() -> None:
    assert parse_listing("engine nonsense\nattempts_end\n", "c", "podman") == (
        [], "podman answered something that is not JSON: 'nonsense'",
    )  # fmt: skip


def test_words_in_files_are_not_taken_for_others() -> None:
    listing = (
        "attempt gpusched-j-1-0\nmeta runtime=podman\nmeta attempts_end\nfailed 1\nerror attempt x\nattempts_end\n"
    )
    (attempt,), error = parse_listing(listing, "c", "podman")
    assert (attempt["phase"], attempt["error"], error) == ("failed", "attempt x", None)


@pytest.mark.parametrize("name", [RuntimeName.PODMAN, RuntimeName.DOCKER])
def test_multiline_values_of_engine_variables_are_refused(name: RuntimeName) -> None:
    for value in ("a\nb", "a\r", "x" * 70_000):
        with pytest.raises(UsageError, match="environment variable TMPDIR cannot be passed"):
            runtime_for(name).launch(request(env={"TMPDIR": value}))
    for target in ("/etc/group", "//etc/./group/"):
        with pytest.raises(UsageError, match="nothing can be mounted at"):
            runtime_for(name).launch(request(run_as=(1, 1), mounts=(Mount("/a", target),)))
        runtime_for(name).launch(request(mounts=(Mount("/a", target),)))


def test_a_launcher_that_has_no_group_of_its_own_yet_is_found_and_ended(tmp_path: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    (tmp_path / "meta").write_text(f"boot={boot}")

    def group_of(pid: int, start: int) -> str:
        (tmp_path / "launcher.pid").write_text(f"{pid} {start}\n")
        text = f"dir={tmp_path}\n{FUNCTIONS}group launcher.pid || echo none\n"
        done = subprocess.run(["sh", "-s"], input=text, cwd=tmp_path, text=True, capture_output=True, check=True)
        return done.stdout.strip()

    for leads, expected in ((False, ""), (True, "-")):  # in the group of this test; in one of its own
        with subprocess.Popen(["sleep", "100"], start_new_session=leads) as child:
            try:
                start = int(Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
                assert group_of(child.pid, start) == f"{expected}{child.pid}"
                assert group_of(child.pid, start + 1) == "none", "a number that was used again"
            finally:
                child.kill()
    assert group_of(child.pid, start) == "none"
