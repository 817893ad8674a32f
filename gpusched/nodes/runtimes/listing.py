"""What payload/attempts.sh prints on a node without python3, concluded from as payload/attempts.py does. Pure."""

from __future__ import annotations

from typing import Any

from gpusched.model.units import whole_number
from gpusched.nodes.payload import jobfiles
from gpusched.nodes.payload.attempts import merge
from gpusched.nodes.payload.engines import EngineError, last_lines, parse_docker, parse_podman

_FLAGS = ("new", "launcher", "pid_alive", "same_boot")
_VALUES = ("started", "exit", "failed")


def parse_listing(text: str, cluster_id: str, runtime: str) -> tuple[list[dict[str, Any]], str | None]:
    """Return what attempts.sh printed, as `gpusched.nodes.payload.attempts.list_attempts` returns it.

    Returns:
        (attempts, error): why the engine could not be asked, or None.

    Raises:
        ValueError: The text breaks off.
    """
    facts: dict[str, dict[str, Any]] = {}
    engine: list[str] = []
    errors: list[str] = []
    fact = _no_facts()
    ended = False
    for line in text.split("\n"):  # a job's own text may hold what else ends a line for Python
        word, _, rest = line.partition(" ")
        if word == "attempt":
            fact = facts[rest] = _no_facts()
        elif word == "engine":
            engine.append(rest)
        elif word == "engine_error":
            errors.append(rest)
        elif word == "oom":
            facts.get(rest, fact)["files"].append("oom")
        elif word == "attempts_end":
            ended = True
        elif word in jobfiles.NAMES:
            name, age, content = rest.split(" ", 2)
            if word == "ask" and not content.startswith("!"):
                content = bytes.fromhex(content).decode("utf-8", "replace")
            facts.get(name, fact)["job_files"][word] = content, float(age)
        else:
            _read_fact(fact, word, rest)
    if not ended:
        raise ValueError("the list of attempts breaks off")
    for one in facts.values():
        one["error"] = last_lines("\n".join(one["error"]))
    try:
        containers = {} if runtime not in ("podman", "docker") else _containers(engine, runtime)
    except EngineError as error:
        errors.append(str(error))
    if errors:
        return merge(facts, None, cluster_id), " ".join(errors)
    return merge(facts, containers, cluster_id), None


def _no_facts() -> dict[str, Any]:
    return (
        {"meta": {}, "pid": None, "attached_s": None, "error": [], "files": [], "job_files": {}}
        | dict.fromkeys(_VALUES)
        | dict.fromkeys(_FLAGS, False)
    )


def _read_fact(fact: dict[str, Any], word: str, rest: str) -> None:
    if word in _FLAGS:
        fact[word] = True
    elif word in _VALUES:
        fact[word] = rest
    elif word == "meta":
        key, _, value = rest.partition("=")
        fact["meta"][key] = value
    elif word == "attached":
        fact["attached_s"] = max(0.0, float(rest))
    elif word == "file":
        fact["files"].append(rest)
    elif word == "error":
        fact["error"].append(rest)
    elif word == "pid" and (pid := whole_number(rest.partition(" ")[0])) is not None:
        fact["pid"] = pid


def _containers(lines: list[str], runtime: str) -> dict[str, dict[str, Any]]:
    if runtime == "docker":
        return parse_docker("\n".join(lines))
    killed = "\n".join(line[4:] for line in lines if line.startswith("oom "))
    lost = " ".join(line[5:] for line in lines if line.startswith("lost "))
    return parse_podman("\n".join(line for line in lines if not line.startswith(("oom ", "lost "))), killed, lost)
