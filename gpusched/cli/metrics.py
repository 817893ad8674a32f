"""``gpusched metrics``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import output
from gpusched.cli.logoptions import LogFormatOption
from gpusched.cli.together import refuse_others
from gpusched.errors import UsageError

app = typer.Typer()


@app.command("metrics")
def metrics(
    context: typer.Context,
    textfile: Annotated[
        str | None,
        typer.Option(
            "--textfile", metavar="FILE", help="Write the text format of node_exporter's collector; -: print."
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="[HOST:]PORT", help="Serve /metrics over HTTP until stopped.")
    ] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Print the Grafana dashboard.")] = False,
    alerts: Annotated[bool, typer.Option("--alerts", help="Print the alert rules for Prometheus.")] = False,
    log_format: LogFormatOption = None,
) -> None:
    """Metrics for Prometheus (OpenMetrics)."""
    if dashboard:
        refuse_others(context, "--dashboard")
        import json

        from gpusched.views.dashboard import dashboard as dashboard_of

        output.print_text(json.dumps(dashboard_of(), indent=1) + "\n")
        return
    if alerts:
        refuse_others(context, "--alerts")
        from gpusched.config.paths import ALERT_RULES

        output.print_text(ALERT_RULES.read_text("utf-8"))
        return
    from gpusched.client.context import Client

    client = Client()
    if listen is not None:
        from gpusched.cli.logoptions import start_log
        from gpusched.client.metricsserver import parse_address, serve

        refuse_others(context, "--listen", "log_format")
        parse_address(listen)  # what is wrong with the command line is no line of the log
        start_log("gpusched.client", log_format)
        serve(client, listen)
        return
    if log_format is not None:
        raise UsageError("--log-format needs --listen", "add it")
    from gpusched.client.metrics import collect
    from gpusched.views.metrics import metrics_text

    text = metrics_text(collect(client.reader), openmetrics=textfile is None)
    if textfile in (None, "-"):
        output.print_text(text)
    elif textfile is not None:
        from gpusched.client.metrics import write_textfile

        write_textfile(textfile, text)
