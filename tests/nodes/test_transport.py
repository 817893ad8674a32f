"""The contract of every transport, tested on the local one and on real sshd."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.transport import RemoteScript, Transport, TransportError
from tests.nodes.nodes import declare, opened, settings_for, sh
from tests.testbed import Testbed, wait_until

LOCAL = Node(
    name="here", partition="p", address="localhost", transport="local", gpus=0, cores=1, memory_mib=1,
    runtime=RuntimeName.PROCESS,
)  # fmt: skip


@pytest.fixture(params=["local", "ssh"])
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    if request.param == "local":
        yield open_transport(LOCAL, Settings())
        return
    testbed: Testbed = request.getfixturevalue("testbed")
    with opened(declare(testbed, testbed.nodes[0]), settings_for(testbed)) as ssh:
        yield ssh


def test_output_errors_and_exit_code_come_back_apart(transport: Transport) -> None:
    result = transport.run(sh("echo out; echo err >&2; exit 7"), 10)
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")


def test_stdin_reaches_the_command(transport: Transport) -> None:
    assert transport.run(RemoteScript(("cat",), b"secret\0\xff"), 10).stdout == b"secret\0\xff"


def test_arguments_are_quoted_once(transport: Transport) -> None:
    hostile = ("a b", "$(id)", "'", '"', "", "*", "back\\slash", "new\nline", "-n", "ü")
    result = transport.run(RemoteScript(("printf", "<%s>", *hostile)), 10)
    assert result.stdout.decode() == "".join(f"<{a}>" for a in hostile)


def test_a_hundred_megabytes_of_output_do_not_deadlock(transport: Transport) -> None:
    result = transport.run(sh("head -c 100000000 /dev/zero; head -c 5000000 /dev/zero >&2"), 60)
    assert (len(result.stdout), len(result.stderr)) == (100_000_000, 5_000_000)


@pytest.mark.parametrize("to", ["1", "2"])
def test_a_command_that_never_stops_talking_is_not_listened_to(transport: Transport, to: str) -> None:
    endless = RemoteScript(("sh", "-c", f"exec cat /dev/zero >&{to}"), max_bytes=1 << 20)
    with pytest.raises(TransportError) as caught:
        transport.run(endless, 60)
    assert caught.value.kind == "protocol"
    assert "`sh` answered more than 1 MiB" in caught.value.line()
    assert transport.run(sh("echo ok"), 10).stdout == b"ok\n"


def test_stdin_and_stdout_are_pumped_together(transport: Transport) -> None:
    data = bytes(range(256)) * 80_000
    assert transport.run(RemoteScript(("cat",), data), 60).stdout == data


def test_a_command_that_does_not_read_its_stdin_still_ends(transport: Transport) -> None:
    assert transport.run(sh("exit 3", b"x" * 20_000_000), 20).exit_code == 3


def test_a_killed_process_is_a_result_not_a_lost_connection(transport: Transport) -> None:
    result = transport.run(sh("echo before; kill -KILL $$"), 10)
    assert result.stdout == b"before\n"
    assert result.exit_code >= 128


def test_timeout_is_kept_and_the_transport_goes_on(transport: Transport) -> None:
    began = time.monotonic()
    with pytest.raises(TransportError) as caught:
        transport.run(sh("sleep 600"), 0.5)
    assert time.monotonic() - began < 500  # less than what was run takes
    assert caught.value.kind == "timeout"
    assert transport.run(sh("echo well"), 10).stdout == b"well\n"


def test_an_unknown_command_is_a_result(transport: Transport) -> None:
    result = transport.run(RemoteScript(("no-such-command-here",), b"x"), 10)
    assert result.exit_code == 127
    assert b"no-such-command-here" in result.stderr


def test_many_threads_share_a_transport(transport: Transport) -> None:
    answers: dict[int, bytes] = {}

    def ask(number: int) -> None:
        answers[number] = transport.run(sh(f"echo {number}"), 20).stdout

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: f"{n}\n".encode() for n in range(8)}


def test_stream_gives_output_as_it_comes_and_ends_with_the_command(transport: Transport) -> None:
    assert b"".join(transport.stream(sh("echo a; echo b >&2; exit 3"))) == b"a\nb\n"


def test_closing_a_stream_ends_the_command_on_the_node(transport: Transport) -> None:
    stream = transport.stream(sh("echo begun; exec sleep 4711.25"))
    assert next(stream).startswith(b"begun")
    stream.close()  # type: ignore[attr-defined]
    count = sh("grep -lsx -a 'sleep.4711.25.' /proc/[0-9]*/cmdline | wc -l")
    wait_until(lambda: transport.run(count, 10).stdout.strip() == b"0", what="the end of the streamed command")


def test_a_streamed_command_that_ignores_term_is_killed(transport: Transport) -> None:
    stream = transport.stream(sh("trap '' TERM; echo begun; while :; do sleep 4711.5; done"))
    assert next(stream).startswith(b"begun")
    stream.close()  # type: ignore[attr-defined]
    count = sh("grep -lsx -a 'sleep.4711.5.' /proc/[0-9]*/cmdline | wc -l")
    wait_until(lambda: transport.run(count, 10).stdout.strip() == b"0", what="the end of the command that ignores TERM")


def test_nothing_is_connected_before_the_first_command(tmp_path: Path) -> None:
    node = msgspec.structs.replace(LOCAL, transport="ssh", address="192.0.2.1")
    open_transport(node, Settings(ssh_config=str(tmp_path / "missing"))).close()
