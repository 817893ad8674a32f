"""Promotion of policies in a partition, its record, and rollbacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpusched.config.policies import BUILT_IN, load_policies, load_policy
from gpusched.controller.promoting import PolicyCommandHandler, load_active_policies
from gpusched.errors import GpuschedError
from gpusched.model.commands import Promote, Rollback, ShadowOff, ShadowOn
from gpusched.model.events import Event
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory
from gpusched.model.slurm import SlurmMode
from gpusched.promotion.live import live_modes
from gpusched.queue.promotions import PolicyChange, Shadow
from gpusched.queue.store import Store
from tests.controller.applying import NOW
from tests.controller.imagined import inventory
from tests.promotion import weights


class Office:
    """One partition, for which the inventory names easy; policies of its own lie beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state, self.now = folder, folder / "state", NOW
        (folder / "policies").mkdir()
        self.write("mine", "order: sjf\n")
        self.inventory: Inventory = msgspec.structs.replace(inventory(), path=str(folder / "inventory.yaml"))
        self.store = Store.create_or_open(self.state)

    def write(self, name: str, text: str) -> PolicySpec:
        path = self.folder / "policies" / f"{name}.yaml"
        path.write_text(text)
        return load_policy(path)

    def handler(self) -> PolicyCommandHandler:
        self.now += 1
        return PolicyCommandHandler(self.store, self.state, self.inventory)

    def path(self, name: str) -> str:
        own = self.folder / "policies" / f"{name}.yaml"
        return str(own if own.exists() else BUILT_IN / own.name)

    def promote(self, name: str, **more: object) -> None:
        version = load_policy(self.path(name)).version
        fields = {"time": NOW, "partition": "p", "path": self.path(name), "version": version, "reason": "better"}
        self.handler().promote(Promote(**fields | more), "ann", self.now)  # type: ignore[arg-type]

    def shadow(self, name: str, **more: object) -> None:
        version = load_policy(self.path(name)).version
        fields = {"time": NOW, "partition": "p", "path": self.path(name), "version": version}
        self.handler().shadow_on(ShadowOn(**fields | more), "ann", self.now)  # type: ignore[arg-type]

    def rollback(self) -> None:
        self.handler().rollback(Rollback(time=NOW, partition="p", reason="worse"), "bob", self.now)

    def in_charge(self) -> str:
        return (
            load_active_policies(self.store, self.inventory, load_policies(self.inventory), self.now).policies["p"].name
        )

    def last(self) -> PolicyChange:
        return self.store.live_changes()["p"]

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.store.events() if event.kind == kind]


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(tmp_path)
    yield office
    office.store.close()


def test_a_promotion_is_remembered_with_what_it_replaced(office: Office) -> None:
    assert office.in_charge() == "easy"
    first = office.last()
    assert (first.act, first.user, first.override, office.events("policy_changed")) == ("inventory", "", False, [])
    office.promote("mine", forced=True, evidence={"days": 8})
    assert office.in_charge() == "mine"
    made, easy = office.last(), load_policy(BUILT_IN / "easy.yaml")
    assert (made.act, made.user, made.time, made.reason, made.declared) == (
        "promote",
        "ann",
        office.now,
        "better",
        "easy",
    )
    assert (made.from_name, made.from_version, made.back_to) == ("easy", easy.version, first.seq)
    assert (made.override, made.forced, made.evidence, made.digest) == (True, True, {"days": 8}, "")
    (event,) = office.events("policy_changed")
    assert (event.user, event.time) == ("ann", office.now)
    assert event.data == {
        "partition": "p", "act": "promote", "reason": "better", "from": "easy", "from_version": easy.version,
        "to": "mine", "to_version": made.spec.version, "forced": True,
    }  # fmt: skip


def test_only_the_very_same_is_in_charge_already(office: Office) -> None:
    office.promote("mine")
    with pytest.raises(GpuschedError, match=r"mine \(.*\) is already live in p"):
        office.promote("mine")
    office.write("twin", "order: sjf\n")
    office.promote("twin")
    assert office.in_charge() == "twin", "another name"
    office.write("twin", "order: ljf\n")
    office.promote("twin")
    assert office.last().spec.order == "ljf", "another state of its file"
    office.rollback()
    office.rollback()
    office.rollback()
    assert office.in_charge() == "easy"
    office.promote("easy")
    assert office.last().override, "what the inventory names may be promoted: it stays when that changes"


def test_a_twin_takes_no_copy_away(office: Office) -> None:
    """Both have one version. With the first one's copy went its weights, and its fallback decided from then on."""
    office.write("twin", "order: sjf\n")
    for name in ("mine", "twin"):
        office.promote(name)
    assert {f.parent.name for f in (office.state / "policies").glob("*/*/policy.yaml")} == {"mine", "twin"}


def test_a_training_card_that_is_a_link_is_not_copied(office: Office) -> None:
    """The copy is for everybody; what the controller can read, such as its key for the nodes, is not."""
    own = office.folder / "policies" / "gist"
    weights.write(own / "default.safetensors")
    (own / "policy.yaml").write_text(weights.YAML)
    secret = office.folder / "id_ed25519"
    secret.write_text("secret")
    (own / "default.card.yaml").symlink_to(secret)
    version = load_policy(own).version
    with pytest.raises(GpuschedError, match=r"default\.card\.yaml is a link"):
        office.promote("gist", path=str(own), version=version)
    assert not [f for f in (office.state / "policies").rglob("*") if f.is_file()]
    (own / "default.card.yaml").unlink()
    (own / "default.card.yaml").write_text("trained_at: now\n")
    office.promote("gist", path=str(own), version=version)
    assert (office.state / "policies" / version / "gist" / "default.card.yaml").read_text() == "trained_at: now\n"


def test_a_promoted_policy_is_a_copy_of_the_evaluated_one(office: Office) -> None:
    seen = load_policy(office.path("mine")).version
    office.promote("mine")
    office.write("mine", "order: ljf\n")
    assert (
        load_active_policies(office.store, office.inventory, {"p": office.last().spec}, NOW).policies["p"].order
        == "sjf"
    )
    for ask in (office.promote, office.shadow):
        with pytest.raises(GpuschedError, match=f"was {seen}: it has changed"):
            ask("mine", version=seen)
        with pytest.raises(GpuschedError, match="partition"):
            ask("mine", partition="q")
        for version in ("0", "~"):
            with pytest.raises(GpuschedError, match=f"was {version}: it has changed"):
                ask("mine", version=version)
    Path(office.path("mine")).unlink()
    for ask in (office.promote, office.shadow):
        with pytest.raises(GpuschedError):
            ask("mine", path=str(office.folder / "policies/mine.yaml"), version=seen)


def test_a_rollback_gives_the_file_back_its_word(office: Office) -> None:
    office.promote("mine")
    promoted = office.last()
    office.rollback()
    made = office.last()
    assert (made.act, made.user, made.reason, made.spec.name, made.from_name) == (
        "rollback",
        "bob",
        "worse",
        "easy",
        "mine",
    )
    assert (made.from_version, made.override, made.back_to) == (promoted.spec.version, False, None)
    with pytest.raises(GpuschedError, match="p: there is no earlier policy"):
        office.rollback()


def test_rollbacks_go_back_step_by_step_to_what_was_promoted(office: Office) -> None:
    office.write("other", "order: ljf\n")
    office.promote("mine")
    office.promote("other")
    office.rollback()
    assert (office.in_charge(), office.last().override) == ("mine", True)
    office.rollback()
    assert (office.in_charge(), office.last().override) == ("easy", False)


def test_changes_of_files_are_recorded_first(office: Office) -> None:
    office.in_charge()
    (partition,) = office.inventory.partitions
    named = msgspec.structs.replace(partition, policy="mine")
    office.inventory = msgspec.structs.replace(office.inventory, partitions=(named,))
    office.promote("easy")
    assert [e.data["act"] for e in office.events("policy_changed")] == ["inventory", "promote"]
    assert (office.last().from_name, office.last().declared) == ("mine", "mine")
    office.rollback()
    assert office.in_charge() == "mine"
    office.write("mine", "order: ljf\n")
    charge = load_active_policies(office.store, office.inventory, load_policies(office.inventory), office.now)
    assert (charge.policies["p"].order, charge.digests, office.last().act) == ("ljf", {}, "files")
    office.promote("easy")
    charge = load_active_policies(office.store, office.inventory, load_policies(office.inventory), office.now)
    assert charge.digests == {"p": ""}, "of what was promoted, those of agents are looked at"


def test_a_rollback_to_the_files_takes_them_as_they_are_now(office: Office) -> None:
    (partition,) = office.inventory.partitions
    named = msgspec.structs.replace(partition, policy="mine")
    office.inventory = msgspec.structs.replace(office.inventory, partitions=(named,))
    office.promote("easy")
    office.write("mine", "order: ljf\n")
    office.rollback()
    assert (office.last().spec.order, office.last().override) == ("ljf", False)


def test_weights_are_checked_of_what_was_promoted_only(office: Office) -> None:
    for name, override in (("easy", False), ("mine", True), ("fifo", True)):
        before = office.store.live_changes().get("p")
        office.store.add_policy_change(
            PolicyChange(
                time=NOW, partition="p", user="", act="promote", reason="", spec=load_policy(office.path(name)),
                override=override, declared="easy", digest=f"of {name}", back_to=before.seq if before else None,
            )
        )  # fmt: skip
    office.rollback()
    assert (office.last().spec.name, office.last().digest) == ("mine", "of mine")
    office.rollback()
    assert (office.last().spec.name, office.last().digest) == ("easy", "")


def test_a_policy_that_cannot_be_read_is_one_line(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    version = load_policy(office.path("mine")).version
    monkeypatch.setattr("gpusched.controller.promoting.load_policy", forbidden)
    with pytest.raises(GpuschedError, match=r"mine\.yaml cannot be read: Permission denied"):
        office.promote("mine", version=version)


def test_missing_files_do_not_prevent_a_rollback(office: Office) -> None:
    (partition,) = office.inventory.partitions
    named = msgspec.structs.replace(partition, policy="mine")
    office.inventory = msgspec.structs.replace(office.inventory, partitions=(named,))
    office.promote("easy")
    Path(office.path("mine")).unlink()
    office.rollback()
    assert (office.last().spec.name, office.last().spec.order, office.last().override) == ("mine", "sjf", True)


def test_a_promotion_ends_the_shadow_of_the_same(office: Office) -> None:
    office.shadow("mine")
    begun = office.store.shadows()["p"]
    assert (begun.spec.name, begun.since, begun.by, begun.until) == ("mine", office.now, "ann", None)
    office.write("other", "order: ljf\n")
    for one, another in (("other", "mine"), ("mine", "other")):
        office.shadow(one)
        office.promote(another)
        assert office.store.shadows()["p"].until is None
    begun = office.store.shadows()["p"]
    office.promote("mine")
    assert office.store.shadows()["p"].until == office.now
    (ended,) = office.events("shadow_ended")
    assert (ended.user, ended.data) == ("ann", {"partition": "p", "policy": "mine", "version": begun.spec.version})
    ended_at = office.now
    office.rollback()
    office.promote("mine")
    assert office.store.shadows()["p"].until == ended_at, "it had ended"


def test_a_shadow_begins_anew_and_ends_once(office: Office) -> None:
    off = ShadowOff(time=NOW, partition="p")
    with pytest.raises(GpuschedError, match="no shadow policy in p"):
        office.handler().shadow_off(off, "ann", office.now)
    office.shadow("mine")
    office.store.put_shadow(msgspec.structs.replace(office.store.shadows()["p"], decisions=7))
    office.handler().shadow_off(off, "bob", office.now)
    ended: Shadow = office.store.shadows()["p"]
    assert (ended.until, ended.decisions) == (office.now, 7)
    with pytest.raises(GpuschedError, match="no shadow policy in p"):
        office.handler().shadow_off(off, "ann", office.now)
    office.shadow("mine")
    assert (office.store.shadows()["p"].until, office.store.shadows()["p"].decisions) == (None, 0)
    assert [(e.kind, e.user) for e in office.store.events()] == [
        ("shadow_began", "ann"), ("shadow_ended", "bob"), ("shadow_began", "ann"),
    ]  # fmt: skip


def test_modes_are_of_slurm_and_go_with_the_change(office: Office) -> None:
    with pytest.raises(GpuschedError, match="p is not a partition of Slurm, so it has no mode"):
        office.promote("mine", mode=SlurmMode.DECIDE)
    office.promote("mine")
    assert office.last().mode is None
    assert live_modes(office.inventory, office.store) == {}
    office.rollback()

    office.inventory = msgspec.structs.replace(office.inventory, engine="slurm")

    def mode() -> SlurmMode:
        return live_modes(office.inventory, office.store)["p"]

    assert mode() is SlurmMode.OBSERVE
    office.promote("mine", mode=SlurmMode.ADVISE)
    office.promote("mine", mode=SlurmMode.DECIDE)
    assert (mode(), office.events("policy_changed")[-1].data["mode"]) == (SlurmMode.DECIDE, "decide")
    with pytest.raises(GpuschedError, match="is already live in p"):
        office.promote("mine", mode=SlurmMode.DECIDE)
    with pytest.raises(GpuschedError, match="is already live in p"):
        office.promote("mine")
    office.promote("sjf")
    assert (office.in_charge(), mode()) == ("sjf", SlurmMode.DECIDE), "without a word it stays"
    steps = []
    for _ in range(3):
        office.rollback()
        steps.append((office.in_charge(), mode()))
    assert steps == [("mine", SlurmMode.DECIDE), ("mine", SlurmMode.ADVISE), ("easy", SlurmMode.OBSERVE)]


def test_a_policy_that_only_a_file_names_observes(office: Office) -> None:
    office.inventory = msgspec.structs.replace(office.inventory, engine="slurm")
    office.promote("mine", mode=SlurmMode.DECIDE)
    (partition,) = office.inventory.partitions
    edited = (msgspec.structs.replace(partition, policy="sjf"),)
    office.inventory = msgspec.structs.replace(office.inventory, partitions=edited)
    assert live_modes(office.inventory, office.store)["p"] is SlurmMode.OBSERVE
    assert office.in_charge() == "sjf"
    assert live_modes(office.inventory, office.store)["p"] is SlurmMode.OBSERVE
