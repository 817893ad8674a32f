"""A policy's life by the commands: edit, cycle, wait until it is done."""

from __future__ import annotations

from gpusched.config.inventory import load_inventory
from gpusched.config.policies import load_policies
from gpusched.controller.promoting import load_active_policies
from gpusched.queue.store import Store
from tests.cli.conftest import Result, Site


def cycle(site: Site) -> dict[str, str]:
    """Handle policies as a controller does in a cycle; partition -> active policy."""
    site.apply_inbox()
    inventory = load_inventory(site.inventory)
    store = Store.create_or_open(site.state)
    charge = load_active_policies(store, inventory, load_policies(inventory), 0.0)
    store.close()
    return {name: spec.name for name, spec in charge.policies.items()}


def done(result: Result) -> Result:
    """It worked; that no controller runs here may be said."""
    assert result.code == 0, result.err
    return result


def edit(site: Site, old: str, new: str) -> None:
    text = site.inventory.read_text()
    assert old in text
    site.inventory.write_text(text.replace(old, new))


def live(site: Site) -> dict[str, str]:
    return {r["partition"]: r["name"] for r in site.call("policy", "list", "--json").json if r["state"] == "live"}
