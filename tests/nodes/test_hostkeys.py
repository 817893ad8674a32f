"""known_hosts files as OpenSSH reads them."""

import base64
import subprocess
from pathlib import Path

import pytest

from gpusched.nodes.hostkeys import fingerprint, host_label, known_keys, preferred_algorithms, verify
from gpusched.nodes.transport import TransportError

BLOB, OTHER = b"\0\0\0\x0bssh-ed25519" + b"a" * 36, b"\0\0\0\x0bssh-ed25519" + b"b" * 36
KEY, OTHER_KEY = (f"ssh-ed25519 {base64.b64encode(b).decode()}" for b in (BLOB, OTHER))


def known(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "known_hosts"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def check(path: str, label: str = "gpu1", blob: bytes = BLOB) -> None:
    verify("n", "gpu1", 22, label, (path,), "ssh-ed25519", blob)


@pytest.mark.parametrize(
    ("patterns", "label"),
    [("gpu1", "gpu1"), ("a,GPU1,b", "gpu1"), ("gpu*", "gpu1"), ("gpu?", "gpu1"), ("[gpu1]:2222", "[gpu1]:2222"),
     ("gpu1", "[gpu1]:2222"), ("[gpu*]:2222", "[gpu1]:2222"), ("*,!gpu2", "gpu1")],
)  # fmt: skip
def test_patterns_that_match(tmp_path: Path, patterns: str, label: str) -> None:
    check(known(tmp_path, "# comment", "", f"{patterns} {KEY} a comment"), label)


@pytest.mark.parametrize(
    "patterns", ["gpu2", "gpu", "gpu1x", "[gpu1]:22", "*,!gpu1", "|1|bad|hash", "@cert-authority gpu1"]
)
def test_patterns_that_do_not_match(tmp_path: Path, patterns: str) -> None:
    with pytest.raises(TransportError) as caught:
        check(known(tmp_path, f"{patterns} {KEY}", "gpu1 ssh-ed25519 not-base64!"))
    assert caught.value.kind == "host-key-unknown"


def test_hashed_names_as_ssh_keygen_writes_them(tmp_path: Path) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    text = key.with_suffix(".pub").read_text()
    path = known(tmp_path, f"gpu1 {text}", f"[gpu1]:2222 {text}")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=True, capture_output=True)
    assert "gpu1" not in Path(path).read_text()
    blob = base64.b64decode(text.split()[1])
    assert [k.blob for k in known_keys([path], host_label("GPU1", 22))] == [blob]
    assert [k.blob for k in known_keys([path], host_label("gpu1", 2222))] == [blob]
    shown = subprocess.run(["ssh-keygen", "-lf", key], check=True, capture_output=True, text=True).stdout.split()[1]
    assert fingerprint(blob) == shown


def test_changed_and_revoked(tmp_path: Path) -> None:
    with pytest.raises(TransportError) as changed:
        check(known(tmp_path, f"gpu1 {OTHER_KEY}"))
    assert changed.value.kind == "host-key-changed"
    with pytest.raises(TransportError) as revoked:
        check(known(tmp_path, f"gpu1 {KEY}", f"@revoked * {KEY}"))
    assert "REVOKED" in revoked.value.reason
    check(known(tmp_path, f"gpu1 {OTHER_KEY}", f"gpu1 {KEY}"))


def test_an_edited_file_is_read_again(tmp_path: Path) -> None:
    path = known(tmp_path, f"gpu2 {KEY}")
    assert known_keys([path], "gpu1") == []
    known(tmp_path, f"gpu1 {KEY} more")
    assert len(known_keys([path], "gpu1")) == 1


def test_algorithms_of_known_keys_come_first(tmp_path: Path) -> None:
    path = known(tmp_path, f"gpu1 {KEY}", f"gpu1 ssh-rsa {base64.b64encode(b'r').decode()}")
    offered = ["ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256", "ssh-ed25519"]
    expected = ["ssh-ed25519", "rsa-sha2-512", "rsa-sha2-256", "ecdsa-sha2-nistp256"]
    assert preferred_algorithms(known_keys([path], "gpu1"), offered) == expected
    assert preferred_algorithms([], offered) == offered
    revoked = known(tmp_path, f"@revoked gpu1 {KEY}", f"gpu1 ssh-rsa {base64.b64encode(b'rsa').decode()}")
    assert preferred_algorithms(known_keys([revoked], "gpu1"), offered)[0] == "rsa-sha2-512"
    assert preferred_algorithms([k for k in known_keys([revoked], "gpu1") if k.revoked], offered) == offered
