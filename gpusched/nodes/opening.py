"""Which transport a node is reached by."""

from __future__ import annotations

from gpusched.model.resources import Node, Settings
from gpusched.nodes.transport import Transport, TransportError


def open_transport(node: Node, settings: Settings) -> Transport:
    """Return the transport that ``node`` declares. Nothing is connected before the first command.

    Raises:
        TransportError: It declares none.
    """
    if node.transport == "none":
        raise TransportError("unreachable", f"{node.name}: the inventory says transport: none", "see 'gpusched nodes'")
    if node.transport == "local":
        from gpusched.nodes.local import LocalTransport

        return LocalTransport(node.name)
    from gpusched.nodes.ssh import SshTransport

    return SshTransport(node, settings)
