"""SSH when things go wrong: every failure is one line that says what and what to do, within the time allowed."""

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import paramiko
import pytest

from gpusched.model.relay import Terminal
from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes import ssh
from gpusched.nodes.ssh import _SshSession
from gpusched.nodes.transport import Transport, TransportError
from tests.nodes.nodes import declare, opened, settings_for, sh
from tests.testbed import Testbed, wait_until

SSH_MSG_CHANNEL_EOF, SSH_MSG_CHANNEL_CLOSE = 96, 97  # RFC 4254


def failure(node: Node, settings: Settings, timeout_s: float = 10) -> TransportError:
    with opened(node, settings) as transport, pytest.raises(TransportError) as caught:
        transport.run(sh("true"), timeout_s)
    assert "\n" not in caught.value.line()
    assert node.name in caught.value.reason
    return caught.value


def fails_within(transport: Transport, timeout_s: float) -> TransportError:
    began = time.monotonic()
    with pytest.raises(TransportError) as caught:
        transport.run(sh("true"), timeout_s)
    assert time.monotonic() - began < timeout_s + 500  # and not for ever, on however busy a machine
    return caught.value


def echo(transport: Transport) -> bytes:
    return transport.run(sh("echo ok"), 10).stdout


def fingerprint(line: str, tmp_path: Path) -> str:
    path = tmp_path / "key.pub"
    path.write_text(line.split(" ", 1)[1])
    out = subprocess.run(["ssh-keygen", "-lf", path], check=True, capture_output=True, text=True).stdout
    return out.split()[1]


def test_unknown_host_key_is_refused_with_its_fingerprint(testbed: Testbed, tmp_path: Path) -> None:
    empty = tmp_path / "known_hosts"
    node = testbed.nodes[0]
    error = failure(declare(testbed, node), settings_for(testbed, known_hosts=str(empty)))
    assert error.kind == "host-key-unknown"
    assert f"ed25519 {fingerprint(node.known_hosts_line(), tmp_path)}" in error.reason
    assert f"ssh-keyscan -t ed25519 -p 22 {node.address} >> {empty}" in error.hint
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in error.hint
    assert not empty.exists()


def test_the_hints_own_command_makes_the_host_known(testbed: Testbed, tmp_path: Path) -> None:
    settings = settings_for(testbed, known_hosts=str(tmp_path / "known_hosts"))
    node = declare(testbed, testbed.nodes[0])
    command = failure(node, settings).hint.rpartition("same: ")[2]
    subprocess.run(command, shell=True, check=True, capture_output=True)
    with opened(node, settings) as transport:
        assert echo(transport) == b"ok\n"


def test_changed_host_key_is_loud_and_nothing_is_removed(testbed: Testbed, tmp_path: Path) -> None:
    node = testbed.nodes[1]
    old = fingerprint(node.known_hosts_line(), tmp_path)
    new = fingerprint(node.new_host_key(), tmp_path)
    before = testbed.known_hosts.read_bytes()
    error = failure(declare(testbed, node), settings_for(testbed))
    assert error.kind == "host-key-changed"
    assert "HAS CHANGED" in error.reason
    assert old in error.reason
    assert new in error.reason
    assert f"ssh-keygen -R {node.address} -f {testbed.known_hosts}" in error.hint
    assert testbed.known_hosts.read_bytes() == before


def test_wrong_key_says_what_was_tried(testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    error = failure(declare(testbed, testbed.nodes[0], key=str(key)), settings_for(testbed))
    assert error.kind == "auth"
    assert f"{key} (refused)" in error.reason
    assert "no ssh-agent" in error.reason
    assert "authorized_keys" in error.hint


def test_missing_key_file(testbed: Testbed, tmp_path: Path) -> None:
    error = failure(declare(testbed, testbed.nodes[0], key=str(tmp_path / "gone")), settings_for(testbed))
    assert error.kind == "auth"
    assert "gone (no such file)" in error.reason


def test_an_agent_that_does_not_answer_keeps_no_key_file_waiting(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(tmp_path / "agent"))
        hung.listen()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        with opened(declare(testbed, testbed.nodes[0]), settings_for(testbed)) as transport:
            assert echo(transport) == b"ok\n"


def test_encrypted_key_works_through_the_agent_only(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    key = tmp_path / "locked"
    key.write_bytes(testbed.identity.read_bytes())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "hush!", "-f", key], check=True, capture_output=True)
    node = declare(testbed, testbed.nodes[0], key=str(key))
    assert "locked (has a passphrase: ssh-add it)" in failure(node, settings_for(testbed)).reason
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", tmp_path / "agent"], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        while not (tmp_path / "agent").exists():
            assert agent.poll() is None
        subprocess.run(["ssh-add", "-q", testbed.identity], check=True, capture_output=True)
        with opened(node, settings_for(testbed)) as transport:
            assert echo(transport) == b"ok\n"
    finally:
        agent.terminate()
        agent.wait()


def test_refused(testbed: Testbed) -> None:
    testbed.nodes[0].stop_sshd()
    error = failure(declare(testbed, testbed.nodes[0]), settings_for(testbed))
    assert (error.kind, error.reason) == (
        "refused",
        f"dgx001: nothing is listening on {testbed.nodes[0].address} port 22",
    )


def test_unknown_host_name(testbed: Testbed) -> None:
    error = failure(declare(testbed, testbed.nodes[0], address="no-such-host.invalid"), settings_for(testbed))
    assert error.kind == "unreachable"
    assert "cannot be resolved" in error.reason


def test_no_ssh_server_on_the_port(testbed: Testbed) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node = declare(testbed, testbed.nodes[0], address="127.0.0.1", port=silent.getsockname()[1])
        error = failure(node, settings_for(testbed, connect_timeout_s=1.0))
    assert (error.kind, "did not answer" in error.reason) == ("timeout", True)


def test_frozen_node_before_the_connection(testbed: Testbed) -> None:
    testbed.nodes[2].freeze()
    with opened(declare(testbed, testbed.nodes[2]), settings_for(testbed)) as transport:
        assert fails_within(transport, 1.5).kind == "timeout"
        testbed.nodes[2].thaw()
        assert echo(transport) == b"ok\n"


@pytest.mark.parametrize("stdin", [b"", b"x" * 30_000_000], ids=["small", "more than fits on the way"])
def test_frozen_node_on_an_open_connection(testbed: Testbed, stdin: bytes) -> None:
    with opened(declare(testbed, testbed.nodes[2]), settings_for(testbed)) as transport:
        echo(transport)
        testbed.nodes[2].freeze()
        began = time.monotonic()
        with pytest.raises(TransportError) as caught:
            transport.run(sh("cat >/dev/null", stdin), 1.0)
        assert time.monotonic() - began < 500
        assert caught.value.kind == "timeout"
        testbed.nodes[2].thaw()
        assert echo(transport) == b"ok\n"


def test_node_frozen_in_the_middle_of_a_big_upload(testbed: Testbed) -> None:
    with opened(declare(testbed, testbed.nodes[2]), settings_for(testbed)) as transport:
        stream = transport.stream(sh("echo begun; sleep 600"))
        next(stream)
        testbed.nodes[2].freeze()
        for _ in range(3):  # later commands on the same connection are bounded too
            assert fails_within(transport, 0.7).kind == "timeout"
        testbed.nodes[2].thaw()
        assert echo(transport) == b"ok\n"


@pytest.mark.slow
def test_cut_link_is_noticed_and_mended(testbed: Testbed) -> None:
    with opened(declare(testbed, testbed.nodes[3]), settings_for(testbed)) as transport:
        echo(transport)
        testbed.nodes[3].cut()
        began = time.monotonic()
        with pytest.raises(TransportError):
            transport.run(sh("sleep 600"), 30)
        assert time.monotonic() - began < 29  # before its timeout
        testbed.nodes[3].join()
        assert echo(transport) == b"ok\n"


def test_reconnects_after_sshd_was_restarted(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    with opened(declare(testbed, node), settings_for(testbed)) as transport:
        echo(transport)
        node.stop_sshd(sessions=True)
        node.start_sshd()
        assert echo(transport) == b"ok\n"


def test_connection_lost_under_a_command_is_an_error_not_a_result(testbed: Testbed) -> None:
    with opened(declare(testbed, testbed.nodes[0]), settings_for(testbed)) as transport:
        with pytest.raises(TransportError) as caught:
            transport.run(sh("kill -KILL $PPID; sleep 5"), 10)
        assert caught.value.kind == "ssh"
        assert echo(transport) == b"ok\n"


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ssh_config"
    path.write_text(text)
    return str(path)


def bare(testbed: Testbed, alias: str, **changes: Any) -> Node:
    """A node that leaves everything to the SSH config."""
    return declare(testbed, testbed.nodes[0], address=alias, user=None, key=None, **changes)


class LostWhileRead:
    """A channel that has output, and whose connection is lost as the other side is sent a larger window for it."""

    closed = eof_received = False

    def __init__(self) -> None:
        self.in_buffer = self.in_stderr_buffer = self

    def settimeout(self, seconds: float) -> None: ...

    def set_event(self, event: object) -> None: ...

    def recv_ready(self) -> bool:
        return True

    recv_stderr_ready = recv_ready

    def recv(self, most: int) -> bytes:
        raise EOFError


def test_a_connection_lost_as_output_is_read_is_an_error_of_the_connection() -> None:
    """Otherwise the thread that waits for a node's ends dies of it, and the channel still counts as open."""
    session = _SshSession("dgx001", cast(Any, None), cast(Any, LostWhileRead()))
    with pytest.raises(TransportError, match="dgx001"):
        session.pump(lambda stream, data: None)


def test_a_stream_that_is_lost_later_than_it_had_to_open_says_that_the_connection_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Lost:
        exit_status, eof_received, transport = -1, False, None

        def set_combine_stderr(self, combine: bool) -> None: ...
        def close(self) -> None: ...

        def recv(self, most: int) -> bytes:
            monkeypatch.setattr(ssh, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6))
            return b""

    node = Node(
        name="dgx001", partition="p", address="a", gpus=0, cores=1, memory_mib=1, runtime=RuntimeName.PROCESS
    )
    transport = ssh.SshTransport(node, Settings())
    monkeypatch.setattr(transport, "_channel", lambda deadline: (None, Lost()))
    monkeypatch.setattr(ssh, "_request_exec", lambda channel, command: None)
    with pytest.raises(TransportError, match="dgx001: the connection was lost") as caught:
        list(transport.stream(sh("tail -f x")))
    assert caught.value.kind == "ssh"


def test_a_connection_that_is_made_while_its_node_leaves_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped, made = list[bool](), list[bool]()

    def connect(*_: object) -> SimpleNamespace:
        made.append(True)
        transport.close()
        return SimpleNamespace(transport=None, drop=lambda: dropped.append(True))

    node = Node(name="dgx001", partition="p", address="a", gpus=0, cores=1, memory_mib=1, runtime=RuntimeName.PROCESS)
    transport = ssh.SshTransport(node, Settings())
    monkeypatch.setattr(ssh, "resolve_node", lambda *_: None)
    monkeypatch.setattr(ssh, "connect", connect)
    for _ in range(2):
        with pytest.raises(TransportError, match="dgx001: the connection was closed on this side"):
            transport.run(sh("true"), 10)
    assert (made, dropped) == ([True], [True])


class AfterTheClose:
    """Holds messages back until paramiko's thread has sent its close and sshd has seen it; half a second at the most.

    sshd ends the connection for one that comes then, and with it all other commands that are under way there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_held: Callable[[bytes], bool]) -> None:
        self._send, self._close_sent = paramiko.Transport._send_user_message, threading.Event()  # type: ignore[attr-defined]
        self._is_held = is_held
        monkeypatch.setattr(paramiko.Transport, "_send_user_message", lambda t, m: self.send(t, m))

    def send(self, transport: paramiko.Transport, message: paramiko.Message) -> None:
        own = threading.current_thread() is transport  # paramiko's thread would wait for the answer that it is to read
        if not own and self._is_held(message.asbytes()) and self._close_sent.wait(0.5):
            for _ in range(2):  # sshd frees a closed channel in its next round
                transport.global_request("keepalive@openssh.com")
        self._send(transport, message)
        if message.asbytes()[0] == SSH_MSG_CHANNEL_CLOSE:
            self._close_sent.set()

    def again(self) -> None:
        """Wait for the close of a command before, which comes after its answer, and begin anew."""
        self._close_sent.wait(0.5)
        self._close_sent.clear()


def test_the_end_of_input_never_follows_the_close(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(declare(testbed, testbed.nodes[0]), settings_for(testbed)) as ssh:
        ssh.run(sh("true"), 20)
        connection = ssh._connection  # type: ignore[attr-defined]
        with monkeypatch.context() as patched:
            held = AfterTheClose(patched, lambda message: message[0] == SSH_MSG_CHANNEL_EOF)
            for data in (b"", b"unread"):
                held.again()
                assert ssh.run(sh("exit 3", data), 20).exit_code == 3
        assert ssh.run(sh("echo on"), 20).stdout == b"on\n"
        assert ssh._connection is connection  # type: ignore[attr-defined]


def test_no_change_of_a_window_follows_the_close(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, end = testbed.nodes[0], str(tmp_path / "window")

    def is_held(message: bytes) -> bool:
        if held := b"window-change" in message:
            node.run(["touch", end])
        return held

    with opened(declare(testbed, node), settings_for(testbed)) as ssh:
        session = ssh.session(("sh", "-c", f"until [ -e {end} ]; do sleep 0.05; done; rm {end}"), Terminal())
        connection = ssh._connection  # type: ignore[attr-defined]
        with monkeypatch.context() as patched:
            AfterTheClose(patched, is_held)
            session.resize(50, 132)
            assert session.pump(lambda kind, data: None) == 0
        assert ssh.run(sh("echo on"), 20).stdout == b"on\n"
        assert ssh._connection is connection  # type: ignore[attr-defined]


def test_ssh_config_gives_host_user_key_and_port(testbed: Testbed, tmp_path: Path) -> None:
    more = tmp_path / "more"
    more.write_text(f"Host gpu-box\n HostName {testbed.nodes[0].address}\n Port 22\n")
    path = config(
        tmp_path, f"Include {more}\nHost *\n User root\n IdentityFile {testbed.identity}\n IdentitiesOnly yes\n"
        f" UserKnownHostsFile {testbed.known_hosts}\n",
    )  # fmt: skip
    with opened(bare(testbed, "gpu-box"), Settings(ssh_config=path)) as transport:
        assert transport.run(sh("hostname"), 10).stdout == b"dgx001\n"


def test_chain_of_jump_hosts(testbed: Testbed, tmp_path: Path) -> None:
    first, second, last = testbed.nodes[1:4]
    path = config(
        tmp_path, f"Host one\n HostName {first.address}\nHost two\n HostName {second.address}\n"
        f"Host far\n HostName {last.address}\n ProxyJump one,root@two:22\n"
        f"Host *\n User root\n IdentityFile {testbed.identity}\n",
    )  # fmt: skip
    settings = Settings(ssh_config=path, known_hosts=str(testbed.known_hosts))
    with opened(bare(testbed, "far"), settings) as transport:
        result = transport.run(sh("hostname; echo $SSH_CONNECTION"), 15)
        assert result.stdout.decode().split()[:2] == ["dgx004", second.address]
        assert len(transport.run(sh("head -c 20000000 /dev/zero"), 30).stdout) == 20_000_000
        second.stop_sshd(sessions=True)
        second.start_sshd()
        assert echo(transport) == b"ok\n"


def test_jump_host_is_verified_too(testbed: Testbed, tmp_path: Path) -> None:
    jump, last = testbed.nodes[1:3]
    jump.new_host_key()
    path = config(
        tmp_path, f"Host far\n HostName {last.address}\n ProxyJump root@{jump.address}\nHost *\n"
        f" IdentityFile {testbed.identity}\n User root\n",
    )  # fmt: skip
    error = failure(bare(testbed, "far"), Settings(ssh_config=path, known_hosts=str(testbed.known_hosts)))
    assert error.kind == "host-key-changed"
    assert "jump host" in error.reason


def test_node_behind_a_jump_host_that_does_not_listen(testbed: Testbed, tmp_path: Path) -> None:
    jump, last = testbed.nodes[1:3]
    last.stop_sshd()
    path = config(
        tmp_path, f"Host far\n HostName {last.address}\n ProxyJump root@{jump.address}\nHost *\n"
        f" IdentityFile {testbed.identity}\n User root\n",
    )  # fmt: skip
    error = failure(bare(testbed, "far"), Settings(ssh_config=path, known_hosts=str(testbed.known_hosts)))
    assert error.kind == "unreachable"
    assert "cannot reach" in error.reason


def test_a_silent_node_behind_a_jump_host_costs_the_others_nothing(testbed: Testbed, tmp_path: Path) -> None:
    jump, near, silent = testbed.nodes[1:4]
    path = config(
        tmp_path, f"Host near\n HostName {near.address}\nHost silent\n HostName {silent.address}\n"
        f"Host near silent\n ProxyJump root@{jump.address}\nHost *\n IdentityFile {testbed.identity}\n User root\n",
    )  # fmt: skip
    settings = Settings(ssh_config=path, known_hosts=str(testbed.known_hosts))
    with opened(bare(testbed, "near"), settings) as transport:
        assert echo(transport) == b"ok\n"
        connection = transport._connection  # type: ignore[attr-defined]
        silent.cut()
        try:
            error = failure(bare(testbed, "silent"), msgspec.structs.replace(settings, connect_timeout_s=1.0))
        finally:
            silent.join()
        assert (error.kind, "did not connect" in error.reason) == ("timeout", True)
        assert echo(transport) == b"ok\n"
        assert transport._connection is connection  # type: ignore[attr-defined]


def test_jump_hosts_that_go_in_a_circle(testbed: Testbed, tmp_path: Path) -> None:
    path = config(tmp_path, "Host a\n ProxyJump b\nHost b\n ProxyJump a\n")
    assert "jump hosts" in failure(bare(testbed, "a"), Settings(ssh_config=path)).reason


def test_proxy_command(testbed: Testbed, tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(
        "import os, socket, sys, threading\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536):\n"
        "        s.sendall(data)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536):\n"
        "    os.write(1, data)\n"
    )
    path = config(
        tmp_path, f"Host far\n HostName {testbed.nodes[0].address}\n ProxyCommand python3 {relay} %h %p\n"
        f" User root\n IdentityFile {testbed.identity}\n",
    )  # fmt: skip
    with opened(bare(testbed, "far"), Settings(ssh_config=path, known_hosts=str(testbed.known_hosts))) as transport:
        assert echo(transport) == b"ok\n"


def test_host_key_type_on_file_is_asked_for_first(testbed: Testbed, tmp_path: Path) -> None:
    """A server with several keys shows the one we know, whatever paramiko would like best."""
    node = testbed.nodes[0]
    rsa = tmp_path / "rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", rsa], check=True)
    folder = tmp_path / "sshd"
    folder.mkdir()
    (folder / "config").write_text(
        f"Port 2222\nHostKey {rsa}\nHostKey {node.disk}/ssh/hostkey\nPermitRootLogin yes\nStrictModes no\nUsePAM no\n"
        f"AuthorizedKeysFile {testbed.identity}.pub\nPidFile none\n"
    )
    node.run(["/usr/sbin/sshd", "-f", folder / "config", "-E", folder / "log"])
    wait_until(lambda: "listening" in (folder / "log").read_text(), what="the second sshd")
    known = tmp_path / "known_hosts"
    declared = declare(testbed, node, port=2222)
    for line in (rsa.with_suffix(".pub").read_text(), node.known_hosts_line().split(" ", 1)[1]):
        known.write_text(f"[{node.address}]:2222 {line}\n")
        with opened(declared, settings_for(testbed, known_hosts=str(known))) as transport:
            assert echo(transport) == b"ok\n"
