"""The command view."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from hacrl.cli.terminal import errors_as_messages, note

commands = typer.Typer()


@commands.command()
def view(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[TARGET]", help="A run, a folder of runs, a suite's folder or a hub's URL."
        ),
    ] = "runs",
    host: Annotated[str, typer.Option(help="Address to listen on; others need a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free port.")] = 8720,
    browser: Annotated[
        bool | None,
        typer.Option("--open/--no-browser", help="Open a browser (default: in a terminal)."),
    ] = None,
    export: Annotated[
        Path | None, typer.Option(help="Write one HTML file instead, and start no server.")
    ] = None,
    token: Annotated[
        str,
        typer.Option(envvar="HACRL_VIEW_TOKEN", help="Ask for this token (default: a new one)."),
    ] = "",
) -> None:
    """Show runs, suites or a hub as a web page, or write the page to a file."""
    with errors_as_messages(trust_code=False):
        from hacrl.view.source import open_source

        source = open_source(target)
        if export is not None:
            from hacrl.view.export import write_export

            return note(f"page: {write_export(source, export)}")
        from hacrl.view.server import serve

        def ready(address: str) -> None:
            print(f"{target} is shown at {address}  (Ctrl-C stops)", flush=True)
            if sys.stderr.isatty() if browser is None else browser:
                import webbrowser

                webbrowser.open(address)

        serve(source, host, port, token, ready)
